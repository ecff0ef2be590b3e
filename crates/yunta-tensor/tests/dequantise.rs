//! The stored formats against the vectors of the `gguf` Python package.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use safetensors::SafeTensors;
use yunta_tensor::{DType, dequantise_row};

const TYPES: [(&str, DType); 15] = [
    ("F16", DType::F16),
    ("BF16", DType::BF16),
    ("Q4_0", DType::Q4_0),
    ("Q4_1", DType::Q4_1),
    ("Q5_0", DType::Q5_0),
    ("Q5_1", DType::Q5_1),
    ("Q8_0", DType::Q8_0),
    ("Q2_K", DType::Q2K),
    ("Q3_K", DType::Q3K),
    ("Q4_K", DType::Q4K),
    ("Q5_K", DType::Q5K),
    ("Q6_K", DType::Q6K),
    ("IQ4_NL", DType::IQ4NL),
    ("IQ4_XS", DType::IQ4XS),
    ("MXFP4", DType::MXFP4),
];

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[test]
fn every_format_dequantises_to_the_bits_of_gguf() {
    let path =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/gguf/dequant_vectors.safetensors");
    let data = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&data).unwrap();
    for (name, dtype) in TYPES {
        for (blocks, values) in [("blocks", "values"), ("q_blocks", "q_values")] {
            let (Ok(blocks), Ok(values)) = (
                file.tensor(&format!("{name}.{blocks}")),
                file.tensor(&format!("{name}.{values}")),
            ) else {
                assert_eq!(blocks, "q_blocks", "{name} has no vectors");
                continue;
            };
            let expected = floats(values.data());
            let mut got = vec![0.0; expected.len()];
            dequantise_row(dtype, blocks.data(), &mut got).unwrap();
            for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
                let same = g.to_bits() == e.to_bits() || (g.is_nan() && e.is_nan());
                assert!(same || (*g == 0.0 && *e == 0.0), "{name} element {i}: {g} is not {e}");
            }
        }
    }
}

#[test]
fn rows_of_a_wrong_size_are_refused() {
    for (name, dtype) in TYPES {
        let n = dtype.block_elements();
        let bytes = vec![0u8; dtype.block_bytes() * 2 + 1];
        let mut out = vec![0.0; n];
        assert!(dequantise_row(dtype, &bytes, &mut out).is_err(), "{name}: too many bytes");
        assert!(dequantise_row(dtype, &[], &mut out).is_err(), "{name}: no bytes");
        if n > 1 {
            assert!(dequantise_row(dtype, &bytes[..1], &mut vec![0.0; n - 1]).is_err(), "{name}");
        }
    }
    assert!(dequantise_row(DType::I32, &[0; 4], &mut [0.0]).is_err());
}

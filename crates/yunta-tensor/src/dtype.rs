//! Element and block types as they lie in files and in memory.

use std::fmt;

/// The type of a stored tensor: a plain element type, or one of the block-quantised formats of
/// the GGUF specification (`ggml` type names; sizes from `ggml-common.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)] // the names are the formats' own
pub enum DType {
    F64,
    F32,
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    U8,
    Bool,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    IQ4NL,
    IQ4XS,
    MXFP4,
}

impl DType {
    /// Elements per block: 1 for plain types, 32 or 256 for quantised ones.
    pub const fn block_elements(self) -> usize {
        match self {
            Self::F64 | Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::I64 | Self::I32 | Self::I16 | Self::I8 | Self::U8 | Self::Bool => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::IQ4NL | Self::MXFP4 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K | Self::IQ4XS => 256,
        }
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::BF16 | Self::I16 => 2,
            Self::I8 | Self::U8 | Self::Bool => 1,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::IQ4NL => 18,
            Self::IQ4XS => 136,
            Self::MXFP4 => 17,
        }
    }

    /// Bytes of a row of `elements`, or `None` if it is no whole number of blocks or overflows.
    pub fn row_bytes(self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        (elements / self.block_elements()).checked_mul(self.block_bytes())
    }

    /// Whether values are stored as quantised blocks.
    pub const fn is_quantised(self) -> bool {
        self.block_elements() > 1
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::IQ4NL => "IQ4_NL",
            Self::IQ4XS => "IQ4_XS",
            other => return fmt::Debug::fmt(other, f),
        };
        f.write_str(name)
    }
}

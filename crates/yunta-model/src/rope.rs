//! Rotary position embedding and its scalings.

use serde_json::Value;

/// Frequencies of a rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rope {
    /// Radians per position for each pair of elements.
    frequencies: Vec<f32>,
    /// Factor on both cosine and sine (yarn's attention factor).
    magnitude: f32,
}

fn number(v: &Value, names: &[&str]) -> Option<f64> {
    names.iter().find_map(|n| v.get(n).and_then(Value::as_f64))
}

impl Rope {
    /// `dims`: elements of a head that are rotated. `scaling`: the Hugging Face `rope_scaling`
    /// object. `context`: the `max_position_embeddings` that scalings may refer to.
    ///
    /// # Errors
    /// Says what is wrong with the scaling.
    pub(crate) fn new(
        dims: usize,
        theta: f64,
        scaling: Option<&Value>,
        context: usize,
    ) -> Result<Self, String> {
        let base: Vec<f64> =
            (0..dims / 2).map(|i| theta.powf(-((2 * i) as f64) / dims as f64)).collect();
        let plain = |f: Vec<f64>, magnitude: f64| Self {
            frequencies: f.into_iter().map(|x| x as f32).collect(),
            magnitude: magnitude as f32,
        };
        let Some(scaling) = scaling.filter(|s| s.is_object()) else { return Ok(plain(base, 1.0)) };
        let kind = ["rope_type", "type"].iter().find_map(|n| scaling.get(n)?.as_str());
        let factor = || match number(scaling, &["factor"]) {
            Some(f) if f.is_finite() && f > 0.0 => Ok(f),
            _ => Err("`factor` must be a positive number".to_owned()),
        };
        match kind.unwrap_or("default") {
            "default" | "none" => Ok(plain(base, 1.0)),
            "linear" => {
                let factor = factor()?;
                Ok(plain(base.into_iter().map(|f| f / factor).collect(), 1.0))
            }
            "llama3" => Ok(plain(llama3(&base, scaling, factor()?, context)?, 1.0)),
            "yarn" => {
                let (frequencies, magnitude) = yarn(&base, theta, scaling, factor()?, context);
                Ok(plain(frequencies, magnitude))
            }
            other => Err(format!("scaling `{other}` is not known (linear, llama3, yarn are)")),
        }
    }

    /// Divides each frequency by a factor (the `rope_freqs` tensor of GGUF files).
    pub(crate) fn divided_by(mut self, factors: &[f32]) -> Result<Self, String> {
        if factors.len() != self.frequencies.len() {
            let (got, want) = (factors.len(), self.frequencies.len());
            return Err(format!("{got} frequency factors for {want} frequencies"));
        }
        for (f, factor) in self.frequencies.iter_mut().zip(factors) {
            *f /= factor;
        }
        Ok(self)
    }

    /// Columns of [`Rope::angles`].
    pub(crate) fn cols(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// For each position, cosines and then sines of all pairs.
    pub(crate) fn angles(&self, positions: impl Iterator<Item = usize>) -> Vec<f32> {
        let mut out = Vec::new();
        for position in positions {
            let angles = self.frequencies.iter().map(|f| position as f32 * f);
            out.extend(angles.clone().map(|a| a.cos() * self.magnitude));
            out.extend(angles.map(|a| a.sin() * self.magnitude));
        }
        out
    }
}

/// Llama 3.1's scaling: long waves are stretched by `factor`, short ones kept, with a ramp
/// between. Source: `transformers`, `modeling_rope_utils.py`.
fn llama3(base: &[f64], scaling: &Value, factor: f64, context: usize) -> Result<Vec<f64>, String> {
    let low = number(scaling, &["low_freq_factor"]).unwrap_or(1.0);
    let high = number(scaling, &["high_freq_factor"]).unwrap_or(4.0);
    let old = number(scaling, &["original_max_position_embeddings"]).unwrap_or(context as f64);
    if high <= low || old <= 0.0 {
        return Err("`high_freq_factor` must be greater than `low_freq_factor`".to_owned());
    }
    let scale = |f: &f64| {
        let wavelength = 2.0 * std::f64::consts::PI / f;
        if wavelength > old / low {
            f / factor
        } else if wavelength < old / high {
            *f
        } else {
            let smooth = (old / wavelength - low) / (high - low);
            (1.0 - smooth) * f / factor + smooth * f
        }
    };
    Ok(base.iter().map(scale).collect())
}

/// YaRN (Peng et al., 2023), as `transformers` computes it: frequencies and attention factor.
fn yarn(base: &[f64], theta: f64, s: &Value, factor: f64, context: usize) -> (Vec<f64>, f64) {
    let dims = 2.0 * base.len() as f64;
    let old = number(s, &["original_max_position_embeddings"]).unwrap_or(context as f64);
    let fast = number(s, &["beta_fast"]).unwrap_or(32.0);
    let slow = number(s, &["beta_slow"]).unwrap_or(1.0);
    let truncate = s.get("truncate").and_then(Value::as_bool).unwrap_or(true);
    // The pair that turns `rotations` times over the original context.
    let pair = |rotations: f64| {
        dims * (old / (rotations * 2.0 * std::f64::consts::PI)).ln() / (2.0 * theta.ln())
    };
    let (mut low, mut high) = (pair(fast), pair(slow));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    let (low, mut high) = (low.max(0.0), high.min(dims - 1.0));
    if low == high {
        high += 0.001;
    }
    let frequencies = base.iter().enumerate().map(|(i, f)| {
        let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        f / factor * ramp + f * (1.0 - ramp)
    });
    let magnitude = |factor: f64, m: f64| {
        if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
    };
    let attention = number(s, &["attention_factor"]).unwrap_or_else(|| {
        match (number(s, &["mscale"]), number(s, &["mscale_all_dim"])) {
            (Some(m), Some(all)) if m != 0.0 && all != 0.0 => {
                magnitude(factor, m) / magnitude(factor, all)
            }
            _ => magnitude(factor, 1.0),
        }
    });
    (frequencies.collect(), attention)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn linear_scaling_stretches_positions() {
        let plain = Rope::new(8, 10000.0, None, 512).unwrap();
        let scaled =
            Rope::new(8, 10000.0, Some(&json!({"type": "linear", "factor": 2.0})), 512).unwrap();
        assert_eq!(plain.angles([3].into_iter()), scaled.angles([6].into_iter()));
    }

    #[test]
    fn scalings_without_sense_are_refused() {
        for bad in [
            json!({"rope_type": "spiral"}),
            json!({"rope_type": "linear"}),
            json!({"rope_type": "linear", "factor": 0}),
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}),
        ] {
            assert!(Rope::new(8, 10000.0, Some(&bad), 512).is_err(), "{bad}");
        }
        assert!(Rope::new(8, 1e4, None, 512).unwrap().divided_by(&[1.0]).is_err());
    }
}

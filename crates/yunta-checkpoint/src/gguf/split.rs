//! Models cut into several GGUF files: `NAME-00001-of-00003.gguf` and so on, as
//! `llama-gguf-split` writes them.

use std::path::{Path, PathBuf};

use super::{Metadata, MetadataValue};
use crate::CheckpointError;

/// The number has five digits in the names.
const PARTS_MAX: u64 = 99_999;

/// The parts that follow the first file; none if the model is whole.
pub(crate) fn further_parts(
    path: &Path,
    metadata: &Metadata,
) -> Result<Vec<PathBuf>, CheckpointError> {
    let bad = |reason: String| CheckpointError::malformed(path, reason);
    let number = |key: &str| metadata.get(key).and_then(MetadataValue::unsigned);
    let count = match number("split.count") {
        None | Some(0 | 1) => return Ok(Vec::new()),
        Some(n) if n > PARTS_MAX => return Err(bad(format!("`split.count` is {n}"))),
        Some(n) => n,
    };
    match number("split.no") {
        Some(0) => {}
        Some(n) => {
            return Err(bad(format!("it is part {} of {count}: open part 1", n.saturating_add(1))));
        }
        None => return Err(bad("`split.count` without `split.no`".to_owned())),
    }
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let stem = name.strip_suffix(&format!("-00001-of-{count:05}.gguf")).ok_or_else(|| {
        bad(format!("part 1 of {count} must be named NAME-00001-of-{count:05}.gguf"))
    })?;
    Ok((2..=count)
        .map(|n| path.with_file_name(format!("{stem}-{n:05}-of-{count:05}.gguf")))
        .collect())
}

/// Whether a file is named as a part other than the first.
pub(crate) fn is_further_part(path: &Path) -> bool {
    let stem = path.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
    let Some((rest, count)) = stem.rsplit_once("-of-") else { return false };
    let Some((_, part)) = rest.rsplit_once('-') else { return false };
    let is_number = |s: &str| s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
    is_number(count) && is_number(part) && part != "00001"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(no: u64, count: u64) -> Metadata {
        let pair = |key: &str, n| (key.to_owned(), MetadataValue::Unsigned(n));
        Metadata::from([pair("split.no", no), pair("split.count", count)])
    }

    #[test]
    fn parts_are_named_after_the_first() {
        let first = Path::new("dir/m-00001-of-00003.gguf");
        let parts = further_parts(first, &metadata(0, 3)).unwrap();
        assert_eq!(
            parts,
            [Path::new("dir/m-00002-of-00003.gguf"), Path::new("dir/m-00003-of-00003.gguf")]
        );
        assert!(further_parts(Path::new("whole.gguf"), &Metadata::new()).unwrap().is_empty());
    }

    #[test]
    fn only_the_first_part_is_opened_and_only_under_its_name() {
        assert!(further_parts(Path::new("m-00002-of-00003.gguf"), &metadata(1, 3)).is_err());
        assert!(further_parts(Path::new("renamed.gguf"), &metadata(0, 3)).is_err());
        assert!(further_parts(Path::new("m-00001-of-00003.gguf"), &metadata(0, u64::MAX)).is_err());
        assert!(further_parts(Path::new("m.gguf"), &metadata(u64::MAX, 2)).is_err());
    }

    #[test]
    fn further_parts_are_known_by_name() {
        assert!(is_further_part(Path::new("a/m-00002-of-00003.gguf")));
        for name in ["m-00001-of-00003.gguf", "m.gguf", "best-of-2.gguf", "m-1-of-3.gguf"] {
            assert!(!is_further_part(Path::new(name)), "{name}");
        }
    }
}

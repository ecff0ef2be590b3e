//! Where tests look.

use std::path::{Path, PathBuf};

use yunta_hub::{Hub, HuggingFace};

pub(crate) fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(path)
}

/// A hub of its own, with nothing in it, below `root`.
pub(crate) fn empty_hub(root: &Path) -> Hub {
    Hub {
        folders: vec![root.join("nfs")],
        cache: root.join("cache"),
        huggingface: HuggingFace {
            cache: root.join("hf/hub"),
            endpoint: Some("http://127.0.0.1:9".to_owned()),
            token: None,
            offline: false,
        },
        python: root.join("no-python"),
        verify: false,
    }
}

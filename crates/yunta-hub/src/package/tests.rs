//! With the real pip, from a folder of packages made here: no network.

use std::cell::Cell;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use tempfile::TempDir;
use zip::write::SimpleFileOptions;

use super::*;
use crate::Silent;
use crate::check::hex;

const PARTS: [&[u8]; 2] = [b"the first half, ", b"the second half"];

/// A folder with the packages of a toy model, and a place for the model.
struct Toy {
    root: TempDir,
    entry: Entry,
}

impl Toy {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let make = |(number, content): (usize, &&[u8])| {
            let module = format!("yunta_toy_part{number}");
            let member = format!("{module}/toy.gguf.part{number}");
            let package_bytes = make_wheel(root.path(), &module, &member, content);
            Part {
                package: format!("yunta-toy-part{number}==1.0"),
                package_bytes,
                member,
                member_bytes: content.len() as u64,
            }
        };
        let entry = Entry {
            name: "toy".to_owned(),
            aliases: Vec::new(),
            license: "MIT".to_owned(),
            file: "toy.gguf".to_owned(),
            bytes: PARTS.concat().len() as u64,
            sha256: hex(&Sha256::digest(PARTS.concat())),
            parts: PARTS.iter().enumerate().map(make).collect(),
        };
        Self { root, entry }
    }

    fn wanted(&self) -> PathBuf {
        self.root.path().join("models/toy/toy.gguf")
    }

    /// A Python whose pip knows this folder only; `settings` come on top.
    fn python(&self, settings: &str) -> PathBuf {
        let folder = self.root.path().display();
        let isolation = "export PIP_CONFIG_FILE=/dev/null PIP_RETRIES=0";
        script(
            &self.root.path().join("python"),
            &format!(
                "{isolation} PIP_NO_INDEX=1 PIP_FIND_LINKS='{folder}'\n{settings}\nexec python3 \"$@\""
            ),
        )
    }

    fn fetch(&self, python: &Path, progress: &dyn Progress) -> Result<(), HubError> {
        fetch(python, &self.entry, &self.wanted(), vec![self.wanted()], progress)
    }

    fn files_beside_wanted(&self) -> Vec<String> {
        let entries = fs::read_dir(self.wanted().parent().unwrap()).unwrap();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }
}

fn make_wheel(folder: &Path, module: &str, member: &str, content: &[u8]) -> u64 {
    let path = folder.join(format!("{module}-1.0-py3-none-any.whl"));
    let mut zip = zip::ZipWriter::new(File::create(&path).unwrap());
    let info = format!("{module}-1.0.dist-info");
    let metadata = format!("Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n");
    let wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n";
    for (name, content) in [
        (member, content),
        (&format!("{info}/METADATA"), metadata.as_bytes()),
        (&format!("{info}/WHEEL"), wheel.as_bytes()),
        (&format!("{info}/RECORD"), b""),
    ] {
        zip.start_file(name, SimpleFileOptions::default()).unwrap();
        zip.write_all(content).unwrap();
    }
    zip.finish().unwrap();
    path.metadata().unwrap().len()
}

/// An executable shell script. Another process writes it: a descriptor of this one, open for
/// writing while another test starts a process, would keep it from being run.
fn script(path: &Path, text: &str) -> PathBuf {
    let mut writer = Command::new("sh")
        .args(["-c", "cat > \"$0\" && chmod +x \"$0\""])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    writer.stdin.take().unwrap().write_all(format!("#!/bin/sh\n{text}\n").as_bytes()).unwrap();
    assert!(writer.wait().unwrap().success());
    path.to_owned()
}

#[derive(Default)]
struct Count {
    total: Cell<u64>,
    arrived: Cell<u64>,
    ended: Cell<bool>,
}

impl Progress for Count {
    fn start(&self, total: Option<u64>, _: &str) {
        self.total.set(total.unwrap());
    }
    fn advance(&self, bytes: u64) {
        self.arrived.set(self.arrived.get() + bytes);
    }
    fn finish(&self) {
        self.ended.set(true);
    }
    fn message(&self, _: &str) {}
}

#[test]
fn packages_become_the_file_and_nothing_else_is_left() {
    let toy = Toy::new();
    let count = Count::default();
    fs::create_dir_all(toy.wanted().with_file_name(".fetch-1-2/part-0")).unwrap();
    toy.fetch(&toy.python(""), &count).unwrap();
    assert_eq!(fs::read(toy.wanted()).unwrap(), PARTS.concat());
    assert_eq!(toy.files_beside_wanted(), ["toy.gguf"]);
    assert_eq!(count.total.get(), toy.entry.download_bytes());
    assert_eq!(count.arrived.get(), count.total.get());
    assert!(count.ended.get());
}

#[test]
fn a_file_with_another_hash_is_not_kept() {
    let mut toy = Toy::new();
    toy.entry.sha256 = "0".repeat(64);
    let e = toy.fetch(&toy.python(""), &Silent).unwrap_err();
    assert!(matches!(e, HubError::Damaged { .. }), "{e}");
    assert!(toy.files_beside_wanted().is_empty());
}

#[test]
fn a_package_that_is_nowhere_is_reported_with_the_words_of_pip() {
    let mut toy = Toy::new();
    toy.entry.parts[0].package = "yunta-toy-part9==1.0".to_owned();
    let count = Count::default();
    let e = toy.fetch(&toy.python(""), &count).unwrap_err();
    assert!(matches!(e, HubError::Package { .. }), "{e}");
    let text = e.to_string();
    assert!(text.contains("No matching distribution found for yunta-toy-part9==1.0"), "{text}");
    assert!(text.contains(&toy.wanted().display().to_string()), "{text}");
    assert!(count.ended.get());
}

#[test]
fn an_index_out_of_reach_is_called_so() {
    let toy = Toy::new();
    // Nobody listens where somebody just did.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let python = toy.python(&format!(
        "unset PIP_NO_INDEX PIP_FIND_LINKS http_proxy HTTP_PROXY\n\
         export PIP_INDEX_URL=http://{address}/ PIP_RETRIES=1"
    ));
    let e = toy.fetch(&python, &Silent).unwrap_err();
    assert!(matches!(e, HubError::Unreachable { .. }), "{e}");
    assert!(e.is_retriable() && e.to_string().contains("yunta-toy-part0"), "{e}");
}

#[test]
fn without_python_the_error_says_what_to_install() {
    let toy = Toy::new();
    let e = toy.fetch(&toy.root.path().join("no-python"), &Silent).unwrap_err();
    assert!(matches!(e, HubError::NoInstaller { .. }), "{e}");
    let text = e.to_string();
    for part in ["no-python", "python3-pip", "YUNTA_PYTHON", "models/toy/toy.gguf"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_python_without_pip_makes_an_environment_that_has_it() {
    let toy = Toy::new();
    let whole = toy.python("");
    let bare = script(
        &toy.root.path().join("bare"),
        &format!(
            "case \"$1\" in -c) exit 77;; esac\n\
             mkdir -p \"$3/bin\" && ln -s '{}' \"$3/bin/python\"",
            whole.display()
        ),
    );
    toy.fetch(&bare, &Silent).unwrap();
    assert_eq!(fs::read(toy.wanted()).unwrap(), PARTS.concat());
    assert_eq!(toy.files_beside_wanted(), ["toy.gguf"]);
}

#[test]
fn a_python_without_pip_and_environments_is_reported() {
    let toy = Toy::new();
    let text = "[ \"$1\" = -c ] && exit 77\necho ensurepip is not available\nexit 1";
    let bare = script(&toy.root.path().join("bare"), text);
    let e = toy.fetch(&bare, &Silent).unwrap_err();
    assert!(matches!(e, HubError::NoInstaller { .. }), "{e}");
    assert!(e.to_string().contains("ensurepip is not available"), "{e}");
}

/// The process that [`pip_ends_with_the_process_that_waits_for_it`] kills.
const VICTIM: &str = "YUNTA_HUB_TEST_VICTIM";

#[test]
fn pip_ends_with_the_process_that_waits_for_it() {
    let toy = Toy::new();
    if let Some(python) = std::env::var_os(VICTIM) {
        toy.fetch(Path::new(&python), &Silent).unwrap();
        return;
    }
    // An index that takes the question and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let python = toy.python(&format!(
        "unset PIP_NO_INDEX PIP_FIND_LINKS http_proxy HTTP_PROXY\n\
         export PIP_INDEX_URL=http://{}/ PIP_DEFAULT_TIMEOUT=600",
        silent.local_addr().unwrap()
    ));
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["pip_ends_with_the_process_that_waits_for_it", "--nocapture"])
        .env(VICTIM, python)
        .env("TMPDIR", toy.root.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut question = accept(&silent);
    // pip is now in the middle of its work.
    victim.kill().unwrap();
    victim.wait().unwrap();
    // Its end closes the connection.
    question.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let heard = question.read_to_end(&mut Vec::new()).map_err(|e| e.kind());
    assert!(matches!(heard, Ok(_) | Err(ErrorKind::ConnectionReset)), "pip goes on: {heard:?}");
}

fn accept(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(false).unwrap();
            return stream;
        }
        assert!(Instant::now() < deadline, "pip did not ask");
        std::thread::sleep(Duration::from_millis(20));
    }
}

//! Durability after failures: a killed process, and a truncated or corrupted file.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde_json::json;
use store::{
    Change, Draft, Expectation, Key, Location, Range, ResourceId, Store, Window,
    Write as StoreWrite,
};

const KILLS: usize = 200;
const WRITERS: usize = 8;

fn things() -> ResourceId {
    ResourceId::new("", "things")
}

fn draft(name: &str, round: u64) -> Draft {
    let filler = "x".repeat(usize::try_from(round % 3000).expect("small"));
    let value = json!({"apiVersion": "v1", "kind": "Thing", "metadata": {"name": name, "uid": name}, "round": round, "filler": filler});
    Draft::new(&value).expect("the object is well formed")
}

async fn put(store: &Store, name: &str, round: u64) -> Result<u64, store::WriteError> {
    let key = Key::new("", name);
    let expect = store
        .get(&things(), &key)
        .map_or(Expectation::Absent, |object| {
            Expectation::Revision(object.revision)
        });
    let write = StoreWrite {
        resource: things(),
        key,
        expect,
        requires: Vec::new(),
        change: Change::Put(draft(name, round)),
    };
    store.write(write).await.map(|object| object.revision)
}

fn open(directory: &Path) -> Store {
    Store::open(
        &Location::Directory(directory.to_owned()),
        Window::default(),
    )
    .expect("the store opens")
}

/// The writing half of the kill test: the same test program, started again with a directory in its environment.
#[tokio::test(flavor = "multi_thread")]
async fn writes_until_killed() {
    let Some(directory) = std::env::var_os("STORE_TO_WRITE") else {
        return;
    };
    let store = open(Path::new(&directory));
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let store = store.clone();
            tokio::spawn(async move {
                let name = format!("writer-{writer}");
                let start = store
                    .get(&things(), &Key::new("", &name))
                    .map_or(0, |object| {
                        object.value()["round"].as_u64().expect("a number")
                    });
                for round in start + 1.. {
                    let revision = put(&store, &name, round).await.expect("the write succeeds");
                    // One write call per line, so that a kill never truncates an acknowledgement.
                    let line = format!("acknowledged {writer} {round} {revision}\n");
                    std::io::stdout()
                        .write_all(line.as_bytes())
                        .expect("the parent reads");
                }
            })
        })
        .collect();
    for writer in writers {
        writer.await.unwrap();
    }
}

fn start_writer(directory: &Path) -> Child {
    Command::new(std::env::current_exe().expect("this program has a path"))
        .args(["--exact", "writes_until_killed", "--nocapture"])
        .env("STORE_TO_WRITE", directory)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the writer starts")
}

#[test]
fn every_acknowledged_write_survives_two_hundred_kills() {
    if std::env::var_os("STORE_TO_WRITE").is_some() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut acknowledged: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for kill in 0..KILLS {
        let mut child = start_writer(directory.path());
        let lines = BufReader::new(child.stdout.take().unwrap());
        // Kills after a random number of writes, and sometimes while the store is being opened.
        let enough = rand::random_range(0..if kill % 10 == 0 { 400 } else { 60 });
        let mut seen = 0;
        let mut killed = false;
        if enough == 0 {
            // Waits for nothing: the pause only chooses the instruction at which the process dies. A kill at any time, before
            // the first acknowledgement too, must leave every acknowledged write readable.
            std::thread::sleep(Duration::from_micros(rand::random_range(0..20_000)));
            child.kill().unwrap();
            killed = true;
        }
        for line in lines.lines().map_while(Result::ok) {
            let words: Vec<&str> = line.split(' ').collect();
            let ["acknowledged", writer, round, revision] = words.as_slice() else {
                continue;
            };
            let (round, revision) = (round.parse().unwrap(), revision.parse().unwrap());
            acknowledged.insert(format!("writer-{writer}"), (round, revision));
            seen += 1;
            if seen >= enough && !killed {
                child.kill().unwrap();
                killed = true;
            }
        }
        child.wait().unwrap();
        verify(directory.path(), &acknowledged, kill);
    }
    let total: u64 = acknowledged.values().map(|(round, _)| round).sum();
    assert!(
        total > KILLS as u64,
        "the writers wrote too little: {total}"
    );
}

fn verify(directory: &Path, acknowledged: &BTreeMap<String, (u64, u64)>, kill: usize) {
    let store = open(directory);
    let objects = store
        .list(&things(), &Range::namespace(""), None)
        .expect("the current revision never expires")
        .objects;
    let found: BTreeMap<String, (u64, u64)> = objects
        .iter()
        .map(|object| {
            let value = object.value();
            let round = value["round"].as_u64().expect("a number");
            assert_eq!(
                value["filler"].as_str().expect("text").len() as u64,
                round % 3000,
                "a torn write"
            );
            (object.key.name().to_owned(), (round, object.revision))
        })
        .collect();
    for (name, (round, revision)) in acknowledged {
        let (found_round, found_revision) = found
            .get(name)
            .unwrap_or_else(|| panic!("after kill {kill}, {name} is missing"));
        assert!(
            found_round >= round && found_revision >= revision,
            "after kill {kill}, {name} is at round {found_round}, {round} was acknowledged"
        );
    }
    close(&store);
}

fn close(store: &Store) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("a runtime starts");
    runtime.block_on(async { store.close().await });
}

/// A store with some objects and, unlike after a clean shutdown, with its write-ahead log.
fn prepared() -> (tempfile::TempDir, BTreeMap<String, u64>) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut child = start_writer(directory.path());
    let mut rounds = BTreeMap::new();
    let lines = BufReader::new(child.stdout.take().expect("piped"));
    let mut seen = 0;
    for line in lines.lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let ["acknowledged", writer, round, _] = words.as_slice() else {
            continue;
        };
        rounds.insert(format!("writer-{writer}"), round.parse().expect("a number"));
        seen += 1;
        if seen == 300 {
            child.kill().expect("the writer is killed");
        }
    }
    child.wait().expect("the writer ends");
    (directory, rounds)
}

fn copy(from: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().expect("a temporary directory");
    for entry in std::fs::read_dir(from).expect("readable") {
        let path = entry.expect("readable").path();
        std::fs::copy(&path, to.path().join(path.file_name().expect("a file"))).expect("copied");
    }
    to
}

/// Opens a damaged copy: either every acknowledged write is there, or the error says what to do.
fn recovers_or_refuses(directory: &Path, rounds: &BTreeMap<String, u64>, damage: &str) -> bool {
    match Store::open(
        &Location::Directory(directory.to_owned()),
        Window::default(),
    ) {
        Ok(store) => {
            for (name, round) in rounds {
                let object = store
                    .get(&things(), &Key::new("", name))
                    .unwrap_or_else(|| panic!("{damage}: {name} is missing"));
                let found = object.value()["round"].as_u64().expect("a number");
                assert!(
                    found >= *round,
                    "{damage}: {name} went back from {round} to {found}"
                );
            }
            close(&store);
            true
        }
        Err(error) => {
            let message = error.to_string();
            assert!(
                message.contains("backup") || message.contains("cannot open the store"),
                "{damage}: {message}"
            );
            false
        }
    }
}

#[test]
fn a_truncated_or_corrupted_file_is_recovered_or_refused() {
    if std::env::var_os("STORE_TO_WRITE").is_some() {
        return;
    }
    let (original, rounds) = prepared();
    let files: Vec<PathBuf> = ["store.sqlite3", "store.sqlite3-wal"]
        .iter()
        .map(PathBuf::from)
        .collect();
    let mut refused = 0;
    for file in &files {
        let length = std::fs::metadata(original.path().join(file)).unwrap().len();
        for step in 0..24 {
            let damaged = copy(original.path());
            let cut = length - (length * step / 24).min(length - 1);
            let handle = std::fs::OpenOptions::new()
                .write(true)
                .open(damaged.path().join(file))
                .unwrap();
            handle.set_len(cut - 1).unwrap();
            let damage = format!("{} truncated from {length} to {}", file.display(), cut - 1);
            refused += usize::from(!recovers_or_refuses(damaged.path(), &rounds, &damage));
        }
        for step in 0..40 {
            let damaged = copy(original.path());
            let at = if step < 20 {
                length - 1 - step * 37 % length
            } else {
                rand::random_range(0..length)
            };
            let path = damaged.path().join(file);
            let byte = std::fs::read(&path).unwrap()[usize::try_from(at).unwrap()];
            let mut handle = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            handle.seek(SeekFrom::Start(at)).unwrap();
            handle.write_all(&[byte ^ (1 << (step % 8))]).unwrap();
            let damage = format!("{} corrupted at {at} of {length}", file.display());
            refused += usize::from(!recovers_or_refuses(damaged.path(), &rounds, &damage));
        }
    }
    assert!(refused > 0, "no damage was detected");
    assert!(recovers_or_refuses(original.path(), &rounds, "no damage"));
}

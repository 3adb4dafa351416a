//! Durability after failures: a killed process, a truncated or corrupted file, a full disk, an I/O error.

mod support;

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use apiserver::store::{
    Change, Draft, Expectation, Key, Location, Range, ResourceId, Store, Window,
    Write as StoreWrite,
};
use serde_json::json;

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

async fn put(store: &Store, name: &str, round: u64) -> Result<u64, apiserver::store::WriteError> {
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

struct Mounted(tempfile::TempDir);

impl Mounted {
    fn new(size: &str) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(directory.path())
            .status();
        assert!(
            mounted.is_ok_and(|status| status.success()),
            "this test mounts a small file system: run it as root"
        );
        Self(directory)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// Counts the config maps, without the one that every namespace has by default.
async fn own(maps: &kube::Api<k8s_openapi::api::core::v1::ConfigMap>) -> usize {
    let listed = maps
        .list(&kube::api::ListParams::default())
        .await
        .expect("cannot list config maps");
    let names = listed.items.iter().map(kube::ResourceExt::name_any);
    names.filter(|name| name != "kube-root-ca.crt").count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_refuses_writes_keeps_reads_and_recovers() {
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::{
        Api,
        api::{DeleteParams, PostParams},
    };
    if std::env::var_os("STORE_TO_WRITE").is_some() {
        return;
    }
    let disk = Mounted::new("6m");
    let data = disk.0.path().join("data");
    let ballast = disk.0.path().join("ballast");
    std::fs::write(&ballast, vec![0; 2 << 20]).unwrap();
    let server = apiserver::Server::open(apiserver::Config::new(&data))
        .await
        .unwrap();
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    let map = |name: &str| -> ConfigMap {
        serde_json::from_value(
            json!({"metadata": {"name": name}, "data": {"x": "y".repeat(60_000)}}),
        )
        .unwrap()
    };
    let mut written = Vec::new();
    let refusal = loop {
        let name = format!("map-{}", written.len());
        match maps.create(&PostParams::default(), &map(&name)).await {
            Ok(_) => written.push(name),
            Err(kube::Error::Api(status)) => break status,
            Err(other) => panic!("{other}"),
        }
        assert!(written.len() < 200, "the disk never filled");
    };
    assert_eq!(refusal.code, 507);
    assert!(refusal.message.contains("full"), "{}", refusal.message);
    assert_eq!(own(&maps).await, written.len(), "reads still work");

    std::fs::remove_file(&ballast).unwrap();
    let after = testkit::eventually("a write after space returned", || async {
        maps.create(&PostParams::default(), &map("after"))
            .await
            .ok()
    })
    .await;
    assert_eq!(after.metadata.name.as_deref(), Some("after"));
    maps.delete(&written[0], &DeleteParams::default())
        .await
        .unwrap();
    drop(maps);
    server.shutdown().await;
    let server = apiserver::Server::open(apiserver::Config::new(&data))
        .await
        .unwrap();
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    assert_eq!(own(&maps).await, written.len());
    drop(maps);
    server.shutdown().await;
}

/// The files below a directory, with their permission bits.
fn files_below(directory: &Path) -> Vec<(PathBuf, u32)> {
    use std::os::unix::fs::PermissionsExt;
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).expect("readable") {
        let entry = entry.expect("readable");
        let details = entry.metadata().expect("it has details");
        if details.is_dir() {
            found.extend(files_below(&entry.path()));
        } else {
            found.push((entry.path(), details.permissions().mode() & 0o777));
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn no_other_user_can_read_a_file_of_the_data_directory() {
    use std::os::unix::fs::PermissionsExt;
    if std::env::var_os("STORE_TO_WRITE").is_some() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    // Like a directory that an earlier version or a user created.
    std::fs::create_dir(&data).unwrap();
    std::fs::set_permissions(&data, std::fs::Permissions::from_mode(0o755)).unwrap();
    let server = apiserver::Server::open(apiserver::Config::new(&data))
        .await
        .unwrap();
    let kubeconfig = data.join("kubeconfig");
    server
        .write_kubeconfig(&kubeconfig, "https://localhost")
        .unwrap();
    let mode = std::fs::metadata(&data).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    let files = files_below(&data);
    assert!(files.len() >= 6, "{files:?}");
    let open: Vec<_> = files.iter().filter(|(_, mode)| mode & 0o077 != 0).collect();
    assert!(open.is_empty(), "{open:?}");
    server.shutdown().await;
}

/// The failing half of the next test: the same test program, started with a directory in its environment, whose disk writes then
/// fail.
#[tokio::test(flavor = "multi_thread")]
async fn fails_to_write() {
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::{Api, api::PostParams};
    let Some(directory) = std::env::var_os("STORE_TO_BREAK") else {
        return;
    };
    let server = apiserver::Server::open(apiserver::Config::new(&directory))
        .await
        .unwrap();
    let client = server.client();
    let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
    let map = |name: &str| -> ConfigMap {
        serde_json::from_value(json!({"metadata": {"name": name}})).unwrap()
    };
    let health = async |path: &str| {
        let request = http::Request::get(path)
            .body(kube::client::Body::empty())
            .unwrap();
        let answer = client.send(request).await.unwrap();
        let code = answer.status().as_u16();
        let body = http_body_util::BodyExt::collect(answer.into_body());
        let text = String::from_utf8(body.await.unwrap().to_bytes().to_vec()).unwrap();
        (code, text)
    };
    maps.create(&PostParams::default(), &map("before"))
        .await
        .unwrap();
    assert_eq!(health("/readyz").await, (200, "ok".to_owned()));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = std::sync::Arc::new(server);
    let serving = tokio::spawn({
        let server = server.clone();
        async move {
            server
                .serve(listener, tokio_util::sync::CancellationToken::new())
                .await
        }
    });

    // From here on, writes beyond the first page of a file fail with an error other than "no space".
    let limited = Command::new("prlimit")
        .args([
            "--pid",
            &std::process::id().to_string(),
            "--fsize=4096:4096",
        ])
        .status();
    assert!(limited.is_ok_and(|status| status.success()));
    let refused = support::refusal(maps.create(&PostParams::default(), &map("lost")).await);
    assert_eq!(refused.code, 500, "{refused:?}");
    for path in ["/healthz", "/livez", "/readyz"] {
        let (code, text) = health(path).await;
        assert_eq!(code, 500, "{path}: {text}");
        assert!(text.contains("[-]storage failed: "), "{path}: {text}");
    }
    assert_eq!(health("/healthz/ping").await.0, 200);
    // `serve` returns an error, so that the supervisor ends the process.
    let ended = tokio::time::timeout(support::DEADLINE, serving).await;
    let failure = ended.expect("serving did not end").unwrap().unwrap_err();
    assert!(
        matches!(failure, apiserver::ServeError::Storage(_)),
        "{failure:?}"
    );
    maps.get("before").await.expect("reads do not work");
    println!("the disk failure was reported");
}

#[test]
fn a_disk_failure_fails_the_health_checks_and_ends_the_server() {
    if std::env::var_os("STORE_TO_WRITE").is_some() || std::env::var_os("STORE_TO_BREAK").is_some()
    {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // A limit on the file size makes writes fail. The signal XFSZ is ignored, and child processes inherit that.
    let output = Command::new("sh")
        .args([
            "-c",
            "trap '' XFSZ; exec \"$0\" --exact fails_to_write --nocapture",
        ])
        .arg(std::env::current_exe().unwrap())
        .env("STORE_TO_BREAK", directory.path())
        .output()
        .unwrap();
    let output_text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && output_text.contains("the disk failure was reported"),
        "{output_text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    // Acknowledged writes are there after the restart.
    let store = open(directory.path());
    let maps = ResourceId::new("", "configmaps");
    assert!(store.get(&maps, &Key::new("default", "before")).is_some());
    assert!(store.get(&maps, &Key::new("default", "lost")).is_none());
    close(&store);
}

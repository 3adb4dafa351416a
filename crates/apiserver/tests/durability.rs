//! The server on a disk that fails: a full disk, an I/O error, and the permissions of the data directory.

mod support;

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use apiserver::store::{Key, Location, ResourceId, Store, Window};
use serde_json::json;

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
    if std::env::var_os("STORE_TO_BREAK").is_some() {
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
    let location = Location::Directory(directory.path().to_owned());
    let store = Store::open(&location, Window::default()).expect("the store opens");
    let maps = ResourceId::new("", "configmaps");
    assert!(store.get(&maps, &Key::new("default", "before")).is_some());
    assert!(store.get(&maps, &Key::new("default", "lost")).is_none());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("a runtime starts");
    runtime.block_on(store.close());
}

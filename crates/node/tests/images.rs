//! Pods of images from a real registry: Debian's `docker-registry` on loopback, with an image made here.
//! Built only with the feature `package-tests`.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on says so by panicking"
)]

#[path = "../../images/tests/support/mod.rs"]
mod image;
mod support;

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use image::{FakeServer, Item, TestImage, content_of, digest, layer};
use k8s_openapi::api::core::v1::{ContainerImage, Node, Pod, Secret, ServiceAccount};
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use support::{Machine, SmallDisk};
use testkit::eventually;

/// `user:secret`, as htpasswd writes it with bcrypt.
const HTPASSWD: &str = "user:$2y$05$l5K0TVKN8s1gJ4AV75G3m.NL73.qMZ0qqonBR8DEKUKjcP.qfmVbS";

/// A registry with a directory of its own, or that of another.
struct Registry {
    process: Child,
    address: String,
    directory: std::sync::Arc<tempfile::TempDir>,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Registry {
    async fn start() -> Self {
        Self::start_in(&std::sync::Arc::new(tempfile::tempdir().unwrap()), "").await
    }

    /// A registry of the same images that requires a password.
    async fn with_password(&self) -> Self {
        let file = self.directory.path().join("htpasswd");
        std::fs::write(&file, HTPASSWD).unwrap();
        let auth = format!(
            "auth:\n  htpasswd:\n    realm: test\n    path: {}\n",
            file.display()
        );
        Self::start_in(&self.directory, &auth).await
    }

    async fn start_in(directory: &std::sync::Arc<tempfile::TempDir>, auth: &str) -> Self {
        // A port that was free may be taken by now, so there is more than one attempt.
        for _ in 0..5 {
            let mut registry = Self::launch(std::sync::Arc::clone(directory), auth);
            let serves = eventually("the registry to serve, or to end", async || {
                let connected = tokio::net::TcpStream::connect(&registry.address).await;
                // If this registry has exited, another process listens there.
                let has_ended = registry.process.try_wait().unwrap().is_some();
                (has_ended || connected.is_ok()).then_some(!has_ended)
            })
            .await;
            if serves {
                return registry;
            }
        }
        panic!("the registry ended five times");
    }

    fn launch(directory: std::sync::Arc<tempfile::TempDir>, auth: &str) -> Self {
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let address = format!("127.0.0.1:{port}");
        let file = directory.path().join(format!("{port}.yml"));
        let storage = directory.path().join("storage");
        let text = format!(
            "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: {address}\n{auth}",
            storage.display()
        );
        std::fs::write(&file, text).unwrap();
        let process = Command::new("docker-registry")
            .arg("serve")
            .arg(&file)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("these tests need Debian's package docker-registry");
        Self {
            process,
            address,
            directory,
        }
    }

    fn name(&self, image: &str) -> String {
        format!("{}/{image}", self.address)
    }

    async fn send(&self, method: Method, path: &str, kind: &str, body: &[u8]) -> String {
        let url = if path.starts_with("http") {
            path.to_owned()
        } else {
            format!("http://{}{path}", self.address)
        };
        let request = Request::builder()
            .method(method)
            .uri(&url)
            .header("content-type", kind)
            .body(Full::new(Bytes::copy_from_slice(body)))
            .unwrap();
        let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
        let answer = client.request(request).await.unwrap();
        let (status, headers) = (answer.status(), answer.headers().clone());
        let text = answer.into_body().collect().await.unwrap().to_bytes();
        assert!(
            status.is_success(),
            "{url}: {status} {}",
            String::from_utf8_lossy(&text)
        );
        headers
            .get("location")
            .map_or(String::new(), |value| value.to_str().unwrap().to_owned())
    }

    async fn push(&self, name: &str, tag: &str, image: &TestImage) {
        for blob in image.blobs() {
            let place = self
                .send(
                    Method::POST,
                    &format!("/v2/{name}/blobs/uploads/"),
                    "text/plain",
                    b"",
                )
                .await;
            let joint = if place.contains('?') { '&' } else { '?' };
            let place = format!("{place}{joint}digest={}", digest(blob));
            self.send(Method::PUT, &place, "application/octet-stream", blob)
                .await;
        }
        let kind = "application/vnd.oci.image.manifest.v1+json";
        self.send(
            Method::PUT,
            &format!("/v2/{name}/manifests/{tag}"),
            kind,
            &image.manifest,
        )
        .await;
    }
}

/// A small system: busybox, a user, a file that the second layer removes.
fn system() -> TestImage {
    let busybox =
        std::fs::read("/bin/busybox").expect("these tests need Debian's package busybox-static");
    let base = layer(&[
        Item::Directory("bin", 0o755),
        Item::File("bin/busybox", 0o755, &busybox),
        Item::Symlink("bin/sh", "busybox"),
        Item::Directory("etc", 0o755),
        Item::File(
            "etc/passwd",
            0o644,
            b"root:x:0:0::/root:/bin/sh\napp:x:1234:2345::/srv:/bin/sh\n",
        ),
        Item::File("etc/group", 0o644, b"app:x:2345:\nextra:x:77:app\n"),
        Item::File("etc/removed", 0o644, b"x"),
        Item::Directory("old", 0o755),
        Item::File("old/file", 0o644, b"x"),
    ]);
    let upper = layer(&[
        Item::File("etc/.wh.removed", 0o644, b""),
        Item::File("old/.wh..wh..opq", 0o644, b""),
        Item::File("old/new", 0o644, b"y"),
    ]);
    let container = json!({"User": "app", "Env": ["GREETING=hello", "PATH=/bin"], "WorkingDir": "/made/for/it",
        "Entrypoint": ["/bin/busybox", "sh", "-c"], "Cmd": ["echo $GREETING from $(busybox pwd); exec busybox sleep 1000"]});
    TestImage::new(&[base, upper], &container)
}

fn container(image: &str) -> Value {
    json!({"name": "c", "image": image})
}

fn waiting(pod: &Pod) -> (String, String) {
    let waiting = pod.status.as_ref().and_then(|status| {
        status.container_statuses.as_ref()?[0]
            .state
            .as_ref()?
            .waiting
            .clone()
    });
    waiting.map_or_else(Default::default, |waiting| {
        (
            waiting.reason.unwrap_or_default(),
            waiting.message.unwrap_or_default(),
        )
    })
}

async fn waits(machine: &Machine, name: &str, reason: &str) -> String {
    let pod = machine
        .pod_with(name, reason, |pod| waiting(pod).0 == reason)
        .await;
    waiting(&pod).1
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_runs_an_image_as_the_image_says() {
    let registry = Registry::start().await;
    let image = system();
    registry.push("a/system", "v1", &image).await;
    let machine = Machine::start().await;
    let name = registry.name("a/system:v1");
    machine
        .create("p", json!({"containers": [container(&name)]}))
        .await;
    let pod = machine.ready("p").await;
    let status = support::container(&pod).unwrap();
    assert_eq!(
        status.image_id,
        format!("{}@{}", registry.name("a/system"), image.digest())
    );
    machine.has_event("p", "Pulling", &name).await;
    machine
        .has_event("p", "Pulled", "Successfully pulled")
        .await;
    let script = "echo $(busybox id) $HOME; pwd; test ! -e /etc/removed && busybox ls /old; test ! -w /etc/passwd && echo protected";
    let (code, out, err) = machine
        .exec(&pod, &["/bin/busybox", "sh", "-c", script])
        .await;
    assert_eq!(code, 0, "{out}{err}");
    let lines: Vec<&str> = out.lines().collect();
    assert!(
        lines[0].contains("uid=1234(app) gid=2345(app)") && lines[0].contains("77(extra)"),
        "{out}"
    );
    assert!(lines[0].ends_with("/srv"), "{out}");
    assert_eq!(&lines[1..], ["/made/for/it", "new", "protected"]);

    // The node reports the image, by tag and by digest.
    let digest = format!("{}@{}", registry.name("a/system"), image.digest());
    let nodes = Api::<Node>::all(machine.client.clone());
    eventually("the image to be on the node", || async {
        let images = nodes.get("test-node").await.unwrap().status?.images?;
        let names = |image: &ContainerImage| image.names.clone().unwrap_or_default();
        let found = images.iter().find(|image| names(image).contains(&name))?;
        assert!(found.size_bytes.unwrap() > 0 && names(found).contains(&digest));
        Some(())
    })
    .await;

    // Another pod of the image needs no registry, and writes nothing that the first one sees.
    drop(registry);
    let arguments = json!({"name": "c", "image": name, "args": ["echo other > /tmp-file; exec busybox sleep 1000"],
        "securityContext": {"runAsUser": 0}});
    machine
        .create("q", json!({"containers": [arguments]}))
        .await;
    let other = machine.ready("q").await;
    machine
        .has_event("q", "Pulled", "already present on machine")
        .await;
    eventually("the file to be written", || async {
        let (code, ..) = machine
            .exec(&other, &["/bin/busybox", "test", "-e", "/tmp-file"])
            .await;
        (code == 0).then_some(())
    })
    .await;
    let (code, ..) = machine
        .exec(&pod, &["/bin/busybox", "test", "-e", "/tmp-file"])
        .await;
    assert_ne!(code, 0, "one pod sees what another wrote");
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sandbox_runtime_is_in_an_image_that_asks_for_it() {
    let registry = Registry::start().await;
    registry.push("system", "v1", &system()).await;
    let machine = Machine::start().await;
    let runtime = json!({"name": "c", "image": registry.name("system:v1"), "command": ["/opt/agent-sandbox/bin/sandboxd"],
        "workingDir": "/", "readinessProbe": {"httpGet": {"path": "/", "port": 8888}, "periodSeconds": 1}});
    machine.create("p", json!({"containers": [runtime]})).await;
    machine.ready("p").await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pull_secrets_open_a_registry_and_nothing_else_does() {
    let open = Registry::start().await;
    open.push("private", "v1", &system()).await;
    let registry = open.with_password().await;
    let machine = Machine::start().await;
    let name = registry.name("private:v1");
    machine
        .create("nobody", json!({"containers": [container(&name)]}))
        .await;
    let message = waits(&machine, "nobody", "ErrImagePull").await;
    assert!(message.contains("denies access to private"), "{message}");

    let docker = |password: &str| {
        json!({"auths": {&registry.address: {"username": "user", "password": password}}})
            .to_string()
    };
    for (secret, password) in [("right", "secret"), ("wrong", "guess")] {
        let object = json!({"metadata": {"name": secret}, "type": "kubernetes.io/dockerconfigjson",
            "stringData": {".dockerconfigjson": docker(password)}});
        machine.create_object::<Secret>(object).await;
    }
    let with = |secret: &str| json!({"imagePullSecrets": [{"name": secret}], "containers": [container(&name)]});
    machine.create("wrong", with("wrong")).await;
    waits(&machine, "wrong", "ErrImagePull").await;
    machine.create("right", with("right")).await;
    machine.ready("right").await;
    machine.delete("right").await;

    // A service account's secrets count for pods that name none.
    let accounts = Api::<ServiceAccount>::namespaced(machine.client.clone(), "t");
    eventually("the default service account", || async {
        accounts.get_opt("default").await.unwrap()
    })
    .await;
    let patch = json!({"imagePullSecrets": [{"name": "right"}]});
    accounts
        .patch("default", &PatchParams::default(), &Patch::Merge(patch))
        .await
        .unwrap();
    let always = json!({"name": "c", "image": name, "imagePullPolicy": "Always"});
    machine
        .create("account", json!({"containers": [always]}))
        .await;
    machine.ready("account").await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn images_that_cannot_be_pulled_are_refused_with_the_reason() {
    let registry = Registry::start().await;
    let machine = Machine::start().await;
    let evil = TestImage::new(
        &[layer(&[Item::File("../../../../escaped", 0o644, b"x")])],
        &json!({}),
    );
    registry.push("evil", "v1", &evil).await;
    let never =
        json!({"name": "c", "image": registry.name("absent:v1"), "imagePullPolicy": "Never"});
    for (pod, spec, reason, text) in [
        (
            "malformed",
            container("UPPER/Case"),
            "InvalidImageName",
            "consists of lowercase letters",
        ),
        ("never", never, "ErrImageNeverPull", "pull policy of Never"),
        (
            "missing",
            container(&registry.name("absent:v1")),
            "ErrImagePull",
            "is not found",
        ),
        (
            "evil",
            container(&registry.name("evil:v1")),
            "ErrImagePull",
            "leads out of the image",
        ),
        (
            "nowhere",
            container("127.0.0.1:1/nothing:v1"),
            "ErrImagePull",
            "cannot reach",
        ),
    ] {
        machine.create(pod, json!({"containers": [spec]})).await;
        let message = waits(&machine, pod, reason).await;
        assert!(message.contains(text), "{pod}: {message}");
        assert_eq!(
            machine.pod(pod).await.status.unwrap().phase.as_deref(),
            Some("Pending")
        );
    }
    // One event for the pull, and one for the container.
    for note in ["Failed to pull image", "Error: "] {
        machine.has_event("missing", "Failed", note).await;
    }
    // The back-off is reported, and ends by itself when the image appears.
    let message = waits(&machine, "missing", "ImagePullBackOff").await;
    assert!(message.contains("Back-off pulling image"), "{message}");
    machine
        .has_event("missing", "BackOff", "Back-off pulling image")
        .await;
    registry.push("absent", "v1", &system()).await;
    let pod = machine.ready("missing").await;
    assert_eq!(
        pod.status.unwrap().container_statuses.unwrap()[0].restart_count,
        0
    );
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_stays_while_a_pod_of_it_runs_also_over_a_restart_of_the_node() {
    let registry = Registry::start().await;
    registry.push("system", "v1", &system()).await;
    let mut machine = Machine::start().await;
    let name = registry.name("system:v1");
    machine
        .create("p", json!({"containers": [container(&name)]}))
        .await;
    let before = machine.ready("p").await.uid();
    machine.stop_node().await;
    machine.start_node().await;
    let directory = agent_sandbox_node::config::image_directory(&machine.config.data_dir);
    let images = images::Images::open(images::Settings::new(directory)).unwrap();
    let refused = images.remove(&name).unwrap_err();
    assert!(
        matches!(refused, images::StoreError::InUse { .. }),
        "{refused}"
    );
    let pod = machine.ready("p").await;
    assert_eq!(pod.uid(), before);
    let (code, ..) = machine.exec(&pod, &["/bin/busybox", "true"]).await;
    assert_eq!(code, 0);
    machine.delete("p").await;
    eventually("the image to be free", || async {
        images.remove(&name).ok()
    })
    .await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unused_images_are_removed_before_any_pod_is_evicted() {
    let disk = SmallDisk::new(c"nr_inodes=8000,size=400m");
    let machine = Machine::start_with(|config| {
        config.data_dir = disk.path().join("data");
        config.storage_check = std::time::Duration::from_millis(100);
        config.image_minimum_age = jiff::SignedDuration::ZERO;
    })
    .await;
    let names: Vec<String> = (0..4000).map(|number| format!("file{number}")).collect();
    let files: Vec<Item> = names
        .iter()
        .map(|name| Item::File(name, 0o644, b""))
        .collect();
    let unused = TestImage::new(&[layer(&files)], &json!({}));
    let registry = FakeServer::registry(content_of("v1", &unused)).await;
    let directory = agent_sandbox_node::config::image_directory(&machine.config.data_dir);
    let images = images::Images::open(images::Settings::new(directory)).unwrap();
    let name = images::Reference::parse(&registry.image(":v1")).unwrap();
    images.pull(&name, Vec::new()).await.unwrap();
    // Uses all but 200 of the free inodes.
    let crowd = r"
import os, time
os.mkdir('/tmp/d')
for n in range(os.statvfs('/tmp').f_favail - 200): open(f'/tmp/d/{n}', 'w').close()
open('/tmp/done', 'w').close(); time.sleep(1000)
";
    let spec = json!({"restartPolicy": "Never", "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "c", "image": "host", "command": ["python3", "-c", crowd]}]});
    machine.create("crowd", spec).await;
    let pod = machine.ready("crowd").await;
    let kept = disk.path().join("data/image-store/images");
    eventually("the image to be given up", || async {
        support::entries(&kept).is_empty().then_some(())
    })
    .await;
    eventually("the pod to be done", || async {
        let (code, ..) = machine.exec(&pod, &["test", "-e", "/tmp/done"]).await;
        (code == 0).then_some(())
    })
    .await;
    // An eviction would happen together with the removal of the image, or at the next check.
    let spec = json!({"restartPolicy": "Never", "containers": [{"name": "c", "image": "host", "command": ["sleep", "0.5"]}]});
    machine.create("later", spec).await;
    machine.phase("later", "Succeeded").await;
    let crowd = machine.pod("crowd").await.status.unwrap();
    assert_eq!(crowd.phase.as_deref(), Some("Running"));
    machine.finish().await;
}

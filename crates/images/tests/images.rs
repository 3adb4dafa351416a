//! Images from registries and files: valid images are pulled and loaded, and invalid or forbidden ones are refused.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use agent_sandbox_images::{
    Credential, Destinations, Image, Images, PullError, Reference, Settings, StoreError,
};
use jiff::SignedDuration;
use serde_json::json;
use support::{
    FakeServer, Item, Response, TestImage, content_of, digest, gzip, layer, serve_content,
};

struct Machine {
    directory: tempfile::TempDir,
    images: Arc<Images>,
}

fn open(directory: &Path) -> Arc<Images> {
    Arc::new(Images::open(Settings::new(directory)).unwrap())
}

impl Machine {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let images = open(directory.path());
        Self { directory, images }
    }

    async fn pull(&self, name: &str) -> Result<Image, String> {
        self.pull_as(name, Vec::new()).await
    }

    async fn pull_as(&self, name: &str, credentials: Vec<Credential>) -> Result<Image, String> {
        let name = Reference::parse(name).unwrap();
        self.images
            .pull(&name, credentials)
            .await
            .map_err(|error| chain(&error))
    }

    fn count(&self, directory: &str) -> usize {
        fs::read_dir(self.directory.path().join(directory))
            .unwrap()
            .count()
    }

    /// Asserts that no part of an image is left.
    fn assert_empty(&self) {
        for directory in ["layers", "images", "names", "work"] {
            assert_eq!(self.count(directory), 0, "{directory}");
        }
    }
}

fn chain(error: &Arc<PullError>) -> String {
    error_chain::chain(&**error)
}

fn base() -> Vec<u8> {
    layer(&[
        Item::Directory("etc", 0o755),
        Item::File("etc/base", 0o644, b"base"),
        Item::File("gone", 0o644, b"x"),
    ])
}

fn upper(content: &[u8]) -> Vec<u8> {
    layer(&[
        Item::File("app", 0o755, content),
        Item::File(".wh.gone", 0o644, b""),
    ])
}

fn image(content: &[u8]) -> TestImage {
    TestImage::new(
        &[base(), upper(content)],
        &json!({"Entrypoint": ["/app"], "Env": ["A=b"], "User": "7"}),
    )
}

#[tokio::test]
async fn an_image_is_pulled_by_tag_and_digest_and_shares_its_layers() {
    let (one, two) = (image(b"one"), image(b"two"));
    let mut content = content_of("one", &one);
    content.extend(content_of("two", &two));
    let registry = FakeServer::registry(content).await;
    let machine = Machine::new();
    let pulled = machine.pull(&registry.image(":one")).await.unwrap();
    let config = pulled.configuration.config.clone().unwrap();
    assert_eq!(config.entrypoint.unwrap(), ["/app"]);
    assert_eq!(config.user.as_deref(), Some("7"));
    assert_eq!(pulled.manifest.as_ref().unwrap().to_string(), one.digest());
    assert_eq!(fs::read(pulled.layers[0].join("app")).unwrap(), b"one");
    assert_eq!(
        fs::read(pulled.layers[1].join("etc/base")).unwrap(),
        b"base"
    );
    assert_eq!(registry.paths("blobs/").len(), 3);

    let by_digest = registry.image(&format!("@{}", two.digest()));
    let second = machine.pull(&by_digest).await.unwrap();
    assert_eq!(
        second.layers[1], pulled.layers[1],
        "the base layer is shared"
    );
    assert_eq!(
        registry.paths("blobs/").len(),
        5,
        "the base layer was pulled again"
    );
    assert_eq!(machine.count("layers"), 3);
    assert_eq!(machine.count("downloads"), 0);
    let name = Reference::parse(&by_digest).unwrap();
    assert_eq!(machine.images.find(&name).unwrap(), second);
    // Another process that opens the same directory finds the images too.
    assert_eq!(open(machine.directory.path()).list().unwrap().len(), 2);
}

#[tokio::test]
async fn the_image_for_this_machine_is_chosen_from_an_index() {
    let own = image(b"own");
    let entry = |architecture: &str, digest: String| {
        json!({"mediaType": "application/vnd.oci.image.manifest.v1+json", "size": 1, "digest": digest,
            "platform": {"os": "linux", "architecture": architecture}})
    };
    let index = json!({"schemaVersion": 2, "manifests": [entry("s390x", digest(b"no")), entry(support::architecture(), own.digest())]})
        .to_string()
        .into_bytes();
    let mut content = content_of("unused", &own);
    content.insert("manifests/multi".into(), index.clone());
    content.insert(
        "manifests/alien".into(),
        json!({"manifests": [entry("s390x", digest(b"no"))]})
            .to_string()
            .into_bytes(),
    );
    let registry = FakeServer::registry(content).await;
    let machine = Machine::new();
    let pulled = machine.pull(&registry.image(":multi")).await.unwrap();
    assert_eq!(pulled.manifest.unwrap().to_string(), digest(&index));
    assert_eq!(fs::read(pulled.layers[0].join("app")).unwrap(), b"own");
    let refused = machine.pull(&registry.image(":alien")).await.unwrap_err();
    assert!(refused.contains("among linux/s390x"), "{refused}");
}

#[tokio::test]
async fn an_interrupted_download_is_resumed_where_it_stopped() {
    let noise: Vec<u8> = (0..200_000_u32)
        .flat_map(|number| number.wrapping_mul(2_654_435_761).to_le_bytes())
        .collect();
    let image = TestImage::new(&[upper(&noise)], &json!({}));
    let big = digest(&image.layers[0]);
    let content = content_of("v1", &image);
    let breaks = Arc::new(AtomicUsize::new(0));
    let counter = breaks.clone();
    let registry = FakeServer::start(move |request| {
        let mut response = serve_content(&content, request);
        // The first three transfers of the layer are interrupted half-way.
        if request.path.contains(&big[7..]) && counter.fetch_add(1, Ordering::SeqCst) < 3 {
            response.cut = Some(response.body.len() / 2);
        }
        response
    })
    .await;
    let machine = Machine::new();
    let pulled = machine.pull(&registry.image(":v1")).await.unwrap();
    assert_eq!(fs::read(pulled.layers[0].join("app")).unwrap(), noise);
    assert_eq!(breaks.load(Ordering::SeqCst), 4);
    let seen = registry.seen.lock().unwrap();
    let ranges: Vec<_> = seen
        .iter()
        .filter_map(|request| request.headers.get("range"))
        .collect();
    assert_eq!(
        ranges.len(),
        3,
        "each attempt after the first asked for the rest: {ranges:?}"
    );
}

#[tokio::test]
async fn invalid_images_are_refused_and_leave_nothing_behind() {
    let good = image(b"good");
    let other = digest(b"other");
    let layer_digest = digest(&good.layers[1]);
    let mut wrong_layer = content_of("v1", &good);
    let mut bytes = good.layers[1].clone();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    wrong_layer.insert(format!("blobs/{layer_digest}"), bytes);
    let mut long_layer = content_of("v1", &good);
    long_layer.insert(
        format!("blobs/{layer_digest}"),
        [good.layers[1].clone(), vec![0; 99]].concat(),
    );
    let mut wrong_manifest = content_of("v1", &good);
    wrong_manifest.insert(format!("manifests/{other}"), good.manifest.clone());
    let mut wrong_config = content_of("v1", &good);
    wrong_config.insert(format!("blobs/{}", digest(&good.config)), b"{}".to_vec());
    let lying_config = TestImage::with_blobs(
        json!({"architecture": support::architecture(), "os": "linux", "rootfs": {"diff_ids": [other]}}).to_string().into_bytes(),
        vec![gzip(&base())],
    );
    let escaping = TestImage::new(
        &[layer(&[Item::File("../escaped", 0o644, b"x")])],
        &json!({}),
    );
    let not_tar = TestImage::new(&[b"this is no archive".repeat(64)], &json!({}));
    for (what, content, name, reason) in [
        ("a corrupted layer", wrong_layer, ":v1", "corrupted"),
        (
            "a layer that goes on",
            long_layer,
            ":v1",
            "larger than the manifest states",
        ),
        (
            "another manifest",
            wrong_manifest,
            &*format!("@{other}"),
            "the manifest is corrupted",
        ),
        (
            "another configuration",
            wrong_config,
            ":v1",
            "configuration is corrupted",
        ),
        (
            "a configuration that lies",
            content_of("v1", &lying_config),
            ":v1",
            "corrupted",
        ),
        (
            "a layer that escapes",
            content_of("v1", &escaping),
            ":v1",
            "leads out of the image",
        ),
        (
            "a layer that is no archive",
            content_of("v1", &not_tar),
            ":v1",
            "not a tar archive",
        ),
        (
            "a missing image",
            content_of("v2", &good),
            ":v1",
            "is not found",
        ),
    ] {
        let registry = FakeServer::registry(content).await;
        let machine = Machine::new();
        let refused = machine.pull(&registry.image(name)).await.unwrap_err();
        assert!(refused.contains(reason), "{what}: {refused}");
        for directory in ["images", "names"] {
            assert_eq!(machine.count(directory), 0, "{what}: {directory}");
        }
        // A valid layer of the same image may still be in extraction; its work directory is removed afterwards.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(120);
        while machine.count("work") > 0 {
            assert!(
                std::time::Instant::now() < deadline,
                "{what}: work directories are left"
            );
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        let corrupted = format!("downloads/{}.partial", &layer_digest[7..]);
        assert!(!machine.directory.path().join(corrupted).exists(), "{what}");
        assert!(
            !machine
                .directory
                .path()
                .parent()
                .unwrap()
                .join("escaped")
                .exists()
        );
    }
}

#[tokio::test]
async fn passwords_are_sent_only_to_the_token_server() {
    const PASSWORD: &str = "Basic dXNlcjpzZWNyZXQ=";
    let tokens = FakeServer::start(|request| {
        assert!(
            request
                .path
                .contains("scope=repository%3Atest%2Fimage%3Apull"),
            "{}",
            request.path
        );
        match request.headers.get("authorization").map(String::as_str) {
            Some(PASSWORD) => Response::ok(br#"{"token": "granted"}"#),
            _ => Response::status(401),
        }
    })
    .await;
    let storage = {
        let image = image(b"private");
        let content = content_of("v1", &image);
        FakeServer::start(move |request| {
            assert!(
                !request.headers.contains_key("authorization"),
                "another host learned the token"
            );
            serve_content(&content, request)
        })
        .await
    };
    let content = content_of("v1", &image(b"private"));
    let (realm, elsewhere) = (tokens.address, storage.address);
    let registry = FakeServer::start(move |request| {
        if request.headers.get("authorization").map(String::as_str) != Some("Bearer granted") {
            let challenge = format!("Bearer realm=\"http://{realm}/token\",service=\"test\",scope=\"repository:test/image:pull\"");
            return Response::status(401).header("www-authenticate", &challenge);
        }
        if request.path.contains("/blobs/") {
            return Response::status(307).header("location", &format!("http://{elsewhere}{}", request.path));
        }
        serve_content(&content, request)
    })
    .await;
    let machine = Machine::new();
    let password = |password: &str| Credential::Password {
        user: "user".into(),
        password: password.into(),
    };
    let refused = machine.pull(&registry.image(":v1")).await.unwrap_err();
    assert!(refused.contains("denies access to test/image"), "{refused}");
    let refused = machine
        .pull_as(&registry.image(":v1"), vec![password("wrong")])
        .await
        .unwrap_err();
    assert!(refused.contains("denies access"), "{refused}");
    machine.assert_empty();
    machine
        .pull_as(
            &registry.image(":v1"),
            vec![password("wrong"), password("secret")],
        )
        .await
        .unwrap();
    assert!(!storage.paths("/blobs/").is_empty());
}

#[tokio::test]
async fn redirects_to_plain_http_outside_this_machine_are_refused() {
    for location in ["http://192.0.2.1/blob", "ftp://127.0.0.1/blob"] {
        let content = content_of("v1", &image(b"x"));
        let registry = FakeServer::start(move |request| {
            if request.path.contains("/blobs/") {
                return Response::status(302).header("location", location);
            }
            serve_content(&content, request)
        })
        .await;
        let refused = Machine::new()
            .pull(&registry.image(":v1"))
            .await
            .unwrap_err();
        assert!(refused.contains("without encryption"), "{refused}");
    }
}

#[tokio::test]
async fn concurrent_pulls_of_one_image_are_one_pull() {
    let registry = FakeServer::registry(content_of("v1", &image(b"x"))).await;
    let machine = Machine::new();
    let name = Reference::parse(&registry.image(":v1")).unwrap();
    let pulls = (0..8).map(|_| machine.images.pull(&name, Vec::new()));
    let pulled = futures::future::try_join_all(pulls).await.unwrap();
    assert!(pulled.windows(2).all(|pair| pair[0] == pair[1]));
    assert_eq!(registry.paths("/manifests/").len(), 1);
    assert_eq!(registry.paths("/blobs/").len(), 3);
}

#[tokio::test]
async fn an_abandoned_pull_is_not_reused_by_a_later_one() {
    let registry = FakeServer::registry(content_of("v1", &image(b"x"))).await;
    let name = Reference::parse(&registry.image(":v1")).unwrap();
    let mut asked_again = false;
    // The second pull may start before the first has ended, and then correctly shares its result. Later rounds wait longer.
    for round in 0..16 {
        let machine = Machine::new();
        let before = registry.paths("/manifests/").len();
        let mut first = Box::pin(machine.images.pull(&name, Vec::new()));
        assert!(futures::poll!(&mut first).is_pending());
        drop(first);
        while machine.images.find(&name).is_none() {
            tokio::task::yield_now().await;
        }
        for _ in 0..1 << round {
            tokio::task::yield_now().await;
        }
        machine.images.pull(&name, Vec::new()).await.unwrap();
        asked_again |= registry.paths("/manifests/").len() == before + 2;
    }
    assert!(
        asked_again,
        "a tag must be resolved again, because it may have moved"
    );
}

#[tokio::test]
async fn nothing_is_removed_while_a_record_cannot_be_read() {
    let registry = FakeServer::registry(content_of("v1", &image(b"x"))).await;
    let machine = Machine::new();
    machine.pull(&registry.image(":v1")).await.unwrap();
    let images = machine.directory.path().join("images");
    let record = fs::read_dir(&images).unwrap().next().unwrap().unwrap();
    let aside = machine.directory.path().join("aside");
    fs::rename(record.path(), &aside).unwrap();
    fs::create_dir(record.path()).unwrap();
    let refused = machine
        .images
        .collect_by_store_size(0, 0, SignedDuration::ZERO);
    assert!(matches!(refused, Err(StoreError::Io { .. })), "{refused:?}");
    assert_eq!(machine.count("layers"), 2);
    fs::remove_dir(record.path()).unwrap();
    fs::rename(&aside, record.path()).unwrap();
    assert_eq!(machine.images.list().unwrap().len(), 1);
}

#[tokio::test]
async fn unused_images_are_removed_with_their_layers_and_used_ones_stay() {
    let mut content = content_of("used", &image(b"used"));
    content.extend(content_of("idle", &image(b"idle")));
    let registry = FakeServer::registry(content).await;
    let machine = Machine::new();
    let used = machine.pull(&registry.image(":used")).await.unwrap();
    let idle = machine.pull(&registry.image(":idle")).await.unwrap();
    machine.images.hold("pod a", &used).unwrap();
    assert_eq!(machine.count("layers"), 3);
    let kept = machine
        .images
        .collect_by_store_size(1 << 20, 1 << 20, SignedDuration::ZERO)
        .unwrap();
    assert!(
        kept.images.is_empty(),
        "garbage collection ran although there was enough space"
    );
    let refused = machine.images.remove(&registry.image(":used")).unwrap_err();
    assert!(matches!(refused, StoreError::InUse { .. }), "{refused}");
    let removed = machine
        .images
        .collect_by_store_size(0, 0, SignedDuration::ZERO)
        .unwrap();
    assert_eq!(removed.images, [registry.image(":idle")]);
    assert!(!idle.layers[0].exists() && used.layers.iter().all(|layer| layer.exists()));
    machine.images.release("pod a");
    assert_eq!(
        machine
            .images
            .remove(&registry.image(":used"))
            .unwrap()
            .images
            .len(),
        1
    );
    machine.assert_empty();
    let unknown = machine.images.remove("nothing").unwrap_err();
    assert!(matches!(unknown, StoreError::Unknown(_)), "{unknown}");
    assert!(matches!(
        machine.images.hold("pod b", &used),
        Err(StoreError::Gone(_))
    ));
}

#[tokio::test]
async fn leftovers_of_a_crash_are_removed_and_an_incomplete_image_is_not_found() {
    let registry = FakeServer::registry(content_of("v1", &image(b"x"))).await;
    let machine = Machine::new();
    let pulled = machine.pull(&registry.image(":v1")).await.unwrap();
    fs::create_dir(machine.directory.path().join("work/unpack-dead")).unwrap();
    fs::remove_dir_all(pulled.layers[0].parent().unwrap()).unwrap();
    let images = open(machine.directory.path());
    assert_eq!(machine.count("work"), 0);
    let name = Reference::parse(&registry.image(":v1")).unwrap();
    assert!(
        images.find(&name).is_none(),
        "an image without its layer is found"
    );
    let again = images.pull(&name, Vec::new()).await.unwrap();
    assert_eq!(images.find(&name), Some(again));
}

/// Writes an OCI layout with one image.
fn write_layout(directory: &Path, image: &TestImage, name: Option<&str>) {
    let blobs = directory.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    for blob in image.blobs().into_iter().chain([&image.manifest]) {
        fs::write(blobs.join(&digest(blob)[7..]), blob).unwrap();
    }
    let annotations = name.map_or(
        json!({}),
        |name| json!({"org.opencontainers.image.ref.name": name}),
    );
    let index = json!({"schemaVersion": 2, "manifests": [{"mediaType": "application/vnd.oci.image.manifest.v1+json",
        "digest": image.digest(), "size": image.manifest.len(), "annotations": annotations}]});
    fs::write(directory.join("index.json"), index.to_string()).unwrap();
    fs::write(
        directory.join("oci-layout"),
        r#"{"imageLayoutVersion": "1.0.0"}"#,
    )
    .unwrap();
}

#[tokio::test]
async fn layouts_and_docker_archives_are_loaded() {
    let source = tempfile::tempdir().unwrap();
    let image = image(b"loaded");
    let layout = source.path().join("layout");
    write_layout(&layout, &image, Some("registry.example/a:v1"));
    let machine = Machine::new();
    let loaded = machine.images.load(&layout, None).await.unwrap();
    assert_eq!(loaded[0].0[0].to_string(), "registry.example/a:v1");
    assert_eq!(
        fs::read(loaded[0].1.layers[0].join("app")).unwrap(),
        b"loaded"
    );

    // The same layout as a compressed archive, with an explicit name.
    let mut archive = tar::Builder::new(flate2::write::GzEncoder::new(
        Vec::new(),
        flate2::Compression::fast(),
    ));
    archive.append_dir_all(".", &layout).unwrap();
    let file = source.path().join("layout.tar.gz");
    fs::write(&file, archive.into_inner().unwrap().finish().unwrap()).unwrap();
    let name = Reference::parse("given").unwrap();
    let loaded = machine
        .images
        .load(&file, Some(name.clone()))
        .await
        .unwrap();
    assert_eq!(loaded[0].0, [name]);

    let docker = source.path().join("docker.tar");
    let manifest = json!([{"Config": "config.json", "RepoTags": ["saved:1"], "Layers": ["0/layer.tar", "1/layer.tar"]}]).to_string();
    let saved = layer(&[
        Item::File("manifest.json", 0o644, manifest.as_bytes()),
        Item::File("config.json", 0o644, &image.config),
        Item::File("0/layer.tar", 0o644, &base()),
        Item::File("1/layer.tar", 0o644, &upper(b"loaded")),
    ]);
    fs::write(&docker, saved).unwrap();
    let loaded = machine.images.load(&docker, None).await.unwrap();
    assert_eq!(loaded[0].0[0].to_string(), "docker.io/library/saved:1");
    assert_eq!(
        machine.images.list().unwrap().len(),
        1,
        "the image must have three names"
    );
    assert_eq!(machine.images.list().unwrap()[0].names.len(), 3);
}

#[tokio::test]
async fn archives_with_escaping_links_or_wrong_digests_are_not_loaded() {
    let source = tempfile::tempdir().unwrap();
    let secret = source.path().join("secret");
    fs::write(&secret, base()).unwrap();
    let image = TestImage::new(&[base()], &json!({}));
    let manifest =
        json!([{"Config": "config.json", "RepoTags": ["evil:1"], "Layers": ["link"]}]).to_string();
    let evil = layer(&[
        Item::File("manifest.json", 0o644, manifest.as_bytes()),
        Item::File("config.json", 0o644, &image.config),
        Item::Symlink("link", secret.to_str().unwrap()),
    ]);
    let file = source.path().join("evil.tar");
    fs::write(&file, evil).unwrap();
    let machine = Machine::new();
    assert!(machine.images.load(&file, None).await.is_err());

    let layout = source.path().join("layout");
    write_layout(&layout, &image, Some("registry.example/a:v1"));
    fs::write(
        layout
            .join("blobs/sha256")
            .join(&digest(&image.layers[0])[7..]),
        gzip(b"other"),
    )
    .unwrap();
    let refused = machine.images.load(&layout, None).await.unwrap_err();
    assert!(refused.to_string().contains("corrupted"), "{refused}");
    let nameless = source.path().join("nameless");
    write_layout(&nameless, &image, None);
    assert!(machine.images.load(&nameless, None).await.is_err());
    machine.assert_empty();
}

#[tokio::test]
async fn only_registries_that_are_listed_are_reached_without_encryption() {
    let registry = FakeServer::registry(content_of("v1", &image(b"x"))).await;
    // A host name for loopback that does not look like loopback.
    let host = format!("0.0.0.0:{}", registry.address.port());
    let name = Reference::parse(&format!("{host}/test/image:v1")).unwrap();
    for (listed, pulled) in [
        (Vec::new(), false),
        (vec!["0.0.0.0".to_owned()], false),
        (vec![host.clone()], true),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let settings = Settings {
            plain_registries: listed.clone(),
            ..Settings::new(directory.path())
        };
        let images = Images::open(settings).unwrap();
        let response = images.pull(&name, Vec::new()).await;
        assert_eq!(response.is_ok(), pulled, "{listed:?}: {:?}", response.err());
        let asked = !registry.paths("/v2/").is_empty();
        assert_eq!(asked, pulled, "{listed:?}: plain HTTP was used");
    }
}

/// A machine that pulls only from external registries and from those that the operator allows.
fn machine_that_allows(allowed: Vec<String>) -> Machine {
    let directory = tempfile::tempdir().unwrap();
    let settings = Settings {
        destinations: Destinations::Elsewhere { allowed },
        ..Settings::new(directory.path())
    };
    let images = Arc::new(Images::open(settings).unwrap());
    Machine { directory, images }
}

/// A service on this machine that image references must not reach.
async fn victim() -> FakeServer {
    let secret = br#"{"errors": [{"message": "SECRET"}], "token": "SECRET"}"#;
    FakeServer::start(|_| Response {
        body: secret.to_vec(),
        ..Response::status(418)
    })
    .await
}

#[tokio::test]
async fn an_image_reference_to_this_machine_is_refused_without_a_request() {
    let victim = victim().await;
    let port = victim.address.port();
    let machine = machine_that_allows(Vec::new());
    for host in [
        "127.0.0.1",
        "localhost",
        "0.0.0.0",
        "127.1.2.3",
        "[::ffff:127.0.0.1]",
    ] {
        let name = format!("{host}:{port}/a/b:v1");
        let Ok(name) = Reference::parse(&name) else {
            continue;
        };
        let refused = machine.images.pull(&name, Vec::new()).await.unwrap_err();
        let refused = chain(&refused);
        assert!(refused.contains("--allow-registry"), "{host}: {refused}");
        assert!(!refused.contains("SECRET"), "{host}: {refused}");
    }
    assert_eq!(victim.paths("/"), Vec::<String>::new());
    machine.assert_empty();
}

#[tokio::test]
async fn redirects_and_token_servers_on_this_machine_are_refused() {
    let victim = victim().await;
    let target = victim.address;
    let redirecting = FakeServer::start(move |_| {
        Response::status(307).header("location", &format!("http://{target}/secrets"))
    })
    .await;
    let challenging = FakeServer::start(move |_| {
        let realm = format!("Bearer realm=\"http://{target}/token\",service=\"x\"");
        Response::status(401).header("www-authenticate", &realm)
    })
    .await;
    let allowed = [&redirecting, &challenging].map(|server| server.address.to_string());
    let machine = machine_that_allows(allowed.to_vec());
    for server in [&redirecting, &challenging] {
        let refused = machine.pull(&server.image(":v1")).await.unwrap_err();
        assert!(refused.contains("--allow-registry"), "{refused}");
        assert!(
            !server.paths("/v2/").is_empty(),
            "the registry received no request"
        );
    }
    assert_eq!(victim.paths("/"), Vec::<String>::new());

    // Even if the operator allows the target of a redirect, its response is not shown to the user who named the image.
    let everything = machine_that_allows(vec!["127.0.0.1".to_owned()]);
    for server in [&redirecting, &challenging] {
        let failed = everything.pull(&server.image(":v1")).await.unwrap_err();
        assert!(
            failed.contains("418") && !failed.contains("SECRET"),
            "{failed}"
        );
    }
    assert!(!victim.paths("/").is_empty());
    let own = everything.pull(&victim.image(":v1")).await.unwrap_err();
    assert!(
        own.contains("SECRET"),
        "the registry's own error message is not shown: {own}"
    );
}

#[tokio::test]
async fn a_registry_on_this_machine_is_reached_if_the_operator_allows_it() {
    let registry = FakeServer::registry(content_of("v1", &image(b"x"))).await;
    let machine = machine_that_allows(vec![registry.address.to_string()]);
    machine.pull(&registry.image(":v1")).await.unwrap();
}

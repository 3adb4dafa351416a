//! Images built by a test, and a fake registry whose responses a test controls.

#![allow(dead_code, reason = "each test binary uses a part of this module")]

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use sha2::Digest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

pub fn digest(bytes: &[u8]) -> String {
    format!("sha256:{:x}", sha2::Sha256::digest(bytes))
}

pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// An entry of a layer. Its name may be hostile.
#[derive(Debug, Clone, Copy)]
pub enum Item<'a> {
    File(&'a str, u32, &'a [u8]),
    Directory(&'a str, u32),
    Symlink(&'a str, &'a str),
}

pub fn layer(items: &[Item<'_>]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for item in items {
        let mut header = tar::Header::new_gnu();
        let (kind, path, link, content, mode) = match *item {
            Item::File(path, mode, content) => (tar::EntryType::Regular, path, "", content, mode),
            Item::Directory(path, mode) => (tar::EntryType::Directory, path, "", &b""[..], mode),
            Item::Symlink(path, link) => (tar::EntryType::Symlink, path, link, &b""[..], 0o777),
        };
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        header.set_mode(mode);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        let fields = header.as_old_mut();
        fields.name[..path.len()].copy_from_slice(path.as_bytes());
        fields.linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_cksum();
        builder.append(&header, content).unwrap();
    }
    builder.into_inner().unwrap()
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// An image as a registry stores it.
#[derive(Debug, Clone)]
pub struct TestImage {
    pub manifest: Vec<u8>,
    pub config: Vec<u8>,
    pub layers: Vec<Vec<u8>>,
}

impl TestImage {
    /// Builds an image from uncompressed layers, lowest first.
    pub fn new(layers: &[Vec<u8>], container: &Value) -> Self {
        let config = json!({"architecture": architecture(), "os": "linux", "config": container,
            "rootfs": {"type": "layers", "diff_ids": layers.iter().map(|layer| digest(layer)).collect::<Vec<_>>()}});
        let compressed: Vec<Vec<u8>> = layers.iter().map(|layer| gzip(layer)).collect();
        Self::with_blobs(config.to_string().into_bytes(), compressed)
    }

    pub fn with_blobs(config: Vec<u8>, layers: Vec<Vec<u8>>) -> Self {
        let describe = |kind: &str, bytes: &Vec<u8>| json!({"mediaType": format!("application/vnd.oci.image.{kind}"), "digest": digest(bytes), "size": bytes.len()});
        let manifest = json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": describe("config.v1+json", &config),
            "layers": layers.iter().map(|layer| describe("layer.v1.tar+gzip", layer)).collect::<Vec<_>>()});
        Self {
            manifest: manifest.to_string().into_bytes(),
            config,
            layers,
        }
    }

    pub fn digest(&self) -> String {
        digest(&self.manifest)
    }

    pub fn blobs(&self) -> Vec<&Vec<u8>> {
        self.layers.iter().chain([&self.config]).collect()
    }
}

#[derive(Debug, Clone)]
pub struct Request {
    pub path: String,
    pub headers: HashMap<String, String>,
}

#[derive(Debug, Clone, Default)]
pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// The connection is closed after this many bytes of the body.
    pub cut: Option<usize>,
}

impl Response {
    pub fn ok(body: &[u8]) -> Self {
        Self {
            status: 200,
            body: body.to_vec(),
            ..Self::default()
        }
    }

    pub fn status(status: u16) -> Self {
        Self {
            status,
            ..Self::default()
        }
    }

    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }
}

/// The content of a registry: bytes by path below `/v2/<repository>/`.
pub type Content = BTreeMap<String, Vec<u8>>;

pub fn content_of(tag: &str, image: &TestImage) -> Content {
    let mut content = Content::new();
    content.insert(format!("manifests/{tag}"), image.manifest.clone());
    content.insert(
        format!("manifests/{}", image.digest()),
        image.manifest.clone(),
    );
    for blob in image.blobs() {
        content.insert(format!("blobs/{}", digest(blob)), blob.clone());
    }
    content
}

/// A server that answers every request with a function and records the requests.
pub struct FakeServer {
    pub address: SocketAddr,
    pub seen: Arc<Mutex<Vec<Request>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl FakeServer {
    pub async fn start(response: impl Fn(&Request) -> Response + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen: Arc<Mutex<Vec<Request>>> = Arc::default();
        let (response, log) = (Arc::new(response), seen.clone());
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (response, log) = (response.clone(), log.clone());
                tokio::spawn(async move {
                    let _ = serve(stream, &*response, &log).await;
                });
            }
        });
        Self {
            address,
            seen,
            task,
        }
    }

    /// A registry with one repository, `test/image`.
    pub async fn registry(content: Content) -> Self {
        Self::start(move |request| serve_content(&content, request)).await
    }

    pub fn image(&self, tag: &str) -> String {
        format!("{}/test/image{tag}", self.address)
    }

    pub fn paths(&self, part: &str) -> Vec<String> {
        let seen = self.seen.lock().unwrap();
        seen.iter()
            .map(|request| request.path.clone())
            .filter(|path| path.contains(part))
            .collect()
    }
}

/// Answers as a correct registry does, including range requests.
pub fn serve_content(content: &Content, request: &Request) -> Response {
    let Some(name) = request.path.strip_prefix("/v2/test/image/") else {
        return Response::status(if request.path == "/v2/" { 200 } else { 404 });
    };
    let Some(bytes) = content.get(name) else {
        return Response {
            body: br#"{"errors": [{"message": "manifest unknown"}]}"#.to_vec(),
            ..Response::status(404)
        };
    };
    let from = request.headers.get("range").and_then(|range| {
        range
            .strip_prefix("bytes=")?
            .strip_suffix('-')?
            .parse::<usize>()
            .ok()
    });
    match from {
        Some(from) => Response {
            status: 206,
            ..Response::ok(&bytes[from..])
        },
        None => Response::ok(bytes),
    }
}

async fn serve(
    mut stream: TcpStream,
    response: &(impl Fn(&Request) -> Response + ?Sized),
    log: &Mutex<Vec<Request>>,
) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        // Refuse clients that start a TLS handshake, as a plain HTTP registry does.
        let byte = stream.read_u8().await?;
        if head.is_empty() && !byte.is_ascii_uppercase() {
            return Ok(());
        }
        head.push(byte);
    }
    let text = String::from_utf8_lossy(&head).into_owned();
    let mut lines = text.lines();
    let path = lines.next().unwrap().split(' ').nth(1).unwrap().to_owned();
    let headers = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
        .collect();
    let request = Request { path, headers };
    let given = response(&request);
    log.lock().unwrap().push(request);
    let mut reply = format!(
        "HTTP/1.1 {} X\r\nconnection: close\r\ncontent-length: {}\r\n",
        given.status,
        given.body.len()
    );
    for (name, value) in &given.headers {
        write!(reply, "{name}: {value}\r\n").unwrap();
    }
    reply.push_str("\r\n");
    stream.write_all(reply.as_bytes()).await?;
    let sent = given.cut.unwrap_or(given.body.len());
    stream.write_all(&given.body[..sent]).await?;
    stream.shutdown().await
}

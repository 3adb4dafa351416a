//! The newer runtime API from the client's side: REST files by raw HTTP, processes by gRPC frames.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use bytes::{BufMut, Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use support::{Sandbox, body_of, status_of};

fn request(sandbox: &Sandbox, method: &str, path: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    bytes.extend_from_slice(body);
    sandbox.rest_request(&bytes)
}

fn json_of(answer: &[u8]) -> Value {
    serde_json::from_slice(body_of(answer)).unwrap()
}

#[test]
fn files_are_written_read_listed_and_deleted() {
    let sandbox = Sandbox::start();
    let content: Vec<u8> = (0..=255).cycle().take(200_000).collect();
    assert_eq!(
        status_of(&request(
            &sandbox,
            "PUT",
            "/v1/files/deep%2Fer%2Ffile?mode=0755",
            &content
        )),
        204
    );
    let read = request(&sandbox, "GET", "/v1/files/deep%2Fer%2Ffile", b"");
    assert_eq!((status_of(&read), body_of(&read)), (200, &content[..]));
    let listing = json_of(&request(&sandbox, "GET", "/v1/files/deep%2Fer", b""));
    assert_eq!(listing["path"], "/deep/er");
    let entry = &listing["entries"][0];
    assert_eq!(
        (&entry["name"], &entry["mode"], &entry["size"]),
        (&json!("file"), &json!("0755"), &json!(200_000))
    );
    assert!(entry["modified_at"].as_str().unwrap().ends_with('Z'));
    let head = request(&sandbox, "HEAD", "/v1/files/deep%2Fer%2Ffile", b"");
    assert_eq!((status_of(&head), body_of(&head).len()), (200, 0));
    assert_eq!(
        status_of(&request(&sandbox, "HEAD", "/v1/files/none", b"")),
        404
    );
    let conflict = request(&sandbox, "DELETE", "/v1/files/deep", b"");
    assert_eq!(
        (status_of(&conflict), json_of(&conflict)["code"].clone()),
        (409, json!("CONFLICT"))
    );
    assert_eq!(
        status_of(&request(
            &sandbox,
            "DELETE",
            "/v1/files/deep?recursive=true",
            b""
        )),
        204
    );
    let gone = request(&sandbox, "GET", "/v1/files/deep", b"");
    assert_eq!(
        (status_of(&gone), json_of(&gone)["code"].clone()),
        (404, json!("NOT_FOUND"))
    );
}

#[test]
fn path_traversal_and_invalid_requests_are_refused_with_codes() {
    let sandbox = Sandbox::start();
    for path in [
        "/v1/files/%2E%2E%2Fetc%2Fpasswd",
        "/v1/files/a%2F..%2F..%2Fx",
    ] {
        let answer = request(&sandbox, "GET", path, b"");
        assert_eq!(
            (status_of(&answer), json_of(&answer)["code"].clone()),
            (403, json!("PERMISSION_DENIED"))
        );
    }
    for path in ["/v1/files/x?mode=999", "/v1/files/x?mode=0abc"] {
        let answer = request(&sandbox, "PUT", path, b"x");
        assert_eq!(
            (status_of(&answer), json_of(&answer)["code"].clone()),
            (400, json!("INVALID_ARGUMENT"))
        );
    }
    let health = json_of(&request(&sandbox, "GET", "/v1/health", b""));
    assert_eq!(health["status"], "ok");
    assert!(json_of(&request(&sandbox, "GET", "/v1/metadata", b""))["env"].is_object());
}

fn with_headers(sandbox: &Sandbox, path: &str, headers: &str) -> Vec<u8> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n");
    sandbox.rest_request(request.as_bytes())
}

#[test]
fn a_range_of_a_file_is_served_alone() {
    let sandbox = Sandbox::start();
    let content: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    assert_eq!(
        status_of(&request(&sandbox, "PUT", "/v1/files/f", &content)),
        204
    );
    let part = with_headers(&sandbox, "/v1/files/f", "Range: bytes=131073-262144\r\n");
    assert_eq!(
        (status_of(&part), body_of(&part)),
        (206, &content[131_073..=262_144])
    );
    let head = String::from_utf8_lossy(&part).to_lowercase();
    assert!(
        head.contains("content-range: bytes 131073-262144/300000\r\n"),
        "{head}"
    );
    assert!(head.contains("content-length: 131072\r\n"));
    let whole = with_headers(&sandbox, "/v1/files/f", "");
    assert_eq!((status_of(&whole), body_of(&whole)), (200, &content[..]));
    let head = String::from_utf8_lossy(&whole).into_owned();
    assert!(head.to_lowercase().contains("accept-ranges: bytes\r\n"));
    let etag = head
        .lines()
        .find_map(|line| line.strip_prefix("etag: "))
        .unwrap();
    for (condition, status) in [(etag, 206), ("\"other\"", 200)] {
        let headers = format!("Range: bytes=0-9\r\nIf-Range: {condition}\r\n");
        let answer = with_headers(&sandbox, "/v1/files/f", &headers);
        assert_eq!(status_of(&answer), status, "{condition}");
    }
    let beyond = with_headers(&sandbox, "/v1/files/f", "Range: bytes=300000-\r\n");
    assert_eq!(status_of(&beyond), 416);
    let head = String::from_utf8_lossy(&beyond).to_lowercase();
    assert!(head.contains("content-range: bytes */300000\r\n"), "{head}");
    let several = with_headers(&sandbox, "/v1/files/f", "Range: bytes=0-1,5-6\r\n");
    assert_eq!(
        (status_of(&several), body_of(&several)),
        (200, &content[..])
    );
}

#[test]
fn files_are_inspected_and_renamed() {
    let sandbox = Sandbox::start();
    assert_eq!(
        status_of(&request(
            &sandbox,
            "PUT",
            "/v1/files/a%2Ff?mode=0755",
            b"12345"
        )),
        204
    );
    let stat = json_of(&request(&sandbox, "GET", "/v1/files/a%2Ff?stat=true", b""));
    assert_eq!(
        (&stat["name"], &stat["type"], &stat["size"], &stat["mode"]),
        (&json!("f"), &json!("file"), &json!(5), &json!("0755"))
    );
    assert!(stat["modified_at"].as_str().unwrap().ends_with('Z'));
    let stat = json_of(&request(&sandbox, "GET", "/v1/files/a?stat=true", b""));
    assert_eq!(
        (&stat["name"], &stat["type"]),
        (&json!("a"), &json!("directory"))
    );
    let moved = request(&sandbox, "POST", "/v1/files/a%2Ff?rename_to=b%2Fc%2Fg", b"");
    assert_eq!(status_of(&moved), 204);
    assert_eq!(
        body_of(&request(&sandbox, "GET", "/v1/files/b%2Fc%2Fg", b"")),
        b"12345"
    );
    std::os::unix::fs::symlink("/etc", sandbox.base().join("out")).unwrap();
    for (method, path, status) in [
        ("GET", "/v1/files/a%2Ff?stat=true", 404),
        ("GET", "/v1/files/out%2Fpasswd?stat=true", 403),
        ("POST", "/v1/files/a%2Ff?rename_to=x", 404),
        ("POST", "/v1/files/b?rename_to=b%2Fc%2Fd", 400),
        ("POST", "/v1/files/b", 400),
        ("POST", "/v1/files/b?rename_to=..%2Fx", 403),
        ("POST", "/v1/files/..%2Fx?rename_to=b", 403),
        ("POST", "/v1/files/b%2Fc%2Fg?rename_to=out%2Fx", 403),
        ("POST", "/v1/files/.?rename_to=b", 403),
    ] {
        let answer = request(&sandbox, method, path, b"");
        assert_eq!(status_of(&answer), status, "{method} {path}");
    }
    // The failed rename created no directories either.
    assert_eq!(
        status_of(&request(&sandbox, "GET", "/v1/files/x", b"")),
        404
    );
}

struct Grpc {
    sender: hyper::client::conn::http2::SendRequest<Full<Bytes>>,
}

fn frame(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::new();
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.len()).unwrap());
    framed.put_slice(message);
    framed.freeze()
}

/// A length-delimited field.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut encoded = vec![number << 3 | 2, u8::try_from(bytes.len()).unwrap()];
    encoded.extend_from_slice(bytes);
    encoded
}

/// `config { command: … }` as field 1.
fn command(words: &[&str]) -> Vec<u8> {
    let config: Vec<u8> = words
        .iter()
        .flat_map(|word| field(1, word.as_bytes()))
        .collect();
    field(1, &config)
}

impl Grpc {
    async fn connect(sandbox: &Sandbox) -> Self {
        let stream = tokio::net::TcpStream::connect(sandbox.grpc())
            .await
            .unwrap();
        let (sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                .await
                .unwrap();
        tokio::spawn(connection);
        Self { sender }
    }

    async fn call(
        &mut self,
        method: &str,
        message: &[u8],
        timeout: Option<&str>,
    ) -> http::Response<Incoming> {
        let mut request = http::Request::builder()
            .method("POST")
            .uri(format!("http://sandbox/process.v1.ProcessService/{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        if let Some(timeout) = timeout {
            request = request.header("grpc-timeout", timeout);
        }
        self.sender
            .send_request(request.body(Full::new(frame(message))).unwrap())
            .await
            .unwrap()
    }

    /// The message, and the status.
    async fn unary(
        &mut self,
        method: &str,
        message: &[u8],
        timeout: Option<&str>,
    ) -> (Vec<u8>, String) {
        let response = self.call(method, message, timeout).await;
        let early = response
            .headers()
            .get("grpc-status")
            .map(|status| status.to_str().unwrap().to_owned());
        let collected = response.into_body().collect().await.unwrap();
        let status = early.unwrap_or_else(|| {
            collected.trailers().unwrap()["grpc-status"]
                .to_str()
                .unwrap()
                .to_owned()
        });
        let bytes = collected.to_bytes();
        (bytes.get(5..).unwrap_or_default().to_vec(), status)
    }
}

#[tokio::test]
async fn execute_runs_a_command_to_its_end() {
    let sandbox = Sandbox::start();
    let mut grpc = Grpc::connect(&sandbox).await;
    let request = command(&["sh", "-c", "echo out; echo err >&2; exit 3"]);
    let (message, status) = grpc.unary("Execute", &request, None).await;
    let expected = [vec![8, 3], field(2, b"out\n"), field(3, b"err\n")].concat();
    assert_eq!((message, status.as_str()), (expected, "0"));
    let (_, late) = grpc
        .unary("Execute", &command(&["sleep", "300"]), Some("200m"))
        .await;
    assert_eq!(late, "4");
    let (_, empty) = grpc.unary("Execute", &[], None).await;
    assert_eq!(empty, "3");
    let escaping = field(1, &[field(1, b"true"), field(3, b"../..")].concat());
    assert_eq!(grpc.unary("Execute", &escaping, None).await.1, "7");
    assert_eq!(grpc.unary("Nonsense", &[], None).await.1, "12");
}

#[tokio::test]
async fn execute_reports_truncated_output() {
    let sandbox = Sandbox::start_with(|options| options.max_output_bytes = 100);
    let mut grpc = Grpc::connect(&sandbox).await;
    for (bytes, truncated) in [("100", None), ("101", Some("true"))] {
        let request = command(&["head", "-c", bytes, "/dev/zero"]);
        let response = grpc.call("Execute", &request, None).await;
        let collected = response.into_body().collect().await.unwrap();
        let trailers = collected.trailers().unwrap();
        assert_eq!(trailers["grpc-status"], "0");
        let header = trailers.get("output-truncated");
        assert_eq!(header.map(|header| header.to_str().unwrap()), truncated);
        assert_eq!(
            collected.to_bytes()[5..],
            [vec![18, 100], vec![0; 100]].concat()
        );
    }
}

#[tokio::test]
async fn start_streams_output_and_accepts_input_and_signals() {
    let sandbox = Sandbox::start();
    let mut grpc = Grpc::connect(&sandbox).await;
    let mut body = grpc
        .call("Start", &command(&["cat"]), None)
        .await
        .into_body();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    // init { process_id }: field 1 of field 1, a varint.
    let process = &first[5 + 2..];
    assert_eq!((first[5], process[0]), (0x0a, 0x08));
    let write = [process.to_vec(), field(2, b"typed")].concat();
    assert_eq!(grpc.unary("WriteStdin", &write, None).await.1, "0");
    let output = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(&output[5..], field(2, b"typed"));
    assert_eq!(
        grpc.unary(
            "ResizeTTY",
            &[process.to_vec(), vec![0x10, 80, 0x18, 24]].concat(),
            None
        )
        .await
        .1,
        "9"
    );
    assert_eq!(
        grpc.unary(
            "SendSignal",
            &[process.to_vec(), vec![0x10, 1]].concat(),
            None
        )
        .await
        .1,
        "3"
    );
    assert_eq!(
        grpc.unary(
            "SendSignal",
            &[process.to_vec(), vec![0x10, 15]].concat(),
            None
        )
        .await
        .1,
        "0"
    );
    let exit = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(&exit[5..], field(4, &[8, 0x8f, 1]), "128 + 15");
    let trailers = body
        .frame()
        .await
        .unwrap()
        .unwrap()
        .into_trailers()
        .unwrap();
    assert_eq!(trailers["grpc-status"], "0");
    drop(body);
    let unknown = grpc.unary("WriteStdin", &[0x08, 1], None).await;
    assert_eq!(unknown.1, "5");
}

#[tokio::test]
async fn a_cancelled_stream_kills_its_process() {
    let sandbox = Sandbox::start();
    let marker = sandbox.base().join("pid");
    let line = format!("echo $$ > {}; exec sleep 300", marker.display());
    let mut grpc = Grpc::connect(&sandbox).await;
    let body = grpc
        .call("Start", &command(&["sh", "-c", &line]), None)
        .await
        .into_body();
    tokio::task::spawn_blocking({
        let marker = marker.clone();
        move || {
            support::wait_for("the process", || {
                std::fs::read_to_string(&marker).is_ok_and(|pid| pid.ends_with('\n'))
            });
        }
    })
    .await
    .unwrap();
    drop(body);
    let pid = std::fs::read_to_string(marker).unwrap();
    tokio::task::spawn_blocking(move || support::wait_until_gone(&pid))
        .await
        .unwrap();
}

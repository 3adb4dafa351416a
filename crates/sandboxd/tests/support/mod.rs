//! Runs the real binary on free ports, and sends raw HTTP to it.
#![allow(
    dead_code,
    reason = "each test file uses a different part of this module"
)]
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Longer than a busy machine stalls, and shorter than the commands that tests start and do not wait for.
const DEADLINE: Duration = Duration::from_secs(120);
/// The base directory; its parent is checked for files that must not be there.
const BASE_NAME: &str = "base";

/// What a test changes in the configuration of its sandbox.
pub struct Options {
    pub max_output_bytes: usize,
    pub shutdown_grace_seconds: u64,
    /// Variables that replace the corresponding flags.
    pub environment: Vec<(&'static str, &'static str)>,
}

pub struct Sandbox {
    process: Child,
    base: tempfile::TempDir,
    sdk: SocketAddr,
    init: SocketAddr,
    rest: SocketAddr,
    grpc: SocketAddr,
}

impl Sandbox {
    pub fn start() -> Self {
        Self::start_with(|_| {})
    }

    pub fn start_with(change: impl FnOnce(&mut Options)) -> Self {
        let mut options = Options {
            max_output_bytes: 16 * 1024 * 1024,
            shutdown_grace_seconds: 60,
            environment: Vec::new(),
        };
        change(&mut options);
        let base = tempfile::tempdir().unwrap();
        let mut process = Command::new(env!("CARGO_BIN_EXE_sandboxd"))
            .args(["--listen", "127.0.0.1:0", "--init-listen", "127.0.0.1:0"])
            .args([
                "--rest-listen",
                "127.0.0.1:0",
                "--grpc-listen",
                "127.0.0.1:0",
            ])
            .env("SANDBOX_BASE_DIR", base.path().join(BASE_NAME))
            .envs(options.environment)
            .arg(format!("--max-output-bytes={}", options.max_output_bytes))
            .arg(format!(
                "--shutdown-grace={}",
                options.shutdown_grace_seconds
            ))
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut stderr = BufReader::new(process.stderr.take().unwrap());
        stderr.read_line(&mut line).unwrap();
        let address = |key: &str| -> SocketAddr {
            let rest = line
                .split(&format!("{key}="))
                .nth(1)
                .unwrap_or_else(|| panic!("no {key} in {line:?}"));
            let start = rest.find("127.0.0.1:").unwrap();
            rest[start..]
                .chars()
                .take_while(|c| c.is_ascii_digit() || ".:".contains(*c))
                .collect::<String>()
                .parse()
                .unwrap()
        };
        let (sdk, init) = (address("sdk"), address("init"));
        let (rest, grpc) = (address("rest"), address("grpc"));
        std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
        Self {
            process,
            base,
            sdk,
            init,
            rest,
            grpc,
        }
    }

    pub fn base(&self) -> PathBuf {
        self.base.path().join(BASE_NAME).canonicalize().unwrap()
    }

    pub fn sdk(&self) -> SocketAddr {
        self.sdk
    }

    pub fn grpc(&self) -> SocketAddr {
        self.grpc
    }

    pub fn rest_request(&self, bytes: &[u8]) -> Vec<u8> {
        read_all(connect_and_send(self.rest, bytes))
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    pub fn send_bytes(&self, bytes: &[u8]) -> TcpStream {
        connect_and_send(self.sdk, bytes)
    }

    pub fn send(&self, text: &str) -> TcpStream {
        self.send_bytes(text.as_bytes())
    }

    pub fn request_bytes(&self, bytes: &[u8]) -> Vec<u8> {
        read_all(self.send_bytes(bytes))
    }

    pub fn request(&self, text: &str) -> Vec<u8> {
        self.request_bytes(text.as_bytes())
    }

    pub fn get(&self, path: &str) -> Vec<u8> {
        self.request(&format!(
            "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        ))
    }

    pub fn post_json(&self, path: &str, body: &str) -> Vec<u8> {
        self.request(&post(path, body))
    }

    pub fn execute(&self, body: &Value) -> Value {
        let answer = self.post_json("/execute", &body.to_string());
        assert_eq!(
            status_of(&answer),
            200,
            "{}",
            String::from_utf8_lossy(&answer)
        );
        serde_json::from_slice(body_of(&answer)).unwrap()
    }

    pub fn init_request(&self, method: &str, path: &str, body: &str) -> Vec<u8> {
        let text = format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        read_all(connect_and_send(self.init, text.as_bytes()))
    }

    /// Sends SIGTERM and returns the exit code.
    pub fn terminate(mut self) -> Option<i32> {
        signal(&self.process.id().to_string(), "-TERM");
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "the server did not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn connect_and_send(address: SocketAddr, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    // A server that refuses early may close before everything is sent.
    let _ = stream.write_all(bytes);
    stream
}

pub fn post(path: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

pub fn read_all(mut stream: TcpStream) -> Vec<u8> {
    let mut answer = Vec::new();
    let mut buffer = vec![0; 65536];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return answer,
            Ok(count) => answer.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return answer,
            Err(error) => panic!("{error} after {:?}", String::from_utf8_lossy(&answer)),
        }
    }
}

pub fn status_of(answer: &[u8]) -> u16 {
    let text = String::from_utf8_lossy(&answer[..answer.len().min(20)]).into_owned();
    text.split(' ')
        .nth(1)
        .unwrap_or_else(|| panic!("no status in {text:?}"))
        .parse()
        .unwrap()
}

pub fn body_of(answer: &[u8]) -> &[u8] {
    let end = answer
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .unwrap();
    &answer[end + 4..]
}

/// The upload of one file, as `requests` sends it.
pub fn multipart(name: &str, content: &[u8]) -> Vec<u8> {
    let mut body = format!(
        "--boundary123\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\r\n"
    )
    .into_bytes();
    body.extend_from_slice(content);
    body.extend_from_slice(b"\r\n--boundary123--\r\n");
    let mut request = format!(
        "POST /upload HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: multipart/form-data; boundary=boundary123\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    request.extend(body);
    request
}

pub fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until the process has ended; a zombie counts as ended.
pub fn wait_until_gone(pid: &str) {
    let status = format!("/proc/{}/stat", pid.trim());
    wait_for("a process to end", || {
        std::fs::read_to_string(&status).map_or(true, |text| {
            text.rsplit(')')
                .next()
                .unwrap()
                .trim_start()
                .starts_with('Z')
        })
    });
}

pub fn signal(pid: &str, signal: &str) {
    assert!(
        Command::new("kill")
            .args([signal, pid])
            .status()
            .unwrap()
            .success()
    );
}

pub fn exists(path: &Path) -> bool {
    path.exists()
}

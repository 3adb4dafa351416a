//! The router as a process of its own, as on a cluster: its logs and metrics.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::exposition;
use crate::support::{agent_sandbox, get};

const DEADLINE: Duration = Duration::from_secs(120);

/// A port that one test has found free must not be taken by the other.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

struct Router {
    process: Child,
    http: String,
    metrics: String,
    _alone: MutexGuard<'static, ()>,
}

impl Router {
    /// Starts a router that has no API to watch.
    fn start(arguments: &[&str]) -> Self {
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let home = std::env::temp_dir();
        // Another process may take a port that was free before, so there is more than one attempt.
        for _ in 0..5 {
            let [http, metrics] = free_addresses();
            let mut command: Command = agent_sandbox(&home);
            let mut process = command
                .env_remove("RUST_LOG")
                .env_remove("KUBERNETES_SERVICE_HOST")
                .env("HOME", "/nonexistent")
                .arg("router")
                .arg(format!("--http-bind-address={http}"))
                .arg(format!("--metrics-bind-address={metrics}"))
                .arg("--health-probe-bind-address=0")
                .args(arguments)
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let deadline = Instant::now() + DEADLINE;
            while process.try_wait().unwrap().is_none() {
                assert!(Instant::now() < deadline, "the router does not listen");
                let listens = TcpStream::connect(&http).is_ok();
                // The listener is this router only if the router still runs.
                if listens && process.try_wait().unwrap().is_none() {
                    return Self {
                        process,
                        http,
                        metrics,
                        _alone: alone,
                    };
                }
                std::thread::park_timeout(Duration::from_millis(5));
            }
        }
        panic!("the router ended five times");
    }

    /// Stops it, and returns what it logged.
    fn stop(mut self) -> Vec<String> {
        kill_process(Pid::from_child(&self.process), Signal::TERM).unwrap();
        let stderr = self.process.stderr.take().unwrap();
        BufReader::new(stderr).lines().map(Result::unwrap).collect()
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Two addresses without a listener.
fn free_addresses() -> [String; 2] {
    let listeners = [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().to_string())
}

fn ask_for_a_sandbox(router: &Router) {
    let mut stream = TcpStream::connect(&router.http).unwrap();
    write!(
        stream,
        "GET /path?secret HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: 80\r\n\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
}

#[test]
fn the_access_log_has_a_line_for_each_request_when_asked_for() {
    let router = Router::start(&["--access-log", "--upstream-max-retries=0"]);
    ask_for_a_sandbox(&router);
    let lines = router.stop();
    let access: Vec<&String> = lines
        .iter()
        .filter(|line| line.contains("access"))
        .collect();
    assert_eq!(access.len(), 1, "{lines:?}");
    for word in ["GET", "/path", "default/abc", "127.0.0.1", "502"] {
        assert!(access[0].contains(word), "no {word} in {}", access[0]);
    }
    assert!(!access[0].contains("secret"), "{}", access[0]);

    let quiet = Router::start(&["--upstream-max-retries=0"]);
    ask_for_a_sandbox(&quiet);
    let lines = quiet.stop();
    assert!(
        !lines.iter().any(|line| line.contains("access")),
        "{lines:?}"
    );
}

#[test]
fn a_router_alone_is_scraped_at_its_own_address() {
    let router = Router::start(&["--upstream-max-retries=0"]);
    ask_for_a_sandbox(&router);
    let answer = get(&router.metrics, "/metrics");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("200 OK"), "{head}");
    let families = exposition::parse(body);
    assert_eq!(exposition::complaints(&families), Vec::<String>::new());
    let failed = families["agent_sandbox_router_requests_total"]
        .samples
        .iter()
        .find(|(_, labels, _)| labels["code"] == "5xx");
    assert!(failed.unwrap().2 >= 1.0);
    assert!(families.contains_key("process_resident_memory_bytes"));
    assert!(
        !families.contains_key("agent_sandbox_router_watch_synced"),
        "it watches nothing, so it is not blind"
    );
}

//! `bench router`: the router and nginx as plain proxies of the same backend, in one run. Backend and load are as cheap as possible, each
//! on its own thread, so that the proxy makes the difference. Short samples of all targets alternate, so that a slow period of the machine
//! affects all of them.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use ::router::{Config, Router};
use anyhow::{Context, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime;
use tokio_util::sync::CancellationToken;

use crate::sample::milliseconds;
use crate::table::Table;

/// The size of a measurement, and its targets.
#[derive(Clone, Debug)]
struct Options {
    /// Numbers of connections, each with one request in flight.
    connections: Vec<usize>,
    /// Samples of each target.
    rounds: usize,
    /// The duration of a sample.
    duration: Duration,
    /// The nginx to compare with, if it is installed.
    nginx: Option<PathBuf>,
    /// Another running router to compare with.
    other: Option<SocketAddr>,
}

impl Default for Options {
    fn default() -> Self {
        let nginx = ["/usr/sbin/nginx", "/usr/bin/nginx"]
            .into_iter()
            .map(PathBuf::from)
            .find(|path| path.exists());
        Self {
            connections: vec![1, 50, 500],
            rounds: 10,
            duration: Duration::from_millis(500),
            nginx,
            other: None,
        }
    }
}

const OTHER: &str = "other";

/// The figures of one target with one number of connections.
#[derive(Clone, Debug, Default)]
struct Measurement {
    /// `direct`, `router`, `nginx` or `other`.
    target: &'static str,
    connections: usize,
    /// Requests per second, of each sample.
    rates: Vec<f64>,
    failures: u64,
    /// In nanoseconds.
    latencies: Vec<u64>,
}

impl Measurement {
    fn requests_per_second(&self) -> f64 {
        median(self.rates.clone())
    }

    fn percentile(&self, percent: usize) -> Duration {
        let mut latencies = self.latencies.clone();
        latencies.sort_unstable();
        let index = (latencies.len() * percent / 100).min(latencies.len().saturating_sub(1));
        Duration::from_nanos(latencies.get(index).copied().unwrap_or_default())
    }

    /// The ratio of the rate to that of another target: lowest, median, highest over all samples.
    fn against(&self, other: &Self) -> [f64; 3] {
        let rounds = self.rates.iter().zip(&other.rates);
        let mut ratios: Vec<f64> = rounds.map(|(ours, theirs)| ours / theirs).collect();
        ratios.sort_by(f64::total_cmp);
        let end = |ratio: Option<&f64>| ratio.copied().unwrap_or_default();
        [
            end(ratios.first()),
            median(ratios.clone()),
            end(ratios.last()),
        ]
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.get(middle) {
        None => 0.0,
        Some(upper) if values.len().is_multiple_of(2) => f64::midpoint(values[middle - 1], *upper),
        Some(value) => *value,
    }
}

/// Measures and prints. Blocks; to be called outside of a tokio runtime.
pub fn execute(other: Option<SocketAddr>) -> anyhow::Result<()> {
    let options = Options {
        other,
        ..Options::default()
    };
    print(&run(&options)?);
    Ok(())
}

fn print(measured: &[Measurement]) {
    let mut table = Table::new(&[
        "TARGET",
        "CONNECTIONS",
        "REQUESTS/S",
        "P50",
        "P99",
        "FAILURES",
        "TO NGINX",
    ]);
    for figure in measured {
        let peer = measured
            .iter()
            .find(|other| other.target == "nginx" && other.connections == figure.connections);
        let ratio = peer.map_or_else(String::new, |peer| {
            let [lowest, median, highest] = figure.against(peer);
            format!("{median:.2}× ({lowest:.2} – {highest:.2})")
        });
        table.row(vec![
            figure.target.to_owned(),
            figure.connections.to_string(),
            format!("{:.0}", figure.requests_per_second()),
            milliseconds(figure.percentile(50)),
            milliseconds(figure.percentile(99)),
            figure.failures.to_string(),
            ratio,
        ]);
    }
    print!("{}", table.render());
}

fn run(options: &Options) -> anyhow::Result<Vec<Measurement>> {
    let stop = CancellationToken::new();
    let _stop_all = stop.clone().drop_guard();
    let backend = start_backend(stop.clone())?;
    let router = start_router(stop.clone())?;
    let nginx = options
        .nginx
        .as_deref()
        .map(|program| Nginx::start(program, backend))
        .transpose()?;
    let mut targets = vec![("direct", backend), ("router", router)];
    targets.extend(nginx.as_ref().map(|nginx| ("nginx", nginx.address)));
    targets.extend(options.other.map(|address| (OTHER, address)));
    let mut measurements = Vec::new();
    for &connections in &options.connections {
        let mut measured: Vec<Measurement> = targets
            .iter()
            .map(|(target, _)| Measurement {
                target,
                connections,
                ..Measurement::default()
            })
            .collect();
        for _ in 0..options.rounds {
            for (measurement, (_, address)) in measured.iter_mut().zip(&targets) {
                take_sample(measurement, *address, backend.port(), options.duration)?;
            }
        }
        measurements.extend(measured);
    }
    Ok(measurements)
}

/// Runs `serve` with its own runtime on a new thread, and returns the address it listens on.
fn on_thread<F, Serving>(
    name: &str,
    mut runtime: runtime::Builder,
    serve: F,
) -> anyhow::Result<SocketAddr>
where
    F: FnOnce(TcpListener) -> Serving + Send + 'static,
    Serving: Future<Output = ()>,
{
    let (sender, receiver) = mpsc::channel();
    let spawned = std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            let Ok(runtime) = runtime.enable_all().build() else {
                return;
            };
            runtime.block_on(async move {
                let Ok(listener) = TcpListener::bind("127.0.0.1:0").await else {
                    return;
                };
                if let Ok(address) = listener.local_addr() {
                    let _ = sender.send(address);
                    serve(listener).await;
                }
            });
        });
    spawned.context("cannot start a thread")?;
    receiver
        .recv()
        .with_context(|| format!("the {name} cannot listen"))
}

/// A server that responds to every empty line.
fn start_backend(stop: CancellationToken) -> anyhow::Result<SocketAddr> {
    const ANSWER: &[u8] =
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 13\r\n\r\nHello, world!";
    let runtime = runtime::Builder::new_current_thread();
    on_thread("backend", runtime, move |listener| async move {
        let accepting = async {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.set_nodelay(true);
                tokio::spawn(async move {
                    let mut buffer = vec![0; 8192];
                    let mut filled = 0;
                    while let Ok(count @ 1..) = stream.read(&mut buffer[filled..]).await {
                        filled += count;
                        if buffer[..filled].ends_with(b"\r\n\r\n") {
                            filled = 0;
                            if stream.write_all(ANSWER).await.is_err() {
                                return;
                            }
                        }
                    }
                });
            }
        };
        tokio::select! {
            () = accepting => {}
            () = stop.cancelled() => {}
        }
    })
}

/// The router as it runs in production: with one thread for each CPU.
fn start_router(stop: CancellationToken) -> anyhow::Result<SocketAddr> {
    let router = Router::new(Config::default(), None).context("the router cannot start")?;
    router
        .registry()
        .insert("default", "bench", vec![Ipv4Addr::LOCALHOST.into()]);
    let runtime = runtime::Builder::new_multi_thread();
    on_thread("router", runtime, move |listener| async move {
        let serving = async move { router.serve_on_threads(listener, stop).await };
        // On the worker threads of the runtime, not on this one.
        let _ = tokio::spawn(serving).await;
    })
}

struct Nginx {
    process: Child,
    directory: PathBuf,
    address: SocketAddr,
}

impl Nginx {
    fn start(program: &Path, backend: SocketAddr) -> anyhow::Result<Self> {
        let directory =
            std::env::temp_dir().join(format!("agent-sandbox-bench-{}", std::process::id()));
        std::fs::create_dir_all(&directory).context("cannot make a directory for nginx")?;
        let free =
            std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let address = free.context("cannot find a free port")?;
        let configuration = format!(
            "worker_processes auto;\ndaemon off;\npid {directory}/pid;\nerror_log {directory}/error.log;\n\
             events {{ worker_connections 4096; }}\n\
             http {{\n  access_log off;\n  client_body_temp_path {directory}/body;\n  proxy_temp_path {directory}/proxy;\n\
             \x20 fastcgi_temp_path {directory}/fastcgi;\n  uwsgi_temp_path {directory}/uwsgi;\n  scgi_temp_path {directory}/scgi;\n\
             \x20 keepalive_requests 1000000000;\n\
             \x20 upstream sandbox {{ server {backend}; keepalive 512; keepalive_requests 1000000000; }}\n\
             \x20 server {{ listen {address}; location / {{ proxy_pass http://sandbox; proxy_http_version 1.1;\n\
             \x20   proxy_set_header Connection \"\"; proxy_set_header X-Forwarded-For $remote_addr; }} }}\n}}\n",
            directory = directory.display()
        );
        let file = directory.join("nginx.conf");
        std::fs::write(&file, configuration).context("cannot write nginx's configuration")?;
        let process = Command::new(program)
            .arg("-c")
            .arg(&file)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start nginx")?;
        let nginx = Self {
            process,
            directory,
            address,
        };
        let deadline = Instant::now() + Duration::from_secs(10);
        while std::net::TcpStream::connect(address).is_err() {
            ensure!(Instant::now() < deadline, "nothing listens on {address}");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(nginx)
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // On SIGTERM the master stops its workers; SIGKILL would orphan them.
        let _ = Command::new("kill")
            .arg("-TERM")
            .arg(self.process.id().to_string())
            .status();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn take_sample(
    measurement: &mut Measurement,
    address: SocketAddr,
    port: u16,
    duration: Duration,
) -> anyhow::Result<()> {
    /// Requests before the sample, to fill caches.
    const WARM_UP: Duration = Duration::from_millis(100);
    // Another router may find sandboxes only by DNS or by this header.
    let pod_address = if measurement.target == OTHER {
        "X-Sandbox-Pod-IP: 127.0.0.1\r\n"
    } else {
        ""
    };
    let request = format!(
        "GET /hello HTTP/1.1\r\nHost: sandbox.example\r\nAccept: */*\r\nX-Sandbox-ID: bench\r\nX-Sandbox-Port: {port}\r\n\
         {pod_address}\r\n"
    );
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot make a runtime")?;
    let connections = measurement.connections;
    let (latencies, failures, elapsed) = runtime.block_on(async {
        let streams = connect(address, connections).await?;
        let warm = load(streams, address, &request, WARM_UP).await;
        let started = Instant::now();
        let loaded = load(warm.streams, address, &request, duration).await;
        anyhow::Ok((
            loaded.latencies,
            warm.failures + loaded.failures,
            started.elapsed(),
        ))
    })?;
    #[expect(
        clippy::cast_precision_loss,
        reason = "a rate needs no more than 52 bits"
    )]
    let rate = latencies.len() as f64 / elapsed.as_secs_f64();
    measurement.rates.push(rate);
    measurement.latencies.extend(latencies);
    measurement.failures += failures;
    Ok(())
}

async fn connect(address: SocketAddr, connections: usize) -> anyhow::Result<Vec<TcpStream>> {
    let mut streams = Vec::with_capacity(connections);
    for _ in 0..connections {
        let stream = TcpStream::connect(address).await;
        streams.push(stream.context("cannot connect")?);
    }
    for stream in &streams {
        let _ = stream.set_nodelay(true);
    }
    Ok(streams)
}

/// The figures of a load, and its open connections.
#[derive(Default)]
struct Loaded {
    streams: Vec<TcpStream>,
    latencies: Vec<u64>,
    failures: u64,
}

/// Keeps one request in flight on each connection for `duration`.
async fn load(
    streams: Vec<TcpStream>,
    address: SocketAddr,
    request: &str,
    duration: Duration,
) -> Loaded {
    let until = Instant::now() + duration;
    let mut clients = tokio::task::JoinSet::new();
    for mut stream in streams {
        let request = request.to_owned();
        clients.spawn(async move {
            let mut latencies = Vec::with_capacity(4096);
            let mut failures = 0;
            let mut buffer = vec![0; 4096];
            while Instant::now() < until {
                let sent = Instant::now();
                if exchange(&mut stream, request.as_bytes(), &mut buffer)
                    .await
                    .is_none()
                {
                    failures += 1;
                    match TcpStream::connect(address).await {
                        Ok(fresh) => stream = fresh,
                        Err(_) => return (None, latencies, failures),
                    }
                } else {
                    latencies.push(u64::try_from(sent.elapsed().as_nanos()).unwrap_or(u64::MAX));
                }
            }
            (Some(stream), latencies, failures)
        });
    }
    let mut all = Loaded::default();
    while let Some(client) = clients.join_next().await {
        if let Ok((stream, latencies, failures)) = client {
            all.streams.extend(stream);
            all.latencies.extend(latencies);
            all.failures += failures;
        }
    }
    all
}

/// One request and its response, which must be the whole 200 of the backend.
async fn exchange(stream: &mut TcpStream, request: &[u8], buffer: &mut [u8]) -> Option<()> {
    stream.write_all(request).await.ok()?;
    let mut filled = 0;
    loop {
        match stream.read(&mut buffer[filled..]).await {
            Ok(count @ 1..) => filled += count,
            _ => return None,
        }
        if buffer[..filled].ends_with(b"Hello, world!") {
            return buffer.starts_with(b"HTTP/1.1 200").then_some(());
        }
    }
}

//! `bench state`: freezing and thawing, in the node alone and through the whole system.
//!
//! The node's figures are those of its runtime, without the API: the freezer itself. The answer after the thaw comes through a router
//! in this process, on a connection that was open before the freeze.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use ::node::Node;
use ::router::{Config, Router};
use anyhow::{Context, ensure};
use container_runtime::Runtime;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, ResourceExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::agent_sandbox::{Quickstart, Up};
use crate::node::pods::{remove_pod, start_pod};
use crate::node::{Machine, NAMESPACE};
use crate::sample::{Sample, milliseconds};
use crate::table::Table;

/// The port of the server in a pod of [`start_pod`].
const PORT: u16 = 8888;
/// How long a pod stays frozen.
const REST: Duration = Duration::from_millis(5);
/// The budgets of the medians.
const FREEZE: Duration = Duration::from_millis(1);
const FIRST_ANSWER: Duration = Duration::from_millis(3);

/// The figures of the node.
#[derive(Debug, Default)]
struct InNode {
    freeze: Sample,
    thaw: Sample,
    /// A request to a pod that runs.
    request: Sample,
    /// From the beginning of the thaw to the answer to a request through the router.
    first_answer: Sample,
}

/// The figures of the whole system.
#[derive(Debug, Default)]
struct Whole {
    suspend: Sample,
    resume: Sample,
    first_command: Sample,
}

/// Measures and prints. Fails beyond a budget.
pub async fn run(directory: &Path, rounds: usize) -> anyhow::Result<()> {
    let machine = Machine::start(&directory.join("node")).await?;
    let node = in_node(&machine.client, &machine.node, rounds).await;
    let node = machine.stop_after(node).await?;
    let up = Up::start(&directory.join("up"), Quickstart::TemplateAndPool).await?;
    let whole = through_everything(&up, rounds).await;
    let whole = up.stop_after(whole).await?;
    print!("{}", table(&node, &whole).render());
    let measured = node.freeze.percentile(50);
    ensure!(
        measured <= FREEZE,
        "freeze takes {}, beyond {}",
        milliseconds(measured),
        milliseconds(FREEZE)
    );
    let measured = node.first_answer.percentile(50);
    ensure!(
        measured <= FIRST_ANSWER,
        "thaw to the first answer takes {}, beyond {}",
        milliseconds(measured),
        milliseconds(FIRST_ANSWER)
    );
    Ok(())
}

fn table(node: &InNode, whole: &Whole) -> Table {
    let mut table = Table::new(&["WHAT", "P50", "P90", "P99"]);
    for (what, sample) in [
        ("freeze, in the node", &node.freeze),
        ("thaw, in the node", &node.thaw),
        ("request through the router, before", &node.request),
        ("thaw to the first answer", &node.first_answer),
        ("suspend to Frozen, through the API", &whole.suspend),
        ("resume to Ready, through the API", &whole.resume),
        ("first command after resume", &whole.first_command),
    ] {
        let percentiles = [50, 90, 99].map(|percent| milliseconds(sample.percentile(percent)));
        let mut row = vec![what.to_owned()];
        row.extend(percentiles);
        table.row(row);
    }
    table
}

async fn in_node(client: &Client, node: &Node, rounds: usize) -> anyhow::Result<InNode> {
    let pods = Api::<Pod>::namespaced(client.clone(), NAMESPACE);
    let pod = start_pod(&pods, "bench-state").await?.pod;
    let uid = pod.uid().context("a pod has no UID")?;
    let address = pod.status.as_ref().and_then(|status| status.pod_ip.clone());
    let address: IpAddr = address.context("a pod has no address")?.parse()?;
    let stop = CancellationToken::new();
    let _stop_router = stop.clone().drop_guard();
    let mut server = Exchange::open(address, stop).await?;
    let mut figures = InNode::default();
    for _ in 0..rounds {
        figures.request.add(server.request().await?);
        let began = Instant::now();
        node.runtime().freeze(&uid).await?;
        figures.freeze.add(began.elapsed());
        tokio::time::sleep(REST).await;
        let began = Instant::now();
        node.runtime().thaw(&uid).await?;
        figures.thaw.add(began.elapsed());
        server.request().await?;
        figures.first_answer.add(began.elapsed());
    }
    remove_pod(&pods, "bench-state").await?;
    Ok(figures)
}

/// A connection to a router that knows one pod.
struct Exchange {
    stream: TcpStream,
    request: String,
    buffer: Vec<u8>,
}

impl Exchange {
    async fn open(pod: IpAddr, stop: CancellationToken) -> anyhow::Result<Self> {
        let router = Router::new(Config::default(), None).context("the router cannot start")?;
        router.registry().insert(NAMESPACE, "bench", vec![pod]);
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address: SocketAddr = listener.local_addr()?;
        tokio::spawn(async move { router.serve_on_threads(listener, stop).await });
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            request: format!(
                "GET / HTTP/1.1\r\nHost: sandbox.example\r\nX-Sandbox-ID: bench\r\nX-Sandbox-Port: {PORT}\r\n\r\n"
            ),
            buffer: vec![0; 64 << 10],
        })
    }

    /// How long one request takes. Its answer is small and comes in one piece.
    async fn request(&mut self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        self.stream.write_all(self.request.as_bytes()).await?;
        let length = self.stream.read(&mut self.buffer).await?;
        let answer = String::from_utf8_lossy(&self.buffer[..length]);
        ensure!(answer.starts_with("HTTP/1.1 200"), "answered {answer:?}");
        Ok(began.elapsed())
    }
}

async fn through_everything(up: &Up, rounds: usize) -> anyhow::Result<Whole> {
    let client = up.sandboxes()?;
    up.await_warm_pool().await?;
    let options = sdk::CreateOptions::from_template(up.template()?);
    let sandbox = client.create(options).await?;
    let mut figures = Whole::default();
    for _ in 0..rounds {
        let began = Instant::now();
        sandbox.suspend_with(sdk::SuspensionType::Freeze).await?;
        figures.suspend.add(began.elapsed());
        let began = Instant::now();
        sandbox.resume().await?;
        figures.resume.add(began.elapsed());
        let began = Instant::now();
        let run = sandbox.commands().run("true").await?;
        figures.first_command.add(began.elapsed());
        ensure!(run.exit_code == 0, "`true` ended with {}", run.exit_code);
    }
    sandbox.terminate().await?;
    Ok(figures)
}

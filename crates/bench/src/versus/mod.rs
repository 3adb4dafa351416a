//! `bench versus-upstream`: our controller and upstream's, with the same job on the same API server.
//!
//! | module | owns |
//! |---|---|
//! | [`job`] | the pool, the claims, and when each became Ready |
//! | [`costs`] | what controllers cost the API server |
//! | [`report`] | the figures, as a table with ratios |
//!
//! Each controller runs alone, as a process, in its own namespace, with a fake node that marks every pod Ready at once.

mod costs;
mod job;
mod report;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;

use job::Job;
use report::Figures;

use crate::ready_times::ReadyTimes;
use crate::{agent_sandbox, kinds};

const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Our controller and upstream's, over the same job on one kube-apiserver
#[derive(Clone, Debug, Args)]
pub struct Arguments {
    /// Kubeconfig of an administrator of a kube-apiserver where nothing else runs [default: $KUBECONFIG]
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    kubeconfig: PathBuf,

    /// The other implementation's agent-sandbox-controller; without it only ours is measured
    #[arg(long, env = "UPSTREAM_CONTROLLER", value_name = "FILE")]
    upstream: Option<PathBuf>,

    /// Workers for each kind that upstream gets: its default is 1, its documentation advises 10
    #[arg(long, default_value_t = 10, value_name = "N")]
    upstream_workers: usize,

    /// What claims name: only releases before 0.5 of upstream know templates, only those since know pools
    #[arg(long, value_enum, default_value = "template", value_name = "KIND")]
    claims_by: ClaimsBy,

    /// Sandboxes that are warm before the first claim
    #[arg(long, default_value_t = 500)]
    pool: usize,

    /// Claims made at once
    #[arg(long, default_value_t = 300)]
    burst: usize,

    /// Claims a second after that
    #[arg(long, default_value_t = 45)]
    rate: usize,

    /// For so many seconds
    #[arg(long, default_value_t = 60)]
    seconds: usize,

    /// Timeout for filling a pool and for claims to become Ready, in seconds
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    deadline: u64,
}

/// What claims name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ClaimsBy {
    Template,
    Pool,
}

/// A controller to measure.
struct Contender {
    name: &'static str,
    program: PathBuf,
    /// The arguments before the flags that both controllers get.
    arguments: Vec<String>,
    /// The directory for its files.
    _directory: Option<TempDir>,
}

impl Contender {
    fn ours() -> anyhow::Result<Self> {
        Ok(Self {
            name: "ours",
            program: agent_sandbox::program()?,
            arguments: vec!["controller".to_owned()],
            _directory: None,
        })
    }

    fn upstream(program: &Path, workers: usize, claims_by: ClaimsBy) -> anyhow::Result<Self> {
        let kinds = ["", "-claim", "-warm-pool", "-template"];
        let workers = kinds.map(|kind| format!("--sandbox{kind}-concurrent-workers={workers}"));
        let mut arguments = Vec::from(workers);
        let mut directory = None;
        if claims_by == ClaimsBy::Pool {
            // These releases always serve a webhook.
            let certificates = tempfile::tempdir()?;
            let shown = certificates.path().display();
            arguments.push(format!("--webhook-cert-dir={shown}"));
            arguments.push(format!("--webhook-port={}", free_port()?));
            directory = Some(certificates);
        }
        Ok(Self {
            name: "upstream",
            program: program.to_owned(),
            arguments,
            _directory: directory,
        })
    }

    fn start(&self, kubeconfig: &Path) -> anyhow::Result<Child> {
        Command::new(&self.program)
            .args(&self.arguments)
            .args([
                "--leader-elect=false",
                "--extensions",
                "--metrics-bind-address=0",
                "--health-probe-bind-address=0",
            ])
            .env("KUBECONFIG", kubeconfig)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}", self.program.display()))
    }
}

pub async fn run(arguments: Arguments) -> anyhow::Result<()> {
    let client = agent_sandbox::client(&arguments.kubeconfig).await?;
    kinds::install(&client).await?;
    let mut contenders = vec![Contender::ours()?];
    match &arguments.upstream {
        Some(program) => contenders.push(Contender::upstream(
            program,
            arguments.upstream_workers,
            arguments.claims_by,
        )?),
        None => eprintln!(
            "upstream not available: no controller of it was given with --upstream. `cargo xtask kube-assets` builds it where the \
             module proxy has it, and says why where it has not."
        ),
    }
    let mut measured = Vec::new();
    for contender in &contenders {
        let figures = measure(&client, &arguments, contender).await?;
        measured.push((contender.name, figures));
    }
    print!("{}", report::table(&arguments, &measured).render());
    for (name, figures) in &measured {
        if let Some(reason) = &figures.stopped {
            println!("{name} did not finish the job: {reason}");
        }
    }
    Ok(())
}

async fn measure(
    client: &Client,
    arguments: &Arguments,
    contender: &Contender,
) -> anyhow::Result<Figures> {
    let namespace = format!("bench-{}", contender.name);
    create_namespace(client, &namespace).await?;
    let mut controller = contender.start(&arguments.kubeconfig)?;
    let pid = controller.id().context("the controller has ended")?;
    let ready_times = Arc::new(ReadyTimes::default());
    let mut tasks = JoinSet::new();
    tasks.spawn(testkit::node::mark_pods_ready(client.clone()));
    tasks.spawn(
        Arc::clone(&ready_times).follow(Api::<api::SandboxClaim>::namespaced(
            client.clone(),
            &namespace,
        )),
    );
    let job = Job {
        client: client.clone(),
        namespace: namespace.clone(),
        ready_times,
        deadline: Duration::from_secs(arguments.deadline),
        who: contender.name,
        claims_by: arguments.claims_by,
    };
    let mut figures = Figures::default();
    let done = tokio::select! {
        done = job.run(arguments, pid, &mut figures) => done,
        ended = controller.wait() => Err(anyhow::anyhow!("its process ended: {}", ended?)),
    };
    if let Err(error) = done {
        figures.stopped = Some(format!("{error:#}"));
    }
    // A running controller would recreate what is being deleted.
    if controller.id().is_some() {
        controller.kill().await?;
    }
    tasks.shutdown().await;
    job.say("deleting everything");
    delete_namespace(client, &namespace, job.deadline).await?;
    Ok(figures)
}

fn free_port() -> std::io::Result<u16> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0))?;
    Ok(listener.local_addr()?.port())
}

async fn create_namespace(client: &Client, name: &str) -> anyhow::Result<()> {
    let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": name}}))?;
    Api::all(client.clone())
        .create(&PostParams::default(), &namespace)
        .await
        .with_context(|| format!("cannot make namespace {name}"))?;
    Ok(())
}

/// Deletes a namespace and waits until it is gone, so that the next controller does not see it.
async fn delete_namespace(
    client: &Client,
    namespace: &str,
    deadline: Duration,
) -> anyhow::Result<()> {
    let namespaces = Api::<Namespace>::all(client.clone());
    namespaces
        .delete(namespace, &DeleteParams::default())
        .await?;
    let begin = Instant::now();
    while namespaces.get_opt(namespace).await?.is_some() {
        ensure!(
            begin.elapsed() < deadline,
            "namespace {namespace} is not gone after {deadline:?}"
        );
        tokio::time::sleep(LOOK_AGAIN).await;
    }
    Ok(())
}

//! How soon `up` serves on an empty data directory, how soon its pool is full, and what it costs then: the real program, as a user starts
//! it, judged against its budgets.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

use super::{await_warm_pool, idle};
use crate::data_directory::Running;
use crate::output::{Table, bytes};

const READY_BUDGET: Duration = Duration::from_secs(2);
const POOL_BUDGET: Duration = Duration::from_secs(5);
const MEMORY_BUDGET: u64 = 60 << 20;
const PROCESSOR_BUDGET: f64 = 1.0;
const BINARY_BUDGET: u64 = 40 << 20;

/// How often the ready file is looked for.
const LOOK: Duration = Duration::from_millis(2);
/// How long all of it may take before something is wrong.
const DEADLINE: Duration = Duration::from_secs(60);

/// One figure and whether it is within its budget.
struct Judged {
    what: &'static str,
    measured: String,
    budget: String,
    kept: bool,
}

/// Starts the system as a program of its own, measures it, and stops it with all that it started.
pub async fn run(directory: &Path, idling: Duration) -> anyhow::Result<()> {
    let program = std::env::current_exe()?;
    let size = std::fs::metadata(&program)?.len();
    let ready_file = directory.join("ready.json");
    let data_directory = directory.join("data");
    let begin = Instant::now();
    let mut up = start(&program, &data_directory, &ready_file)?;
    let measured = measure(&mut up, &ready_file, begin, idling).await;
    let stopped = stop(&program, &data_directory, up).await;
    let mut judged = measured?;
    stopped?;
    judged.push(Judged {
        what: "size of the program",
        measured: bytes(size),
        budget: bytes(BINARY_BUDGET),
        kept: size <= BINARY_BUDGET,
    });
    print(&judged)
}

fn start(program: &Path, data_directory: &Path, ready_file: &Path) -> anyhow::Result<Child> {
    Command::new(program)
        .args(["up", "--api-listen=127.0.0.1:0"])
        .args([
            "--router-listen=127.0.0.1:0",
            "--metrics-bind-address=127.0.0.1:0",
        ])
        .arg("--data-dir")
        .arg(data_directory)
        .arg("--ready-file")
        .arg(ready_file)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot start {}", program.display()))
}

async fn measure(
    up: &mut Child,
    ready_file: &Path,
    begin: Instant,
    idling: Duration,
) -> anyhow::Result<Vec<Judged>> {
    let running = await_ready(up, ready_file).await?;
    let ready = begin.elapsed();
    let kubeconfig = Kubeconfig::read_from(&running.kubeconfig)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    await_warm_pool(&Client::try_from(config)?).await?;
    let full = begin.elapsed();
    let idle = idle::of_process(running.pid, idling).await?;
    Ok(vec![
        within("all parts serve after", ready, READY_BUDGET),
        within("the pool is full after", full, POOL_BUDGET),
        Judged {
            what: "resident, idle",
            measured: bytes(idle.resident),
            budget: bytes(MEMORY_BUDGET),
            kept: idle.resident <= MEMORY_BUDGET,
        },
        Judged {
            what: "of a processor, idle",
            measured: format!("{:.2} %", idle.share),
            budget: format!("{PROCESSOR_BUDGET} %"),
            kept: idle.share < PROCESSOR_BUDGET,
        },
    ])
}

fn within(what: &'static str, measured: Duration, budget: Duration) -> Judged {
    Judged {
        what,
        measured: format!("{} ms", measured.as_millis()),
        budget: format!("{} ms", budget.as_millis()),
        kept: measured <= budget,
    }
}

async fn await_ready(up: &mut Child, ready_file: &Path) -> anyhow::Result<Running> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Ok(text) = std::fs::read(ready_file) {
            return serde_json::from_slice(&text).context("an unexpected ready file");
        }
        if let Some(status) = up.try_wait()? {
            bail!("up ended before it was ready: {status}");
        }
        ensure!(Instant::now() < deadline, "up is not ready in time");
        tokio::time::sleep(LOOK).await;
    }
}

async fn stop(program: &Path, data_directory: &Path, mut up: Child) -> anyhow::Result<()> {
    let deleted = Command::new(program)
        .env("AGENT_SANDBOX_HOME", data_directory)
        .env_remove("KUBECONFIG")
        .args(["delete", "--all", "--all-namespaces", "--wait"])
        .stdout(Stdio::null())
        .status();
    let deleted = tokio::time::timeout(DEADLINE, deleted).await;
    if let Some(pid) = up.id().and_then(|pid| Pid::from_raw(pid.cast_signed())) {
        let _ = kill_process(pid, Signal::TERM);
    }
    if tokio::time::timeout(DEADLINE, up.wait()).await.is_err() {
        up.kill().await?;
        bail!("up did not stop in time");
    }
    ensure!(deleted??.success(), "sandboxes may be left running");
    Ok(())
}

fn print(judged: &[Judged]) -> anyhow::Result<()> {
    let mut table = Table::new(&["WHAT", "MEASURED", "BUDGET", ""]);
    for figure in judged {
        let verdict = if figure.kept { "kept" } else { "exceeded" };
        table.row(vec![
            figure.what.to_owned(),
            figure.measured.clone(),
            figure.budget.clone(),
            verdict.to_owned(),
        ]);
    }
    print!("{}", table.render());
    let exceeded = judged.iter().filter(|figure| !figure.kept).count();
    ensure!(
        exceeded == 0,
        "{exceeded} of {} budgets are exceeded",
        judged.len()
    );
    Ok(())
}

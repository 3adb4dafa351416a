//! The measured program: where the `agent-sandbox` binary is, and a running `agent-sandbox up`.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use api::SandboxWarmPool;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::wait::await_condition;
use kube::{Api, Client, Config};
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use tokio::process::{Child, Command};

const PROGRAM: &str = "agent-sandbox";

/// The interval at which the ready file is looked for.
const POLL: Duration = Duration::from_millis(2);
/// The timeout of the start, of the deletion of all sandboxes and of the stop.
const DEADLINE: Duration = Duration::from_secs(60);

/// The `agent-sandbox` binary: beside this program, else in `PATH`.
pub fn program() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    find(&own, &path).with_context(|| {
        format!(
            "there is no {PROGRAM} beside {} or in PATH; build it with `cargo build --release -p agent-sandbox`",
            own.display()
        )
    })
}

fn find(own: &Path, path: &OsStr) -> Option<PathBuf> {
    let beside = own.with_file_name(PROGRAM);
    let in_path = std::env::split_paths(path).map(|directory| directory.join(PROGRAM));
    std::iter::once(beside)
        .chain(in_path)
        .find(|candidate| candidate.is_file())
}

/// The part of a ready file (`up --ready-file`) that measurements use.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ready {
    pub kubeconfig: PathBuf,
    pub router: Option<String>,
    pub metrics: String,
    pub template: Option<String>,
    pub warm_pool: Option<String>,
    pub pid: u32,
}

/// Which objects `up` creates when it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quickstart {
    Nothing,
    TemplateAndPool,
}

/// A running `agent-sandbox up` with a data directory of its own, on free ports.
pub struct Up {
    program: PathBuf,
    data_directory: PathBuf,
    process: Child,
    pub ready: Ready,
    /// The time from the start of the process until its ready file existed.
    pub ready_after: Duration,
    pub client: Client,
}

impl Up {
    /// Starts `up` below an empty `directory` and waits until all its parts serve. The pool may still be filling.
    pub async fn start(directory: &Path, quickstart: Quickstart) -> anyhow::Result<Self> {
        let program = program()?;
        let data_directory = directory.join("data");
        let ready_file = directory.join("ready.json");
        let mut command = Command::new(&program);
        command
            .args(["up", "--api-listen=127.0.0.1:0"])
            .args([
                "--router-listen=127.0.0.1:0",
                "--metrics-bind-address=127.0.0.1:0",
            ])
            .arg("--data-dir")
            .arg(&data_directory)
            .arg("--ready-file")
            .arg(&ready_file)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        if quickstart == Quickstart::Nothing {
            command.arg("--no-quickstart");
        }
        let begin = Instant::now();
        let mut process = command
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let connected = async {
            let ready = await_ready(&mut process, &ready_file).await?;
            let ready_after = begin.elapsed();
            let client = client(&ready.kubeconfig).await?;
            anyhow::Ok((ready, ready_after, client))
        };
        match connected.await {
            Ok((ready, ready_after, client)) => Ok(Self {
                program,
                data_directory,
                process,
                ready,
                ready_after,
                client,
            }),
            Err(error) => {
                stop(&mut process).await?;
                Err(error)
            }
        }
    }

    /// A client of the sandboxes, through the router.
    pub fn sandboxes(&self) -> anyhow::Result<sdk::Client> {
        let url = self
            .ready
            .router
            .clone()
            .context("the router does not run")?;
        let options = sdk::Options {
            connection: sdk::Connection::Direct { url },
            ..sdk::Options::default()
        };
        Ok(sdk::Client::new(self.client.clone(), options)?)
    }

    /// The template of the quickstart.
    pub fn template(&self) -> anyhow::Result<&str> {
        let template = self.ready.template.as_deref();
        template.context("the quickstart is not installed")
    }

    /// Waits until every sandbox of the quickstart's pool is Ready.
    pub async fn await_warm_pool(&self) -> anyhow::Result<()> {
        let pool = self.ready.warm_pool.as_deref();
        let pool = pool.context("the quickstart is not installed")?;
        let is_full = |pool: Option<&SandboxWarmPool>| {
            pool.is_some_and(|pool| {
                let status = pool.status.as_ref();
                status.map_or(0, |status| status.ready_replicas) >= pool.spec.desired_replicas()
            })
        };
        let pools = Api::default_namespaced(self.client.clone());
        await_condition(pools, pool, is_full).await?;
        Ok(())
    }

    /// Deletes every sandbox, which would outlive `up`, and stops `up`. Then returns what was measured.
    pub async fn stop_after<T>(self, measured: anyhow::Result<T>) -> anyhow::Result<T> {
        let stopped = self.stop_with_sandboxes().await;
        // The error of the measurement explains more than one of the stop after it.
        let measured = measured?;
        stopped?;
        Ok(measured)
    }

    async fn stop_with_sandboxes(mut self) -> anyhow::Result<()> {
        let deleted = Command::new(&self.program)
            .env("AGENT_SANDBOX_HOME", &self.data_directory)
            .env_remove("KUBECONFIG")
            .args(["delete", "--all", "--pools", "--all-namespaces", "--wait"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .status();
        let deleted = tokio::time::timeout(DEADLINE, deleted).await;
        stop(&mut self.process).await?;
        let deleted = deleted.context("sandboxes are still running after the deadline")?;
        ensure!(deleted?.success(), "sandboxes may be left running");
        Ok(())
    }
}

/// A client of the API server that a kubeconfig names.
pub async fn client(kubeconfig: &Path) -> anyhow::Result<Client> {
    let read = Kubeconfig::read_from(kubeconfig)
        .with_context(|| format!("cannot read the kubeconfig {}", kubeconfig.display()))?;
    let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

async fn await_ready(up: &mut Child, ready_file: &Path) -> anyhow::Result<Ready> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Ok(text) = std::fs::read(ready_file) {
            return serde_json::from_slice(&text).context("an unexpected ready file");
        }
        if let Some(status) = up.try_wait()? {
            bail!("up ended before it was ready: {status}");
        }
        ensure!(Instant::now() < deadline, "up is not ready in time");
        tokio::time::sleep(POLL).await;
    }
}

async fn stop(up: &mut Child) -> anyhow::Result<()> {
    if let Some(pid) = up.id().and_then(|pid| Pid::from_raw(pid.cast_signed())) {
        let _ = kill_process(pid, Signal::TERM);
    }
    if tokio::time::timeout(DEADLINE, up.wait()).await.is_err() {
        up.kill().await?;
        bail!("up did not stop in time");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_beside_this_one_comes_before_the_one_in_path() {
        let directory = tempfile::tempdir().unwrap();
        let place = |name: &str| {
            let place = directory.path().join(name);
            std::fs::create_dir(&place).unwrap();
            place
        };
        let (beside, first, second) = (place("beside"), place("first"), place("second"));
        let path = std::env::join_paths([&first, &second]).unwrap();
        let found = || find(&beside.join("agent-sandbox-bench"), &path);
        assert_eq!(found(), None);
        std::fs::write(second.join(PROGRAM), "").unwrap();
        assert_eq!(found(), Some(second.join(PROGRAM)));
        std::fs::write(beside.join(PROGRAM), "").unwrap();
        assert_eq!(found(), Some(beside.join(PROGRAM)));
    }
}

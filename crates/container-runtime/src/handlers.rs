//! The handlers of runtime classes (`runc`, `runsc`): which this machine has, and whether they work.
//!
//! A handler counts as working only after a trial container has run, created in the same way as a pod's: a program that is installed
//! may still fail on this kernel.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::{
    ContainerId, ContainerSpec, ImageSource, PodIdentity, PodSandboxSpec, Runtime, RuntimeError,
    StartError, Termination,
};
use crate::privileges::Privileges;
use api::errors::chain;

/// The handler of pods without a runtime class.
pub const NATIVE: &str = "agent-sandbox";
const TRIAL_TIMEOUT: Duration = Duration::from_secs(30);
/// The trials take a second of CPU time, so they are delayed while the node and its first pods start.
const PROBE_DELAY: Duration = Duration::from_secs(2);

/// Another OCI runtime, which runs containers from bundles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Driver {
    Runc,
    Runsc,
}

impl Driver {
    pub const ALL: [Self; 2] = [Self::Runc, Self::Runsc];

    pub fn program(self) -> &'static str {
        match self {
            Self::Runc => "runc",
            Self::Runsc => "runsc",
        }
    }

    /// The driver with this handler name.
    fn of_handler(handler: &str) -> Option<Self> {
        match handler {
            "runc" => Some(Self::Runc),
            "runsc" | "gvisor" => Some(Self::Runsc),
            _ => None,
        }
    }

    /// The path of its program, from `PATH` or the usual directories.
    pub fn find(self) -> Option<PathBuf> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let usual = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"];
        std::env::split_paths(&path)
            .chain(usual.into_iter().map(PathBuf::from))
            .map(|directory| directory.join(self.program()))
            .find(|candidate| candidate.is_file())
    }
}

/// The result of a driver's trial on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    pub handler: &'static str,
    pub works: bool,
    /// The version of a driver that works, or the reason why it does not.
    pub detail: String,
}

/// Why a handler cannot run pods here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unusable {
    /// No driver has this name.
    Unknown,
    Broken {
        program: &'static str,
        why: String,
    },
}

/// Why the trial of a driver failed.
#[derive(Debug, thiserror::Error)]
enum TrialError {
    #[error("it needs root")]
    NotRoot,
    #[error("it is not installed")]
    NotInstalled,
    #[error(transparent)]
    Sandbox(#[from] RuntimeError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("the node was stopped before it was known")]
    NodeStopped,
    #[error("a container of it does not come to an end")]
    TimedOut,
    /// The last message of the runtime.
    #[error("{0}")]
    Reported(String),
    #[error("it ends with code {0}")]
    ExitCode(i32),
}

/// The drivers of this machine, after their trials.
#[derive(Debug, Clone)]
pub struct Handlers {
    findings: watch::Receiver<Option<Arc<Vec<Finding>>>>,
    wanted: Arc<Notify>,
}

impl Handlers {
    /// The handlers before their trials, and the sender for the results.
    pub fn unprobed() -> (Self, watch::Sender<Option<Arc<Vec<Finding>>>>) {
        let (sender, findings) = watch::channel(None);
        let wanted = Arc::default();
        (Self { findings, wanted }, sender)
    }

    /// Waits until the trials are due: when a pod needs a handler, or after a short delay.
    pub async fn due(&self) {
        let _ = tokio::time::timeout(PROBE_DELAY, self.wanted.notified()).await;
    }

    /// The results; waits for the trials.
    pub async fn findings(&self) -> Arc<Vec<Finding>> {
        let mut findings = self.findings.clone();
        match findings.wait_for(Option::is_some).await {
            Ok(found) => found.clone().unwrap_or_default(),
            Err(_) => Arc::default(),
        }
    }

    /// The driver of a handler, after its trial. `None` for the native runtime.
    pub async fn driver(&self, handler: &str) -> Result<Option<Driver>, Unusable> {
        if handler == NATIVE {
            return Ok(None);
        }
        let driver = Driver::of_handler(handler).ok_or(Unusable::Unknown)?;
        self.wanted.notify_one();
        match unusable(driver, &self.findings().await) {
            None => Ok(Some(driver)),
            Some(why) => Err(Unusable::Broken {
                program: driver.program(),
                why,
            }),
        }
    }
}

/// Why a driver cannot be used. `None` if it works.
fn unusable(driver: Driver, findings: &[Finding]) -> Option<String> {
    let finding = findings
        .iter()
        .find(|finding| finding.handler == driver.program());
    match finding {
        Some(finding) if finding.works => None,
        Some(finding) => Some(finding.detail.clone()),
        None => Some("the node is configured not to look for it".to_owned()),
    }
}

/// Runs a trial of each driver.
pub async fn probe<R: Runtime>(
    runtime: &R,
    drivers: &[Driver],
    shutdown: &CancellationToken,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    for driver in drivers {
        if shutdown.is_cancelled() {
            break;
        }
        let tried = match (Privileges::current(), driver.find()) {
            (Privileges::Rootless | Privileges::None, _) => Err(TrialError::NotRoot),
            (Privileges::Root, None) => Err(TrialError::NotInstalled),
            (Privileges::Root, Some(program)) => match try_out(runtime, *driver, shutdown).await {
                Ok(()) => Ok(version(program).await),
                Err(error) => Err(error),
            },
        };
        findings.push(Finding {
            handler: driver.program(),
            works: tried.is_ok(),
            detail: tried.unwrap_or_else(|error| chain(&error)),
        });
    }
    findings
}

async fn version(program: PathBuf) -> String {
    let output = tokio::process::Command::new(program)
        .arg("--version")
        .stdin(std::process::Stdio::null())
        .output()
        .await;
    let text = output.map(|output| output.stdout).unwrap_or_default();
    let text = String::from_utf8_lossy(&text).into_owned();
    text.lines().next().unwrap_or_default().to_owned()
}

/// Runs a container that exits immediately, and removes it.
async fn try_out<R: Runtime>(
    runtime: &R,
    driver: Driver,
    shutdown: &CancellationToken,
) -> Result<(), TrialError> {
    let id = ContainerId {
        // The trial of a node that was killed is removed by the next run, like any pod that the API does not have.
        pod: format!("{TRIAL}{}-{}", driver.program(), std::process::id()),
        container: "probe".to_owned(),
        attempt: 0,
    };
    let tried = async {
        runtime.create_sandbox(&sandbox(&id, driver)).await?;
        runtime.start(container(&id)).await?;
        let wait = tokio::time::timeout(TRIAL_TIMEOUT, runtime.wait(&id));
        let ended = shutdown
            .run_until_cancelled(wait)
            .await
            .ok_or(TrialError::NodeStopped)?
            .map_err(|_| TrialError::TimedOut)?;
        verdict(&ended, &runtime.log_path(&id))
    }
    .await;
    let _ = runtime.kill(&id).await;
    if let Err(error) = runtime.remove_sandbox(&id.pod).await {
        tracing::warn!(error = %chain(&error), "cannot clear a runtime's trial away");
    }
    tried
}

/// The prefix of the UIDs of trial pods.
const TRIAL: &str = "probe-";

/// Whether a pod is a running trial of this process, which must not be removed although the API does not have it.
pub fn is_trial(pod: &str) -> bool {
    let number = pod
        .strip_prefix(TRIAL)
        .and_then(|trial| trial.rsplit_once('-'));
    number.is_some_and(|(_, process)| process.parse() == Ok(std::process::id()))
}

fn verdict(ended: &Termination, log: &Path) -> Result<(), TrialError> {
    if ended.exit_code == 0 {
        return Ok(());
    }
    let log = std::fs::read_to_string(log).unwrap_or_default();
    Err(last_words(&log).map_or(TrialError::ExitCode(ended.exit_code), TrialError::Reported))
}

/// The last message of a runtime, from a log in CRI format. `runc` wraps the message into a line of its own format.
pub(super) fn last_words(log: &str) -> Option<String> {
    let text = log.lines().last()?.splitn(4, ' ').nth(3)?;
    let inner = text.split_once("msg=\"").map_or(text, |(_, inner)| inner);
    Some(inner.trim_end_matches('"').replace("\\\"", "\""))
}

fn sandbox(id: &ContainerId, driver: Driver) -> PodSandboxSpec {
    PodSandboxSpec {
        identity: PodIdentity {
            uid: id.pod.clone(),
            namespace: String::new(),
            name: id.pod.clone(),
        },
        hostname: "probe".to_owned(),
        host_aliases: Vec::new(),
        fully_qualified_name: None,
        resolver: String::new(),
        shared_processes: false,
        containers: 1,
        driver: Some(driver),
    }
}

fn container(id: &ContainerId) -> ContainerSpec {
    let command = vec!["/usr/bin/true".to_owned()];
    ContainerSpec::plain(id.clone(), ImageSource::Host, command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_message_of_a_runtime_is_the_reason() {
        let wrapped = "2026-01-01T00:00:00Z stderr F first\n\
            2026-01-01T00:00:01Z stderr F time=\"2026\" level=error msg=\"runc run failed: exec \\\"/x\\\": not found\"\n";
        assert_eq!(
            last_words(wrapped).as_deref(),
            Some("runc run failed: exec \"/x\": not found")
        );
        let plain = "2026-01-01T00:00:01Z stderr F running container: creating container: EOF\n";
        assert_eq!(
            last_words(plain).as_deref(),
            Some("running container: creating container: EOF")
        );
        assert_eq!(last_words(""), None);
    }

    #[test]
    fn a_trial_belongs_to_the_process_that_started_it() {
        let own = std::process::id();
        assert!(is_trial(&format!("probe-runc-{own}")));
        assert!(!is_trial(&format!("probe-runc-{}", own + 1)));
        assert!(!is_trial("2c1a7b0e-0000-4000-8000-000000000000"));
    }

    #[test]
    fn a_driver_works_only_after_a_successful_trial() {
        let finding = |handler, works, detail: &str| Finding {
            handler,
            works,
            detail: detail.to_owned(),
        };
        let findings = [
            finding("runc", true, "runc version 1"),
            finding("runsc", false, "it is not installed"),
        ];
        assert_eq!(unusable(Driver::Runc, &findings), None);
        assert_eq!(
            unusable(Driver::Runsc, &findings).as_deref(),
            Some("it is not installed")
        );
        assert!(unusable(Driver::Runc, &[]).is_some());
        assert_eq!(Driver::of_handler("gvisor"), Some(Driver::Runsc));
        assert_eq!(Driver::of_handler("kata"), None);
    }
}

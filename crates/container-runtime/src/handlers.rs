//! Runtime classes: which handlers this machine has, and whether they work here.
//!
//! A handler is found by its program and believed only after a container of it has run, made as a pod's would be: a program
//! that is installed may still fail on this kernel.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::{
    ContainerId, ContainerSpec, ImageSource, PodIdentity, PodSandboxSpec, Runtime, Termination,
};
use crate::privileges::Privileges;
use api::errors::chain;

/// The handler of pods that name no class.
pub const NATIVE: &str = "agent-sandbox";
const PROBE_PATIENCE: Duration = Duration::from_secs(30);
/// Probes take a second of a processor, which whoever starts a node has better use for at first.
const PROBE_DELAY: Duration = Duration::from_secs(2);

/// A program that runs containers from bundles.
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

    /// The driver that a class's handler names.
    fn of_handler(handler: &str) -> Option<Self> {
        match handler {
            "runc" => Some(Self::Runc),
            "runsc" | "gvisor" => Some(Self::Runsc),
            _ => None,
        }
    }

    /// Where its program is.
    pub fn find(self) -> Option<PathBuf> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let usual = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"];
        std::env::split_paths(&path)
            .chain(usual.into_iter().map(PathBuf::from))
            .map(|directory| directory.join(self.program()))
            .find(|candidate| candidate.is_file())
    }
}

/// What is known of a driver on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    pub handler: &'static str,
    pub works: bool,
    /// The version of one that works, the reason of one that does not.
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

/// The drivers of this machine, once they are probed.
#[derive(Debug, Clone)]
pub struct Handlers {
    findings: watch::Receiver<Option<Arc<Vec<Finding>>>>,
    wanted: Arc<Notify>,
}

impl Handlers {
    /// The handlers, and what to tell them once they are known.
    pub fn unprobed() -> (Self, watch::Sender<Option<Arc<Vec<Finding>>>>) {
        let (sender, findings) = watch::channel(None);
        let wanted = Arc::default();
        (Self { findings, wanted }, sender)
    }

    /// Waits until it is time to probe: when a pod needs to know, or soon anyway.
    pub async fn due(&self) {
        let _ = tokio::time::timeout(PROBE_DELAY, self.wanted.notified()).await;
    }

    /// What was found; waits for the probes.
    pub async fn findings(&self) -> Arc<Vec<Finding>> {
        let mut findings = self.findings.clone();
        match findings.wait_for(Option::is_some).await {
            Ok(found) => found.clone().unwrap_or_default(),
            Err(_) => Arc::default(),
        }
    }

    /// The driver of a handler, once it is probed; `None` for the native runtime.
    pub async fn driver(&self, handler: &str) -> Result<Option<Driver>, Unusable> {
        if handler == NATIVE {
            return Ok(None);
        }
        let driver = Driver::of_handler(handler).ok_or(Unusable::Unknown)?;
        self.wanted.notify_one();
        match works(driver, &self.findings().await) {
            Ok(()) => Ok(Some(driver)),
            Err(why) => Err(Unusable::Broken {
                program: driver.program(),
                why,
            }),
        }
    }
}

fn works(driver: Driver, findings: &[Finding]) -> Result<(), String> {
    let finding = findings
        .iter()
        .find(|finding| finding.handler == driver.program());
    match finding {
        Some(finding) if finding.works => Ok(()),
        Some(finding) => Err(finding.detail.clone()),
        None => Err("the node was told not to look for it".to_owned()),
    }
}

/// Tries each driver out.
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
            (Privileges::Rootless | Privileges::None, _) => Err("it needs root".to_owned()),
            (Privileges::Root, None) => Err("it is not installed".to_owned()),
            (Privileges::Root, Some(program)) => match try_out(runtime, *driver, shutdown).await {
                Ok(()) => Ok(version(program).await),
                Err(why) => Err(why),
            },
        };
        findings.push(Finding {
            handler: driver.program(),
            works: tried.is_ok(),
            detail: tried.unwrap_or_else(|why| why),
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

/// Runs a container that ends at once. Nothing is left of it.
async fn try_out<R: Runtime>(
    runtime: &R,
    driver: Driver,
    shutdown: &CancellationToken,
) -> Result<(), String> {
    let id = ContainerId {
        // A node that was killed leaves its own trial, which the next one clears away as any pod it does not know.
        pod: format!("{TRIAL}{}-{}", driver.program(), std::process::id()),
        container: "probe".to_owned(),
        attempt: 0,
    };
    let tried = async {
        runtime
            .create_sandbox(&sandbox(&id, driver))
            .await
            .map_err(|error| chain(&error))?;
        runtime
            .start(container(&id))
            .await
            .map_err(|error| chain(&error))?;
        let patience = tokio::time::timeout(PROBE_PATIENCE, runtime.wait(&id));
        let ended = shutdown
            .run_until_cancelled(patience)
            .await
            .ok_or("the node was stopped before it was known")?
            .map_err(|_| "a container of it does not come to an end")?;
        verdict(&ended, &runtime.log_path(&id))
    }
    .await;
    let _ = runtime.kill(&id).await;
    if let Err(error) = runtime.remove_sandbox(&id.pod).await {
        tracing::warn!(error = %chain(&error), "cannot clear a runtime's trial away");
    }
    tried
}

/// How the pods begin in which runtimes are tried out.
const TRIAL: &str = "probe-";

/// Whether a pod is a trial of this process: no pod of the API, and not a stray either.
pub fn is_trial(pod: &str) -> bool {
    let number = pod
        .strip_prefix(TRIAL)
        .and_then(|trial| trial.rsplit_once('-'));
    number.is_some_and(|(_, process)| process.parse() == Ok(std::process::id()))
}

fn verdict(ended: &Termination, log: &Path) -> Result<(), String> {
    if ended.exit_code == 0 {
        return Ok(());
    }
    let log = std::fs::read_to_string(log).unwrap_or_default();
    Err(last_words(&log).unwrap_or_else(|| format!("it ends with code {}", ended.exit_code)))
}

/// What a runtime said last, from a log in Kubernetes' format; `runc` wraps it into a line of its own log.
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
    fn the_last_words_of_a_runtime_are_the_reason() {
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
    fn trials_are_known_by_their_process() {
        let own = std::process::id();
        assert!(is_trial(&format!("probe-runc-{own}")));
        assert!(!is_trial(&format!("probe-runc-{}", own + 1)));
        assert!(!is_trial("2c1a7b0e-0000-4000-8000-000000000000"));
    }

    #[test]
    fn a_driver_works_only_if_it_was_seen_to() {
        let finding = |handler, works, detail: &str| Finding {
            handler,
            works,
            detail: detail.to_owned(),
        };
        let findings = [
            finding("runc", true, "runc version 1"),
            finding("runsc", false, "it is not installed"),
        ];
        assert_eq!(works(Driver::Runc, &findings), Ok(()));
        assert_eq!(
            works(Driver::Runsc, &findings),
            Err("it is not installed".to_owned())
        );
        assert!(works(Driver::Runc, &[]).is_err());
        assert_eq!(Driver::of_handler("gvisor"), Some(Driver::Runsc));
        assert_eq!(Driver::of_handler("kata"), None);
    }
}

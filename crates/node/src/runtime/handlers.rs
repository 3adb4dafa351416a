//! Runtime classes: which handlers this machine has, and whether they work here.
//!
//! A handler is found by its program and believed only after it has run something: a program that is installed may still
//! fail on this kernel.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::node::v1::RuntimeClass;
use kube::{Api, Client};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::oci_spec;
use crate::privileges::Privileges;

/// The handler of pods that name no class.
pub const NATIVE: &str = "agent-sandbox";
const PROBE_PATIENCE: Duration = Duration::from_secs(20);

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

    /// Options that every call of the program gets. The pod's network is the one it is started in.
    pub fn options(self, state: &Path) -> Vec<String> {
        let mut options = vec!["--root".to_owned(), state.display().to_string()];
        if self == Self::Runsc {
            options.extend(["--network=host", "--ignore-cgroups"].map(str::to_owned));
        }
        options
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
    #[serde(skip)]
    pub program: Option<PathBuf>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandlerError {
    #[error("runtime class {0:?} does not exist")]
    NoClass(String),
    #[error(
        "runtime class {class:?} has handler {handler:?}, which this node does not know; it knows {NATIVE}, runc and runsc"
    )]
    Unknown { class: String, handler: String },
    #[error("runtime class {class:?} needs {program}, which does not work on this node: {why}")]
    Broken {
        class: String,
        program: &'static str,
        why: String,
    },
    #[error("reading runtime class {class:?}: {why}")]
    Read { class: String, why: String },
}

/// The drivers of this machine, once they are probed.
#[derive(Debug, Clone)]
pub struct Handlers {
    findings: watch::Receiver<Option<Arc<Vec<Finding>>>>,
}

impl Handlers {
    /// Begins to probe in the background; `program` is a static one to run in a container, `work` an empty directory.
    pub fn probe(work: PathBuf, program: PathBuf) -> Self {
        let (sender, findings) = watch::channel(None);
        tokio::task::spawn_blocking(move || {
            let found = Driver::ALL
                .into_iter()
                .map(|driver| find(driver, &work, &program))
                .collect();
            let _ = sender.send(Some(Arc::new(found)));
        });
        Self { findings }
    }

    /// What was found; waits for the probes.
    pub async fn findings(&self) -> Arc<Vec<Finding>> {
        let mut findings = self.findings.clone();
        match findings.wait_for(Option::is_some).await {
            Ok(found) => found.clone().unwrap_or_default(),
            Err(_) => Arc::default(),
        }
    }

    /// The driver for a pod of this class; none for the node's own runtime.
    pub async fn resolve(
        &self,
        client: &Client,
        class: Option<&str>,
    ) -> Result<Option<Driver>, HandlerError> {
        let Some(class) = class.filter(|class| !class.is_empty()) else {
            return Ok(None);
        };
        let classes = Api::<RuntimeClass>::all(client.clone());
        let found = classes
            .get_opt(class)
            .await
            .map_err(|error| HandlerError::Read {
                class: class.to_owned(),
                why: crate::errors::chain(&error),
            })?;
        let handler = found
            .ok_or_else(|| HandlerError::NoClass(class.to_owned()))?
            .handler;
        if handler == NATIVE {
            return Ok(None);
        }
        let unknown = || HandlerError::Unknown {
            class: class.to_owned(),
            handler: handler.clone(),
        };
        let driver = Driver::of_handler(&handler).ok_or_else(unknown)?;
        let findings = self.findings().await;
        let finding = findings
            .iter()
            .find(|finding| finding.handler == driver.program());
        match finding {
            Some(finding) if finding.works => Ok(Some(driver)),
            other => Err(HandlerError::Broken {
                class: class.to_owned(),
                program: driver.program(),
                why: other.map_or_else(
                    || "it was not probed".to_owned(),
                    |finding| finding.detail.clone(),
                ),
            }),
        }
    }

    /// Where a driver's program is.
    pub fn program(&self, driver: Driver) -> Option<PathBuf> {
        let findings = self.findings.borrow();
        let found = findings
            .as_ref()?
            .iter()
            .find(|finding| finding.handler == driver.program());
        found?.program.clone()
    }
}

fn find(driver: Driver, work: &Path, program: &Path) -> Finding {
    let handler = driver.program();
    if Privileges::current() != Privileges::Root {
        return Finding {
            handler,
            works: false,
            detail: "it needs root".to_owned(),
            program: None,
        };
    }
    let Some(found) = in_path(handler) else {
        return Finding {
            handler,
            works: false,
            detail: format!("{handler} is not installed"),
            program: None,
        };
    };
    match try_out(driver, &found, &work.join(handler), program) {
        Ok(version) => Finding {
            handler,
            works: true,
            detail: version,
            program: Some(found),
        },
        Err(why) => Finding {
            handler,
            works: false,
            detail: why,
            program: Some(found),
        },
    }
}

fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain([
            "/usr/sbin".into(),
            "/usr/local/bin".into(),
            "/usr/bin".into(),
        ])
        .map(|directory| directory.join(name))
        .find(|candidate| candidate.is_file())
}

/// Runs a container that prints a version and ends.
fn try_out(driver: Driver, found: &Path, work: &Path, program: &Path) -> Result<String, String> {
    let failed = |error: std::io::Error| error.to_string();
    let _ = std::fs::remove_dir_all(work);
    let root = work.join("bundle/rootfs");
    for directory in ["proc", "dev", "sys"] {
        std::fs::create_dir_all(root.join(directory)).map_err(failed)?;
    }
    std::fs::copy(program, root.join("probe")).map_err(failed)?;
    let spec = oci_spec::probe("/probe", "--version");
    std::fs::write(work.join("bundle/config.json"), spec.to_string()).map_err(failed)?;
    let state = work.join("state");
    let version = output(Command::new(found).arg("--version"))?;
    let ran = output(
        Command::new(found)
            .args(driver.options(&state))
            .args(["run", "--bundle"])
            .arg(work.join("bundle"))
            .arg("agent-sandbox-probe"),
    );
    let _ = Command::new(found)
        .args(driver.options(&state))
        .args(["delete", "--force", "agent-sandbox-probe"])
        .stdin(Stdio::null())
        .output();
    let _ = std::fs::remove_dir_all(work);
    ran.map(|_| version.lines().next().unwrap_or_default().to_owned())
}

/// The output of a command that must succeed in time.
fn output(command: &mut Command) -> Result<String, String> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    let deadline = Instant::now() + PROBE_PATIENCE;
    loop {
        match child.try_wait() {
            Ok(Some(_)) => break,
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(10)),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return Err("it does not come to an end".to_owned());
            }
        }
    }
    let output = child
        .wait_with_output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let last = said.lines().last().unwrap_or("it says nothing").to_owned();
    Err(format!("{}: {last}", output.status))
}

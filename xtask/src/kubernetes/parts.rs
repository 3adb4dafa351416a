//! The daemons of a cluster as processes. Each is started again when it ends, so that a test restarts one by killing it; `<name>.pid` has its
//! process id and `<name>.log` what it printed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use rustix::process::Signal;

use super::processes::{self, LOOK_AGAIN, Tell};

/// How long a part may take to stop: nothing of a test's cluster is worth waiting for.
const GRACE: Duration = Duration::from_secs(5);

/// Running parts. Dropping them stops them.
pub struct Parts {
    directory: PathBuf,
    path: Option<String>,
    stopping: Arc<AtomicBool>,
    keepers: Vec<JoinHandle<()>>,
}

impl Parts {
    /// Parts whose logs and process ids are kept in the directory.
    pub fn new(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
            path: None,
            stopping: Arc::new(AtomicBool::new(false)),
            keepers: Vec::new(),
        }
    }

    /// Lets the parts find their helpers in these directories, as PATH lists them.
    pub fn with_path(mut self, path: &str) -> Self {
        self.path = Some(path.to_owned());
        self
    }

    /// Runs a part, again and again, until the parts are dropped.
    pub fn run(&mut self, name: &'static str, program: &Path, flags: &[String]) {
        let mut command = processes::bound(program);
        command.args(flags).stdin(Stdio::null());
        if let Some(path) = &self.path {
            command.env("PATH", path);
        }
        let stopping = Arc::clone(&self.stopping);
        let (log, pid) = (
            self.directory.join(format!("{name}.log")),
            self.directory.join(format!("{name}.pid")),
        );
        self.keepers.push(std::thread::spawn(move || {
            while !stopping.load(Ordering::SeqCst) {
                if let Err(error) = run_once(&mut command, &log, &pid, &stopping) {
                    eprintln!("{name}: {error:#}");
                }
                std::thread::sleep(LOOK_AGAIN);
            }
        }));
    }

    /// What a part has printed.
    pub fn log(&self, name: &str) -> String {
        fs::read_to_string(self.directory.join(format!("{name}.log"))).unwrap_or_default()
    }
}

fn run_once(
    command: &mut Command,
    log: &Path,
    pid: &Path,
    stopping: &AtomicBool,
) -> anyhow::Result<()> {
    let output = fs::File::options().create(true).append(true).open(log)?;
    command.stdout(output.try_clone()?).stderr(output);
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start {command:?}"))?;
    fs::write(pid, child.id().to_string())?;
    let told = || {
        let is_stopping = stopping.load(Ordering::SeqCst);
        is_stopping.then_some(Tell::Signal(Signal::TERM))
    };
    processes::wait(&mut child, GRACE, told)?;
    let _ = fs::remove_file(pid);
    Ok(())
}

impl Drop for Parts {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::SeqCst);
        for keeper in self.keepers.drain(..) {
            let _ = keeper.join();
        }
    }
}

//! Launchers: the processes that start containers, one each.
//!
//! A launcher joins its control groups before it is told which container it starts. That takes several milliseconds of
//! waiting for the kernel on machines with v1 control groups, so launchers of pods to come are started ahead
//! ([`slots`](super::slots)) and wait with it behind them. One that is dropped unused ends, and so does one whose node is
//! killed: its input ends.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shim_protocol::{LaunchAnswer, Preparation};

use super::RuntimeError;

/// The thread that starts launchers which are to wait. A launcher is told to end when the thread that started it does, so
/// this one has to last; those that lend themselves to blocking work come and go.
#[derive(Debug)]
pub struct Starter {
    work: mpsc::Sender<Box<dyn FnOnce() + Send>>,
}

impl Starter {
    /// The thread ends, and what it started and nobody used with it, when this is dropped.
    pub fn new() -> std::io::Result<Self> {
        let (work, receiver) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        std::thread::Builder::new()
            .name("launchers".to_owned())
            .spawn(move || receiver.into_iter().for_each(|work| work()))?;
        Ok(Self { work })
    }

    /// Has the thread start a launcher.
    pub async fn start(
        &self,
        start: impl FnOnce() -> Result<Launcher, RuntimeError> + Send + 'static,
    ) -> Result<Launcher, RuntimeError> {
        let died = || RuntimeError::Launcher("the thread that starts launchers died".to_owned());
        let (answer, started) = tokio::sync::oneshot::channel();
        self.work
            .send(Box::new(move || drop(answer.send(start()))))
            .map_err(|_| died())?;
        started.await.map_err(|_| died())?
    }
}

/// A launcher that waits for its request.
#[derive(Debug)]
pub struct Launcher {
    /// Absent once it was used.
    child: Option<Child>,
}

fn failed(source: std::io::Error) -> RuntimeError {
    RuntimeError::Io {
        what: "the launcher".to_owned(),
        source,
    }
}

/// A message as the line that a launcher reads. Its end is the message's: that of the input comes late when another process is
/// being started, which holds a copy of the other end for a moment.
fn line(message: &impl serde::Serialize) -> Result<Vec<u8>, RuntimeError> {
    let mut text = serde_json::to_vec(message).map_err(|error| failed(error.into()))?;
    text.push(b'\n');
    Ok(text)
}

impl Launcher {
    pub fn start(shim: &Path, preparation: &Preparation) -> Result<Self, RuntimeError> {
        let child = Command::new(shim)
            .arg("launch")
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(failed)?;
        let mut launcher = Self { child: Some(child) };
        launcher.write(&line(preparation)?)?;
        Ok(launcher)
    }

    fn write(&mut self, text: &[u8]) -> Result<(), RuntimeError> {
        let input = self.child.as_mut().and_then(|child| child.stdin.as_mut());
        input
            .map_or(Ok(()), |input| input.write_all(text))
            .map_err(failed)
    }

    /// Whether it can still be used.
    pub fn is_waiting(&mut self) -> bool {
        self.child
            .as_mut()
            .is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Starts the container that a [`Launch`](shim_protocol::Launch) describes. Blocks until its command runs or cannot, so it
    /// belongs on a blocking thread of the runtime; or until `give_up` says why not to wait any longer, which it is asked now and
    /// then. The launcher is killed then. What it has made of the container until then is in the control groups that it joined.
    pub fn launch<E: From<RuntimeError>>(
        mut self,
        launch: &impl serde::Serialize,
        give_up: impl Fn() -> Option<E>,
    ) -> Result<LaunchAnswer, E> {
        self.write(&line(launch)?)?;
        let Some(child) = self.child.as_mut() else {
            return Err(RuntimeError::Launcher("it was used before".to_owned()).into());
        };
        drop(child.stdin.take());
        let mut said = Vec::new();
        if let Some(output) = child.stdout.take() {
            await_answer(&output, give_up)?;
            BufReader::new(output)
                .read_until(b'\n', &mut said)
                .map_err(failed)?;
        }
        let Some(mut child) = self.child.take() else {
            return Err(RuntimeError::Launcher("it was used before".to_owned()).into());
        };
        let Ok(answer) = serde_json::from_slice(&said) else {
            let status = child.wait().map_err(failed)?;
            return Err(RuntimeError::Launcher(format!("it ended with {status}")).into());
        };
        // It ends by itself; somebody has to notice, and the container does not wait for that.
        tokio::task::spawn_blocking(move || child.wait());
        Ok(answer)
    }
}

/// Waits until there is something to read.
fn await_answer<E: From<RuntimeError>>(
    output: &ChildStdout,
    give_up: impl Fn() -> Option<E>,
) -> Result<(), E> {
    /// How soon a start that is given up is noticed to be.
    const LOOK_UP: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 50_000_000,
    };
    loop {
        let mut polled = [PollFd::new(output, PollFlags::IN)];
        match poll(&mut polled, Some(&LOOK_UP)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(failed(error.into()).into()),
        }
        if let Some(reason) = give_up() {
            return Err(reason);
        }
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::{Duration, Instant};

    use shim_protocol::NamespacePins;

    use super::*;

    #[test]
    fn a_launch_that_hangs_is_given_up_and_its_launcher_killed() {
        let directory = tempfile::tempdir().unwrap();
        let shim = directory.path().join("shim");
        let told = directory.path().join("pid");
        let script = format!("#!/bin/sh\necho $$ > {}\nexec sleep 1000\n", told.display());
        std::fs::write(&shim, script).unwrap();
        std::fs::set_permissions(&shim, std::fs::Permissions::from_mode(0o755)).unwrap();
        let path = Path::new("/nowhere").to_owned();
        let preparation = Preparation {
            pins: NamespacePins {
                network: path.clone(),
                ipc: path.clone(),
                hostname: path.clone(),
                user: path,
            },
            cgroups: Vec::new(),
            out_of_memory_score: 0,
        };
        let launcher = Launcher::start(&shim, &preparation).unwrap();
        let began = Instant::now();
        let limit = Duration::from_millis(200);
        // The file is there before its content is.
        let is_told = || std::fs::read_to_string(&told).is_ok_and(|pid| pid.ends_with('\n'));
        let outcome = launcher.launch(&(), || {
            (began.elapsed() >= limit && is_told()).then_some(RuntimeError::TooSlow(limit))
        });
        let error = outcome.unwrap_err();
        assert_eq!(
            error.to_string(),
            "the container did not start within 200ms"
        );
        let pid = std::fs::read_to_string(told).unwrap();
        let process = Path::new("/proc").join(pid.trim());
        assert!(!process.exists(), "the launcher is gone");
    }
}

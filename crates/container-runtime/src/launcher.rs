//! Launchers: shim processes, each of which starts one container.
//!
//! A launcher joins its cgroups before it receives the request for a container. With v1 cgroups the kernel takes several
//! milliseconds for that, so launchers for future pods are started in advance ([`slots`](super::slots)) and wait for a request. A
//! launcher exits when its standard input ends: when it is dropped unused, and when the node is killed.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shim_protocol::{LaunchAnswer, Preparation};

use super::RuntimeError;

/// The thread that starts waiting launchers. A launcher gets a signal when the thread that started it exits (`PR_SET_PDEATHSIG`), so
/// this thread lives as long as the node. The threads of tokio's blocking pool do not.
#[derive(Debug)]
pub struct Starter {
    work: mpsc::Sender<Box<dyn FnOnce() + Send>>,
}

impl Starter {
    /// Starts the thread. It exits when this is dropped, and the unused launchers with it.
    pub fn new() -> std::io::Result<Self> {
        let (work, receiver) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        std::thread::Builder::new()
            .name("launchers".to_owned())
            .spawn(move || receiver.into_iter().for_each(|work| work()))?;
        Ok(Self { work })
    }

    /// Starts a launcher on the thread.
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
    /// Absent once the launcher was used.
    child: Option<Child>,
}

fn failed(source: std::io::Error) -> RuntimeError {
    RuntimeError::Io {
        what: "the launcher".to_owned(),
        source,
    }
}

/// Encodes a message as a line. The launcher reads up to the newline and does not wait for the end of its input: a child that is just
/// being started elsewhere holds a copy of the pipe until its exec.
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

    /// Whether the launcher is still running.
    pub fn is_waiting(&mut self) -> bool {
        self.child
            .as_mut()
            .is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Starts the container that a [`Launch`](shim_protocol::Launch) describes. Blocks until its command was executed or has failed,
    /// so call it on a blocking thread. `give_up` is polled: when it returns an error, the launcher is killed and the error is
    /// returned. The processes that it has started until then are in the cgroups that it joined.
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
        let mut response = Vec::new();
        if let Some(output) = child.stdout.take() {
            await_answer(&output, give_up)?;
            BufReader::new(output)
                .read_until(b'\n', &mut response)
                .map_err(failed)?;
        }
        let Some(mut child) = self.child.take() else {
            return Err(RuntimeError::Launcher("it was used before".to_owned()).into());
        };
        let Ok(answer) = serde_json::from_slice(&response) else {
            let status = child.wait().map_err(failed)?;
            return Err(RuntimeError::Launcher(format!("it ended with {status}")).into());
        };
        // The launcher exits by itself; it is reaped in the background, so that the container does not wait for that.
        tokio::task::spawn_blocking(move || child.wait());
        Ok(answer)
    }
}

/// Waits until the launcher has written its response.
fn await_answer<E: From<RuntimeError>>(
    output: &ChildStdout,
    give_up: impl Fn() -> Option<E>,
) -> Result<(), E> {
    /// The interval at which `give_up` is polled.
    const POLL_INTERVAL: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 50_000_000,
    };
    loop {
        let mut polled = [PollFd::new(output, PollFlags::IN)];
        match poll(&mut polled, Some(&POLL_INTERVAL)) {
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
        let pid_file = directory.path().join("pid");
        let script = format!(
            "#!/bin/sh\necho $$ > {}\nexec sleep 1000\n",
            pid_file.display()
        );
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
        // The file exists before it has its content.
        let has_started =
            || std::fs::read_to_string(&pid_file).is_ok_and(|pid| pid.ends_with('\n'));
        let outcome = launcher.launch(&(), || {
            (began.elapsed() >= limit && has_started()).then_some(RuntimeError::TooSlow(limit))
        });
        let error = outcome.unwrap_err();
        assert_eq!(
            error.to_string(),
            "the container did not start within 200ms"
        );
        let pid = std::fs::read_to_string(pid_file).unwrap();
        let process = Path::new("/proc").join(pid.trim());
        assert!(!process.exists(), "the launcher is gone");
    }
}

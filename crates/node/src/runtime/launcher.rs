//! Launchers: the processes that start containers, one each.
//!
//! A launcher joins its control groups before it is told which container it starts. That takes several milliseconds of
//! waiting for the kernel on machines with v1 control groups, so launchers of pods to come are started ahead
//! ([`slots`](super::slots)) and wait with it behind them. One that is dropped unused ends, and so does one whose node is
//! killed: its input ends.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use shim_protocol::{Launch, LaunchAnswer, Preparation};

use super::RuntimeError;

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

fn encoded(message: &impl serde::Serialize) -> Result<Vec<u8>, RuntimeError> {
    serde_json::to_vec(message).map_err(|error| failed(error.into()))
}

impl Launcher {
    pub fn start(shim: &Path, preparation: &Preparation) -> Result<Self, RuntimeError> {
        let mut text = encoded(preparation)?;
        text.push(b'\n');
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
        launcher.write(&text)?;
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

    /// Starts a container. Blocks until its command runs or cannot, so it belongs on a blocking thread of the runtime.
    pub fn launch(mut self, launch: &Launch) -> Result<LaunchAnswer, RuntimeError> {
        self.write(&encoded(launch)?)?;
        let Some(mut child) = self.child.take() else {
            return Err(RuntimeError::Launcher("it was used before".to_owned()));
        };
        drop(child.stdin.take());
        let mut line = Vec::new();
        if let Some(output) = child.stdout.take() {
            BufReader::new(output)
                .read_until(b'\n', &mut line)
                .map_err(failed)?;
        }
        match serde_json::from_slice(&line) {
            Ok(answer) => {
                // It ends by itself; somebody has to notice, and the container does not wait for that.
                tokio::task::spawn_blocking(move || child.wait());
                Ok(answer)
            }
            Err(_) => {
                let status = child.wait().map_err(failed)?;
                Err(RuntimeError::Launcher(format!("it ended with {status}")))
            }
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

//! The signals that end a program unless it handles them: they are forwarded to the command in a sandbox, or cancel the operation.

use std::future::poll_fn;
use std::io;
use std::process::ExitCode;
use std::task::Poll;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// A signal that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    pub name: &'static str,
    number: u8,
}

/// The handled signals, with their numbers on Linux, which are the same on all supported architectures.
const ENDING: [Received; 6] = [
    Received::new("SIGHUP", 1),
    Received::new("SIGINT", 2),
    Received::new("SIGQUIT", 3),
    Received::new("SIGUSR1", 10),
    Received::new("SIGUSR2", 12),
    Received::new("SIGTERM", 15),
];

impl Received {
    const fn new(name: &'static str, number: u8) -> Self {
        Self { name, number }
    }

    /// The exit code that a shell reports for a program ended by this signal.
    pub fn exit_code(self) -> ExitCode {
        ExitCode::from(128 + self.number)
    }
}

/// Receives the signals while it exists. tokio's handlers stay installed after it is dropped, so these signals no longer end the
/// process.
#[derive(Debug)]
pub struct Signals {
    listening: Vec<(Received, Signal)>,
}

impl Signals {
    pub fn listen() -> io::Result<Self> {
        let listen = |ending: Received| {
            let kind = SignalKind::from_raw(ending.number.into());
            Ok((ending, signal(kind)?))
        };
        let listening = ENDING.into_iter().map(listen).collect::<io::Result<_>>()?;
        Ok(Self { listening })
    }

    /// The next signal. Cancel safe: dropping the future loses no signal.
    pub async fn next(&mut self) -> Received {
        poll_fn(|context| {
            for (ending, signal) in &mut self.listening {
                if signal.poll_recv(context) == Poll::Ready(Some(())) {
                    return Poll::Ready(*ending);
                }
            }
            Poll::Pending
        })
        .await
    }
}

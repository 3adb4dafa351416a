//! The signals that end a program unless it listens to them: told to the command in a sandbox, or an end of what is being done.

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

/// All of them, by the numbers that they have on Linux, whatever the processor.
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

    /// What a shell says of a program that such a signal has ended.
    pub fn exit_code(self) -> ExitCode {
        ExitCode::from(128 + self.number)
    }
}

/// Listens as long as it lives. Once there has been one, such a signal ends this process no more.
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

    /// The next signal. It is lost to nobody when this is dropped before it has come.
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

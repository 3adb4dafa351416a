//! Connects a session with a container's agent to the streams of a process for the streaming protocols.

use streaming::remote_command::{Failure, Process, TerminalSize};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::runtime::agent::{AgentError, Input, Output, OutputStream, Session};
use api::errors::chain;

/// The size of the buffer of a stream between the agent and the client.
const BUFFER: usize = 64 * 1024;

/// Connects a session to streams. The session ends when the process has exited or the client has disconnected.
pub fn process(session: Session, stdin: bool) -> Process {
    let (stdout, stdout_end) = duplex(BUFFER);
    let (stderr, stderr_end) = duplex(BUFFER);
    let (stdin_end, stdin_source) = duplex(BUFFER);
    let (resize, sizes) = mpsc::channel(4);
    let (exited, exit) = oneshot::channel();
    let gone = CancellationToken::new();
    let client = gone.clone().drop_guard();

    let output = deliver(session.output, stdout_end, stderr_end);
    let gone_before = gone.clone();
    tokio::spawn(async move {
        let ended = gone_before.run_until_cancelled(output).await;
        if let Some(ended) = ended {
            let _ = exited.send(ended);
        }
    });
    // Held until the client disconnects, even without input: the agent ends an exec whose connection is closed.
    let source = stdin.then_some(stdin_source);
    let input = feed(session.input, source, sizes);
    tokio::spawn(async move {
        gone.run_until_cancelled(async {
            let kept = input.await;
            std::future::pending::<()>().await;
            drop(kept);
        })
        .await;
    });
    Process {
        stdin: stdin.then(|| Box::new(stdin_end) as streaming::Output),
        stdout: Some(Box::new(stdout)),
        stderr: Some(Box::new(stderr)),
        resize: Some(resize),
        exit: Box::pin(async move {
            let _client = client;
            exit.await
                .unwrap_or_else(|_| Err(Failure("the session was lost".to_owned())))
        }),
    }
}

/// Copies the output of the process until it has exited. Returns how it exited.
async fn deliver(
    mut output: OutputStream,
    mut stdout: DuplexStream,
    mut stderr: DuplexStream,
) -> Result<i32, Failure> {
    loop {
        let written = match output.next().await {
            Ok(Output::Stdout(bytes)) => stdout.write_all(&bytes).await,
            Ok(Output::Stderr(bytes)) => stderr.write_all(&bytes).await,
            Ok(Output::Exit(report)) => return Ok(report.code),
            Err(AgentError::Gone) => return Err(Failure("the container has ended".to_owned())),
            Err(error) => return Err(Failure(chain(&error))),
        };
        // The client does not read this stream any more; only the exit of the process still matters.
        drop(written);
    }
}

/// Passes on input and terminal sizes until both have ended.
async fn feed(
    mut input: Input,
    mut source: Option<DuplexStream>,
    mut sizes: mpsc::Receiver<TerminalSize>,
) -> Input {
    let mut buffer = vec![0; 32 * 1024];
    let mut sizes_open = true;
    while source.is_some() || sizes_open {
        let sent = tokio::select! {
            read = read_from(&mut source, &mut buffer) => match read {
                0 => {
                    source = None;
                    input.close().await
                }
                length => input.write(&buffer[..length]).await,
            },
            size = sizes.recv(), if sizes_open => if let Some(size) = size {
                input.resize(shim_protocol::WindowSize {
                    rows: size.height,
                    columns: size.width,
                }).await
            } else {
                sizes_open = false;
                Ok(())
            },
        };
        if sent.is_err() {
            break;
        }
    }
    input
}

/// The next input. Never completes without a source.
async fn read_from(source: &mut Option<DuplexStream>, buffer: &mut [u8]) -> usize {
    match source {
        Some(source) => source.read(buffer).await.unwrap_or(0),
        None => std::future::pending().await,
    }
}

//! The process part of the newer runtime API: gRPC `process.v1.ProcessService`, disabled unless a port is given. Messages are
//! derived with prost and framed by hand, so that the small binary needs no gRPC framework.

mod messages;

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures::Stream;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, Limited, StreamBody};
use hyper::body::Incoming;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use prost::Message;
use rustix::process::Signal;

use crate::directory_tree::Tree;
use crate::exec_http::{Limits, collect_bytes};
use crate::http_server::Handler;
use crate::path::{BelowBase, PathError};
use crate::protocol::Start;
use crate::response::{Body, full};
use crate::session::{Control, Event, Launcher, Session, StartError, Stream as OutputStream};
use messages::{
    ExecuteRequest, ExecuteResponse, ExitEvent, InitEvent, Nothing, ProcessConfig,
    ResizeTtyRequest, SendSignalRequest, StartRequest, StartResponse, StartResponseEvent,
    WriteStdinPayload, WriteStdinRequest,
};

const SERVICE: &str = "/process.v1.ProcessService/";
/// Trailing metadata of `Execute` when output was truncated at the limit; the published message has no field for it.
const TRUNCATED: &str = "output-truncated";
const LARGEST_MESSAGE: usize = 16 * 1024 * 1024;
/// Characters that must be escaped in `grpc-message`.
const MESSAGE_ESCAPES: &AsciiSet = &CONTROLS.add(b'%');

/// The gRPC status codes in use here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Code {
    Ok = 0,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    PermissionDenied = 7,
    FailedPrecondition = 9,
    Unimplemented = 12,
    Internal = 13,
}

#[derive(Debug)]
struct Status {
    code: Code,
    message: String,
}

fn status(code: Code, message: impl Into<String>) -> Status {
    Status {
        code,
        message: message.into(),
    }
}

impl Status {
    fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-status", HeaderValue::from(self.code as u16));
        if !self.message.is_empty() {
            let escaped = utf8_percent_encode(&self.message, MESSAGE_ESCAPES).to_string();
            if let Ok(message) = HeaderValue::from_str(&escaped) {
                headers.insert("grpc-message", message);
            }
        }
        headers
    }
}

/// The service and the processes that `Start` runs.
#[derive(Debug)]
pub struct ProcessService {
    pub tree: Arc<Tree>,
    pub launcher: Launcher,
    pub limits: Limits,
    pub running: Running,
}

/// The running processes, to which clients can write and send signals and sizes.
#[derive(Clone, Debug, Default)]
pub struct Running(Arc<Mutex<HashMap<i32, Control>>>);

impl Running {
    fn lock(&self) -> MutexGuard<'_, HashMap<i32, Control>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, process: i32) -> Result<Control, Status> {
        let found = self.lock().get(&process).cloned();
        found.ok_or_else(|| status(Code::NotFound, format!("process {process} not found")))
    }
}

impl Handler for ProcessService {
    async fn handle(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        self.call(request).await.unwrap_or_else(|refusal| {
            let mut response = grpc(full(Bytes::new()));
            response.headers_mut().extend(refusal.headers());
            response
        })
    }
}

impl ProcessService {
    async fn call(&self, request: Request<Incoming>) -> Result<Response<Body>, Status> {
        let method = request
            .uri()
            .path()
            .strip_prefix(SERVICE)
            .unwrap_or_default()
            .to_owned();
        let deadline = request
            .headers()
            .get("grpc-timeout")
            .and_then(|value| parse_timeout(value.to_str().ok()?));
        let body = request.into_body();
        match method.as_str() {
            "Start" => self.start(&receive(body).await?),
            "Execute" => self.execute(&receive(body).await?, deadline).await,
            "WriteStdin" => Ok(unary(&self.write_stdin(receive(body).await?).await?)),
            "SendSignal" => Ok(unary(&self.send_signal(&receive(body).await?)?)),
            "ResizeTTY" => Ok(unary(&self.resize(&receive(body).await?)?)),
            _ => Err(status(Code::Unimplemented, "unknown method")),
        }
    }

    fn launch(&self, start: &Start, limit: Option<Duration>) -> Result<Session, Status> {
        self.launcher
            .start(self.tree.base(), start, limit)
            .map_err(|error| match error {
                StartError::Spawn { .. } => {
                    status(Code::Internal, format!("failed to start command: {error}"))
                }
                _ => status(Code::InvalidArgument, error.to_string()),
            })
    }

    fn command(&self, config: Option<&ProcessConfig>) -> Result<Start, Status> {
        let config = config.filter(|config| !config.command.is_empty());
        let config = config.ok_or_else(|| status(Code::InvalidArgument, "command is required"))?;
        let cwd = match config.cwd.as_deref().filter(|cwd| !cwd.is_empty()) {
            None => None,
            Some(cwd) => {
                let below = BelowBase::parse(self.tree.base(), cwd.as_bytes()).map_err(
                    |error| match error {
                        PathError::Escapes => {
                            status(Code::PermissionDenied, format!("cwd: {error}"))
                        }
                        PathError::Nul | PathError::TooLong => {
                            status(Code::InvalidArgument, format!("cwd: {error}"))
                        }
                    },
                )?;
                Some(below.as_path().to_string_lossy().into_owned())
            }
        };
        let env = config.env_vars.clone().into_iter().collect();
        Ok(Start {
            argv: Some(config.command.clone()),
            cwd,
            env,
            ..Start::default()
        })
    }

    fn start(&self, request: &StartRequest) -> Result<Response<Body>, Status> {
        let mut start = self.command(request.config.as_ref())?;
        if let Some(pty) = &request.pty {
            let size = |given: u32| u16::try_from(given).ok().filter(|size| *size > 0);
            (start.tty, start.rows, start.cols) = (true, size(pty.rows), size(pty.cols));
        }
        let session = self.launch(&start, None)?;
        let process = i32::try_from(session.control().process()).unwrap_or(i32::MAX);
        self.running
            .lock()
            .insert(process, session.control().clone());
        let started = Started {
            session,
            process,
            running: self.running.clone(),
            step: Step::Init,
        };
        Ok(grpc(StreamBody::new(events(started)).boxed_unsync()))
    }

    async fn execute(
        &self,
        request: &ExecuteRequest,
        deadline: Option<Duration>,
    ) -> Result<Response<Body>, Status> {
        let start = self.command(request.config.as_ref())?;
        let limit = deadline.map_or(self.limits.time, |deadline| deadline.min(self.limits.time));
        let session = self.launch(&start, Some(limit))?;
        let output = collect_bytes(session, Bytes::new(), self.limits.output_bytes).await;
        if output.exit.timed_out {
            return Err(status(
                Code::DeadlineExceeded,
                "the command ran into its time limit",
            ));
        }
        let [stdout, stderr] = output.streams;
        let message = ExecuteResponse {
            exit_code: output.exit.exit_code,
            stdout: stdout.freeze(),
            stderr: stderr.freeze(),
        };
        let mut trailers = status(Code::Ok, "").headers();
        if output.truncated {
            trailers.insert(TRUNCATED, HeaderValue::from_static("true"));
        }
        Ok(unary_with(&message, trailers))
    }

    async fn write_stdin(&self, request: WriteStdinRequest) -> Result<Nothing, Status> {
        let process = self.running.find(request.process_id)?;
        match request.payload {
            Some(WriteStdinPayload::Eof(())) => process.end_input().await,
            Some(WriteStdinPayload::Input(input)) => process.write(input).await,
            None => {}
        }
        Ok(Nothing {})
    }

    fn send_signal(&self, request: &SendSignalRequest) -> Result<Nothing, Status> {
        let process = self.running.find(request.process_id)?;
        let signal = Signal::from_named_raw(request.signal)
            .filter(|signal| [Signal::INT, Signal::KILL, Signal::TERM].contains(signal))
            .ok_or_else(|| status(Code::InvalidArgument, "unsupported or unspecified signal"))?;
        process
            .signal(signal)
            .map_err(|error| status(Code::Internal, format!("failed to send signal: {error}")))?;
        Ok(Nothing {})
    }

    fn resize(&self, request: &ResizeTtyRequest) -> Result<Nothing, Status> {
        let process = self.running.find(request.process_id)?;
        let size = |given: u32| {
            u16::try_from(given)
                .map_err(|_| status(Code::InvalidArgument, "no terminal is so large"))
        };
        let (rows, cols) = (size(request.rows)?, size(request.cols)?);
        if !process.has_terminal() {
            return Err(status(
                Code::FailedPrecondition,
                "failed to resize TTY: the process has no terminal",
            ));
        }
        process.resize(rows, cols).map_err(|error| {
            status(
                Code::FailedPrecondition,
                format!("failed to resize TTY: {error}"),
            )
        })?;
        Ok(Nothing {})
    }
}

/// A process whose events are being streamed. Dropping the stream drops it and kills the process.
struct Started {
    session: Session,
    process: i32,
    running: Running,
    step: Step,
}

enum Step {
    Init,
    Output,
    Trailers,
    End,
}

impl Drop for Started {
    fn drop(&mut self) {
        self.running.lock().remove(&self.process);
    }
}

fn events(started: Started) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> + Send {
    futures::stream::unfold(started, |mut started| async move {
        let event = match started.step {
            Step::Init => {
                started.step = Step::Output;
                StartResponseEvent::Init(InitEvent {
                    process_id: started.process,
                })
            }
            Step::Output => match started.session.next().await {
                Some(Event::Output(OutputStream::Stdout, bytes)) => {
                    StartResponseEvent::Stdout(bytes)
                }
                Some(Event::Output(OutputStream::Stderr, bytes)) => {
                    StartResponseEvent::Stderr(bytes)
                }
                Some(Event::Exit(exit)) => {
                    started.step = Step::Trailers;
                    StartResponseEvent::Exit(ExitEvent {
                        exit_code: exit.exit_code,
                    })
                }
                None => return None,
            },
            Step::Trailers => {
                started.step = Step::End;
                return Some((Ok(Frame::trailers(status(Code::Ok, "").headers())), started));
            }
            Step::End => return None,
        };
        let message = StartResponse { event: Some(event) };
        Some((Ok(Frame::data(framed(&message))), started))
    })
}

fn grpc(
    body: impl http_body::Body<Data = Bytes, Error: Into<crate::response::BodyError>> + Send + 'static,
) -> Response<Body> {
    let mut response = Response::new(body.map_err(Into::into).boxed_unsync());
    response.headers_mut().insert(
        http::header::CONTENT_TYPE,
        HeaderValue::from_static("application/grpc"),
    );
    response
}

fn unary(message: &impl Message) -> Response<Body> {
    unary_with(message, status(Code::Ok, "").headers())
}

fn unary_with(message: &impl Message, trailers: HeaderMap) -> Response<Body> {
    let frames = [
        Ok::<_, Infallible>(Frame::data(framed(message))),
        Ok(Frame::trailers(trailers)),
    ];
    grpc(StreamBody::new(futures::stream::iter(frames)))
}

/// A message with its length prefix, uncompressed.
fn framed(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut frame = BytesMut::with_capacity(length + 5);
    frame.put_u8(0);
    frame.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    message.encode_raw(&mut frame);
    frame.freeze()
}

/// Reads the single message of a request.
async fn receive<M: Message + Default>(body: Incoming) -> Result<M, Status> {
    let collected = Limited::new(body, LARGEST_MESSAGE).collect().await;
    let mut bytes = collected
        .map_err(|_| status(Code::InvalidArgument, "the message cannot be read"))?
        .to_bytes();
    if bytes.len() < 5 {
        return Err(status(Code::InvalidArgument, "there is no message"));
    }
    if bytes.get_u8() != 0 {
        return Err(status(
            Code::Unimplemented,
            "compressed messages are not understood",
        ));
    }
    if bytes.get_u32() as usize != bytes.len() {
        return Err(status(
            Code::InvalidArgument,
            "the message's length is wrong",
        ));
    }
    M::decode(bytes).map_err(|error| {
        status(
            Code::InvalidArgument,
            format!("the message is not understood: {error}"),
        )
    })
}

/// `grpc-timeout`: at most eight digits and a unit.
fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_digits_and_a_unit() {
        assert_eq!(parse_timeout("10S"), Some(Duration::from_secs(10)));
        assert_eq!(
            parse_timeout("99999999m"),
            Some(Duration::from_millis(99_999_999))
        );
        for wrong in ["", "S", "10", "123456789S", "-1S", "1x", "1é"] {
            assert_eq!(parse_timeout(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn statuses_escape_characters_that_a_header_cannot_contain() {
        let headers = status(Code::NotFound, "no\nsuch 100% ü").headers();
        assert_eq!(headers["grpc-status"], "5");
        assert_eq!(headers["grpc-message"], "no%0Asuch 100%25 %C3%BC");
    }

    #[test]
    fn messages_have_a_length_prefix() {
        let frame = framed(&ExecuteResponse {
            exit_code: 3,
            stdout: Bytes::from_static(b"hi"),
            stderr: Bytes::new(),
        });
        assert_eq!(frame, &[0, 0, 0, 0, 6, 8, 3, 18, 2, b'h', b'i'][..]);
    }
}

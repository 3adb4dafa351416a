//! Commands over plain HTTP: `POST /execute` as the published SDKs call it, and `POST /v1/exec`, collected or as a
//! stream of JSON lines.

use std::path::Path;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{Bytes, BytesMut};
use futures::Stream;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::{BodyExt, LengthLimitError, Limited, StreamBody};
use hyper::body::Incoming;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::protocol::{Data, Exit, Output, ServerMessage, Start, exit_code};
use crate::response::{Body, BodyError, Refusal, json};
use crate::session::{Event, Launcher, Session, StartError, Stream as OutputStream, time_limit};
use crate::shell_words;
use crate::trace::Trace;

/// Larger than any command line that the kernel accepts.
const LARGEST_REQUEST: usize = 8 * 1024 * 1024;

/// The limits of a command that is not interactive.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub time: Duration,
    /// For each of the two output streams.
    pub output_bytes: usize,
}

#[derive(Deserialize)]
struct ExecuteRequest {
    command: String,
    #[serde(default)]
    timeout_seconds: Option<f64>,
}

#[derive(Serialize)]
struct ExecuteResponse {
    stdout: String,
    stderr: String,
    exit_code: i32,
    timed_out: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    truncated: bool,
}

/// `POST /execute`: a command line split into words and run without a shell. A command that cannot start is a response,
/// not an error: exit code 1, and the reason on its standard error.
pub async fn execute(
    launcher: &Launcher,
    base: &Path,
    limits: Limits,
    request: Request<Incoming>,
) -> Result<Response<Body>, Refusal> {
    let trace = Trace::of(request.headers());
    let request: ExecuteRequest = read_json(request.into_body()).await?;
    let began = Instant::now();
    let limit = match request.timeout_seconds {
        Some(seconds) => time_limit(seconds).ok_or_else(|| {
            Refusal::new(
                StatusCode::UNPROCESSABLE_ENTITY,
                "timeout_seconds must be a positive number",
            )
        })?,
        None => limits.time,
    };
    let started = shell_words::split(&request.command)
        .map_err(|error| error.to_string())
        .and_then(|argv| {
            let mut start = Start {
                argv: Some(argv),
                ..Start::default()
            };
            trace.add_to_environment(&mut start.env);
            launcher
                .start(base, &start, Some(limit))
                .map_err(|error| error.to_string())
        });
    let response = match started {
        Err(reason) => ExecuteResponse {
            stdout: String::new(),
            stderr: format!("Failed to execute command: {reason}"),
            exit_code: 1,
            timed_out: false,
            truncated: false,
        },
        Ok(session) => {
            let output = collect(session, Bytes::new(), limits.output_bytes).await;
            let mut stderr = output.stderr;
            if output.truncated {
                // Published SDKs have no field for it.
                add_line(
                    &mut stderr,
                    &format!(
                        "Output truncated: only the first {} bytes of each stream were kept",
                        limits.output_bytes
                    ),
                );
            }
            if output.exit.timed_out {
                add_line(
                    &mut stderr,
                    &format!("Command timed out after {} seconds", limit.as_secs_f64()),
                );
            }
            ExecuteResponse {
                stdout: output.stdout,
                stderr,
                exit_code: legacy_exit_code(&output.exit),
                timed_out: output.exit.timed_out,
                truncated: output.truncated,
            }
        }
    };
    let mut response = json(StatusCode::OK, &response);
    trace.add_server_timing(&mut response, began.elapsed());
    Ok(response)
}

/// Adds a line of the runtime to a command's standard error.
fn add_line(stderr: &mut String, line: &str) {
    if !stderr.is_empty() && !stderr.ends_with('\n') {
        stderr.push('\n');
    }
    stderr.push_str(line);
}

/// Published runtimes report a signal as its negative number.
fn legacy_exit_code(exit: &Exit) -> i32 {
    if exit.signal.is_some() {
        exit_code::SIGNAL_BASE - exit.exit_code
    } else {
        exit.exit_code
    }
}

/// `POST /v1/exec`
pub async fn exec(
    launcher: &Launcher,
    base: &Path,
    limits: Limits,
    request: Request<Incoming>,
) -> Result<Response<Body>, Refusal> {
    let streaming = accepts_ndjson(request.headers());
    let trace = Trace::of(request.headers());
    let mut start: Start = read_json(request.into_body()).await?;
    trace.add_to_environment(&mut start.env);
    let began = Instant::now();
    if start.tty {
        return Err(Refusal::bad_request("a terminal needs a WebSocket"));
    }
    let input = Bytes::from(start.stdin.take().unwrap_or_default());
    let session = match launcher.start(base, &start, Some(limits.time)) {
        Ok(session) => session,
        Err(error) if error.is_invalid_request() => {
            return Err(Refusal::bad_request(error.to_string()));
        }
        Err(error) => return Ok(cannot_start(&error, streaming)),
    };
    if streaming {
        return Ok(ndjson(
            StreamBody::new(lines(session, input)).boxed_unsync(),
        ));
    }
    let collected = collect(session, input, limits.output_bytes).await;
    let mut response = json(StatusCode::OK, &collected);
    trace.add_server_timing(&mut response, began.elapsed());
    Ok(response)
}

fn cannot_start(error: &StartError, streaming: bool) -> Response<Body> {
    let exit = error.exit();
    if streaming {
        ndjson(crate::response::full(line(&ServerMessage::Exit(exit))))
    } else {
        json(
            StatusCode::OK,
            &Output {
                exit,
                ..Output::default()
            },
        )
    }
}

fn ndjson(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/x-ndjson"),
    );
    response
}

fn accepts_ndjson(headers: &HeaderMap) -> bool {
    let accepted = headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok());
    accepted
        .flat_map(|value| value.split(','))
        .any(|kind| kind.trim().starts_with("application/x-ndjson"))
}

/// A command that has ended, and its collected output.
pub struct Collected {
    /// Standard output and standard error.
    pub streams: [BytesMut; 2],
    pub exit: Exit,
    pub truncated: bool,
}

/// Runs a session to its end and collects its output, up to the limit.
pub async fn collect_bytes(mut session: Session, input: Bytes, limit: usize) -> Collected {
    let control = session.control().clone();
    // Concurrently with reading, because a command may fill its output before it has read all its input.
    let feeding = async move {
        control.write(input).await;
        control.end_input().await;
    };
    let mut streams = [BytesMut::new(), BytesMut::new()];
    let mut truncated = false;
    let reading = async {
        while let Some(event) = session.next().await {
            match event {
                Event::Output(stream, bytes) => {
                    let buffer = &mut streams[usize::from(stream == OutputStream::Stderr)];
                    let room = limit.saturating_sub(buffer.len());
                    truncated |= bytes.len() > room;
                    buffer.extend_from_slice(&bytes[..bytes.len().min(room)]);
                }
                Event::Exit(exit) => return exit,
            }
        }
        Exit {
            exit_code: exit_code::CANNOT_RUN,
            error: Some("the command was lost".into()),
            ..Exit::default()
        }
    };
    let exit = tokio::select! {
        biased;
        exit = reading => exit,
        never = async { feeding.await; std::future::pending::<Exit>().await } => never,
    };
    Collected {
        streams,
        exit,
        truncated,
    }
}

async fn collect(session: Session, input: Bytes, limit: usize) -> Output {
    let Collected {
        streams,
        exit,
        truncated,
    } = collect_bytes(session, input, limit).await;
    let [stdout, stderr] = streams.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    Output {
        stdout,
        stderr,
        exit,
        truncated,
    }
}

/// A session as JSON lines. Dropping the stream, which happens when the client disconnects, drops the session and kills the command.
fn lines(
    session: Session,
    input: Bytes,
) -> impl Stream<Item = Result<Frame<Bytes>, BodyError>> + Send {
    let control = session.control().clone();
    let started = ServerMessage::Started {
        pid: control.process(),
    };
    tokio::spawn(async move {
        control.write(input).await;
        control.end_input().await;
    });
    let state = Lines {
        session: Some(session),
        first: Some(started),
        held: [Vec::new(), Vec::new()],
    };
    futures::stream::unfold(state, |mut state| async move {
        let text = state.next().await?;
        Some((Ok(Frame::data(text)), state))
    })
}

struct Lines {
    session: Option<Session>,
    first: Option<ServerMessage>,
    /// The incomplete UTF-8 character at the end of each stream so far.
    held: [Vec<u8>; 2],
}

impl Lines {
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(first) = self.first.take() {
            return Some(line(&first));
        }
        loop {
            match self.session.as_mut()?.next().await {
                Some(Event::Output(stream, bytes)) => {
                    let held = &mut self.held[usize::from(stream == OutputStream::Stderr)];
                    if let Some(data) = take_text(held, &bytes) {
                        return Some(line(&output_message(stream, data)));
                    }
                }
                Some(Event::Exit(exit)) => {
                    self.session = None;
                    let mut text = BytesMut::new();
                    for stream in [OutputStream::Stdout, OutputStream::Stderr] {
                        let held = std::mem::take(
                            &mut self.held[usize::from(stream == OutputStream::Stderr)],
                        );
                        if !held.is_empty() {
                            text.extend_from_slice(&line(&output_message(stream, encoded(&held))));
                        }
                    }
                    text.extend_from_slice(&line(&ServerMessage::Exit(exit)));
                    return Some(text.freeze());
                }
                None => return None,
            }
        }
    }
}

fn output_message(stream: OutputStream, data: Data) -> ServerMessage {
    match stream {
        OutputStream::Stdout => ServerMessage::Stdout(data),
        OutputStream::Stderr => ServerMessage::Stderr(data),
    }
}

/// The next chunk of output as JSON text. An incomplete character waits in `held` for its remaining bytes; bytes that are
/// not UTF-8 are encoded as base64.
fn take_text(held: &mut Vec<u8>, bytes: &[u8]) -> Option<Data> {
    held.extend_from_slice(bytes);
    let piece = std::mem::take(held);
    match std::str::from_utf8(&piece) {
        Ok(text) => Some(Data {
            data: text.to_owned(),
            encoding: None,
        })
        .filter(|data| !data.data.is_empty()),
        Err(error) if error.error_len().is_none() => {
            let (whole, cut) = piece.split_at(error.valid_up_to());
            held.extend_from_slice(cut);
            let text = String::from_utf8_lossy(whole).into_owned();
            Some(Data {
                data: text,
                encoding: None,
            })
            .filter(|data| !data.data.is_empty())
        }
        Err(_) => Some(encoded(&piece)),
    }
}

fn encoded(bytes: &[u8]) -> Data {
    Data {
        data: STANDARD.encode(bytes),
        encoding: Some("base64".into()),
    }
}

fn line(message: &ServerMessage) -> Bytes {
    let mut text = serde_json::to_vec(message).unwrap_or_default();
    text.push(b'\n');
    Bytes::from(text)
}

/// Reads a JSON body of any content type, as clients of published runtimes send it.
pub async fn read_json<T: DeserializeOwned>(body: Incoming) -> Result<T, Refusal> {
    let body = Limited::new(body, LARGEST_REQUEST)
        .collect()
        .await
        .map_err(|error| {
            if error.is::<LengthLimitError>() {
                Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "the request is too large")
            } else {
                Refusal::bad_request("the request's body cannot be read")
            }
        })?;
    serde_json::from_slice(&body.to_bytes()).map_err(|error| {
        Refusal::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            format!("the request's body is not understood: {error}"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(data: &str) -> Data {
        Data {
            data: data.into(),
            encoding: None,
        }
    }

    #[test]
    fn split_characters_arrive_complete() {
        let mut held = Vec::new();
        let bytes = "aü€".as_bytes();
        assert_eq!(take_text(&mut held, &bytes[..2]), Some(text("a")));
        assert_eq!(take_text(&mut held, &bytes[2..4]), Some(text("ü")));
        assert_eq!(take_text(&mut held, &bytes[4..5]), None);
        assert_eq!(take_text(&mut held, &bytes[5..]), Some(text("€")));
        assert!(held.is_empty());
    }

    #[test]
    fn bytes_that_are_not_utf8_are_sent_as_base64() {
        let mut held = Vec::new();
        let data = take_text(&mut held, &[0xff, 0x00, b'a']).unwrap();
        assert_eq!(data.encoding.as_deref(), Some("base64"));
        assert_eq!(STANDARD.decode(data.data).unwrap(), [0xff, 0x00, b'a']);
    }
}

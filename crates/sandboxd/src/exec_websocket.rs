//! `GET /v1/exec` upgraded to a WebSocket: interactive commands. The wire format is described in `protocol`.

use std::path::PathBuf;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error as SocketError, Message};
use tokio_util::task::TaskTracker;

use crate::protocol::{ClientMessage, ServerMessage, Start, channel};
use crate::response::{Body, Refusal, empty};
use crate::session::{Control, Event, Launcher, Session, Stream, parse_signal};
use crate::trace::Trace;

/// Timeout for the client's start message.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// The interval of pings on an idle connection: a vanished peer is detected when a ping cannot be delivered.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const LARGEST_FRAME: usize = 1024 * 1024;

type Socket = WebSocketStream<TokioIo<Upgraded>>;

/// Accepts the upgrade and serves the socket in the background until the command or the client ends.
pub fn upgrade(
    launcher: &Launcher,
    base: PathBuf,
    tasks: &TaskTracker,
    mut request: Request<Incoming>,
) -> Result<Response<Body>, Refusal> {
    let key = websocket_key(request.headers()).ok_or_else(|| {
        Refusal::new(
            StatusCode::UPGRADE_REQUIRED,
            "a WebSocket upgrade (version 13) is needed",
        )
    })?;
    let accept = HeaderValue::from_str(&derive_accept_key(key.as_bytes()))
        .map_err(|_| Refusal::bad_request("the WebSocket key is not valid"))?;
    let trace = Trace::of(request.headers());
    let upgrading = hyper::upgrade::on(&mut request);
    let launcher = launcher.clone();
    tasks.spawn(async move {
        if let Ok(upgraded) = upgrading.await {
            let config = WebSocketConfig::default()
                .max_message_size(Some(LARGEST_FRAME))
                .max_frame_size(Some(LARGEST_FRAME))
                .read_buffer_size(16 * 1024)
                .write_buffer_size(0);
            let socket = WebSocketStream::from_raw_socket(
                TokioIo::new(upgraded),
                Role::Server,
                Some(config),
            )
            .await;
            serve(&launcher, base, &trace, socket).await;
        }
    });
    let mut response = empty(StatusCode::SWITCHING_PROTOCOLS);
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
    Ok(response)
}

fn websocket_key(headers: &HeaderMap) -> Option<String> {
    let is = |name, wanted: &str| {
        let values = headers
            .get_all(name)
            .iter()
            .filter_map(|value: &HeaderValue| value.to_str().ok());
        values
            .flat_map(|value| value.split(','))
            .any(|value| value.trim().eq_ignore_ascii_case(wanted))
    };
    let wanted = is(header::CONNECTION, "upgrade")
        && is(header::UPGRADE, "websocket")
        && is(header::SEC_WEBSOCKET_VERSION, "13");
    let key = headers.get(header::SEC_WEBSOCKET_KEY)?.to_str().ok()?;
    wanted.then(|| key.to_owned())
}

/// Why a connection ends before the command.
enum Ending {
    /// The client closed the connection, vanished or violated the protocol.
    Gone,
    /// The client sent an invalid message.
    Invalid(String),
}

impl From<SocketError> for Ending {
    fn from(error: SocketError) -> Self {
        match error {
            SocketError::Capacity(error) => Ending::Invalid(error.to_string()),
            SocketError::Protocol(error) => Ending::Invalid(error.to_string()),
            SocketError::Utf8(_) => Ending::Invalid("a text frame is not UTF-8".into()),
            _ => Ending::Gone,
        }
    }
}

async fn serve(launcher: &Launcher, base: PathBuf, trace: &Trace, mut socket: Socket) {
    let ending = match tokio::time::timeout(START_TIMEOUT, first_message(&mut socket)).await {
        Err(_elapsed) => Err(Ending::Invalid("no start message came".into())),
        Ok(Err(ending)) => Err(ending),
        Ok(Ok(mut start)) => {
            trace.add_to_environment(&mut start.env);
            match launcher.start(&base, &start, None) {
                Ok(session) => return exchange(socket, session).await,
                Err(error) => socket
                    .send(text(&ServerMessage::Exit(error.exit())))
                    .await
                    .map_err(Ending::from),
            }
        }
    };
    finish(&mut socket, ending).await;
}

async fn first_message(socket: &mut Socket) -> Result<Start, Ending> {
    while let Some(message) = socket.next().await {
        match message? {
            Message::Text(json) => {
                return match serde_json::from_str(&json) {
                    Ok(ClientMessage::Start(start)) => Ok(start),
                    Ok(_) => Err(Ending::Invalid("the first message must be start".into())),
                    Err(error) => Err(Ending::Invalid(format!("not a message: {error}"))),
                };
            }
            Message::Ping(_) | Message::Pong(_) => {}
            Message::Close(_) => return Err(Ending::Gone),
            _ => {
                return Err(Ending::Invalid("the first message must be start".into()));
            }
        }
    }
    Err(Ending::Gone)
}

/// Serves both directions concurrently, so that a command whose output waits for the client still gets its input, and vice
/// versa. When either direction ends, the connection ends; that drops the session, which kills the command
/// unless it has exited.
async fn exchange(socket: Socket, mut session: Session) {
    let control = session.control().clone();
    let (mut sink, mut stream) = socket.split();
    let ending = tokio::select! {
        ending = send_events(&mut sink, &mut session) => ending,
        ending = receive(&mut stream, &control) => ending,
    };
    drop(session);
    if let Ok(mut socket) = sink.reunite(stream) {
        finish(&mut socket, ending).await;
    }
}

async fn send_events(
    sink: &mut SplitSink<Socket, Message>,
    session: &mut Session,
) -> Result<(), Ending> {
    sink.send(text(&ServerMessage::Started {
        pid: session.control().process(),
    }))
    .await?;
    let mut ping = tokio::time::interval(PING_INTERVAL);
    ping.tick().await;
    loop {
        let event = tokio::select! {
            event = session.next() => event,
            _ = ping.tick() => {
                sink.send(Message::Ping(Bytes::new())).await?;
                continue;
            }
        };
        match event {
            Some(Event::Output(stream, bytes)) => {
                let channel = match stream {
                    Stream::Stdout => channel::STDOUT,
                    Stream::Stderr => channel::STDERR,
                };
                sink.send(binary(channel, &bytes)).await?;
            }
            Some(Event::Exit(exit)) => {
                sink.send(text(&ServerMessage::Exit(exit))).await?;
                return Ok(());
            }
            None => return Err(Ending::Gone),
        }
    }
}

async fn receive(stream: &mut SplitStream<Socket>, control: &Control) -> Result<(), Ending> {
    while let Some(message) = stream.next().await {
        match message? {
            Message::Binary(bytes) if bytes.first() == Some(&channel::STDIN) => {
                if bytes.len() > 1 {
                    control.write(bytes.slice(1..)).await;
                }
            }
            Message::Text(json) => match serde_json::from_str(&json) {
                Ok(message) => apply(message, control).await?,
                Err(error) => return Err(Ending::Invalid(format!("not a message: {error}"))),
            },
            Message::Ping(_) | Message::Pong(_) => {}
            Message::Close(_) => return Err(Ending::Gone),
            _ => {
                return Err(Ending::Invalid(
                    "a binary frame must begin with channel 0".into(),
                ));
            }
        }
    }
    Err(Ending::Gone)
}

async fn apply(message: ClientMessage, control: &Control) -> Result<(), Ending> {
    match message {
        ClientMessage::Start(_) => {
            return Err(Ending::Invalid("a command is running already".into()));
        }
        ClientMessage::StdinClose => control.end_input().await,
        ClientMessage::Resize { rows, cols } => {
            // A terminal that was closed meanwhile has no size to set.
            let _ = control.resize(rows, cols);
        }
        ClientMessage::Signal { signal } => {
            let known =
                parse_signal(&signal).ok_or_else(|| Ending::Invalid("no such signal".into()))?;
            control
                .signal(known)
                .map_err(|error| Ending::Invalid(format!("cannot signal: {error}")))?;
        }
    }
    Ok(())
}

async fn finish(socket: &mut Socket, ending: Result<(), Ending>) {
    let frame = match ending {
        Ok(()) => CloseFrame {
            code: CloseCode::Normal,
            reason: "".into(),
        },
        Err(Ending::Invalid(mut reason)) => {
            // A close frame has room for 123 bytes of reason.
            let end = (0..=120.min(reason.len()))
                .rev()
                .find(|&end| reason.is_char_boundary(end))
                .unwrap_or(0);
            reason.truncate(end);
            CloseFrame {
                code: CloseCode::Policy,
                reason: reason.into(),
            }
        }
        Err(Ending::Gone) => return,
    };
    let closing = async {
        if socket.close(Some(frame)).await.is_ok() {
            while let Some(Ok(_)) = socket.next().await {}
        }
    };
    let _ = tokio::time::timeout(Duration::from_secs(5), closing).await;
}

fn text(message: &ServerMessage) -> Message {
    Message::text(serde_json::to_string(message).unwrap_or_default())
}

fn binary(channel: u8, bytes: &[u8]) -> Message {
    let mut frame = BytesMut::with_capacity(bytes.len() + 1);
    frame.extend_from_slice(&[channel]);
    frame.extend_from_slice(bytes);
    Message::Binary(frame.freeze())
}

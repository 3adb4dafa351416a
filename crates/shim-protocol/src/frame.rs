//! The protocol on the agent's socket: frames of one kind byte, a little-endian length and a payload.
//!
//! The first frame of a connection is [`FrameKind::Exec`], [`FrameKind::Attach`] or a control frame. The payload of stream frames
//! is raw bytes, that of all others is JSON.

use serde::{Deserialize, Serialize, de::DeserializeOwned};

pub const HEADER_BYTES: usize = 5;
/// The limit of a payload. Senders split stream data into smaller pieces; a longer frame is a protocol violation.
pub const MAXIMUM_PAYLOAD_BYTES: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    Exec = 0x01,
    Attach = 0x02,
    Stdin = 0x03,
    StdinClosed = 0x04,
    Resize = 0x05,
    /// Sends a signal to the container's command.
    SignalCommand = 0x06,
    /// Sends a signal to the process group of this connection's exec.
    SignalExec = 0x07,
    /// Passes the file descriptor of the new log file as ancillary data.
    ReplaceLog = 0x08,
    Started = 0x81,
    Stdout = 0x82,
    Stderr = 0x83,
    Exit = 0x84,
    Failure = 0x85,
    Done = 0x86,
}

impl FrameKind {
    fn parse(byte: u8) -> Option<Self> {
        Some(match byte {
            0x01 => Self::Exec,
            0x02 => Self::Attach,
            0x03 => Self::Stdin,
            0x04 => Self::StdinClosed,
            0x05 => Self::Resize,
            0x06 => Self::SignalCommand,
            0x07 => Self::SignalExec,
            0x08 => Self::ReplaceLog,
            0x81 => Self::Started,
            0x82 => Self::Stdout,
            0x83 => Self::Stderr,
            0x84 => Self::Exit,
            0x85 => Self::Failure,
            0x86 => Self::Done,
            _ => return None,
        })
    }
}

/// Runs a command in the container, with the user and the confinement of the container's own command.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ExecRequest {
    pub arguments: Vec<String>,
    /// Added to the container's environment.
    pub environment: Vec<(String, String)>,
    pub terminal: bool,
    pub stdin: bool,
    pub window: Option<WindowSize>,
}

/// Attaches to the container's own command.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AttachRequest {
    pub stdin: bool,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct WindowSize {
    pub rows: u16,
    pub columns: u16,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct SignalRequest {
    pub signal: i32,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct StartedReport {
    /// The PID in the container's PID namespace.
    pub pid: i32,
}

/// The result of an exec. `code` is 128 plus the signal number if a signal ended it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitReport {
    pub code: i32,
    pub signal: Option<i32>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FailureReport {
    pub message: String,
    /// The exit code that a shell would return: 126 or 127 for a command that cannot be run.
    pub code: i32,
}

#[derive(Debug, Clone)]
pub struct Frame {
    pub kind: FrameKind,
    pub payload: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("unknown frame kind {0:#04x}")]
    UnknownKind(u8),
    #[error("a frame of {0} bytes is too long")]
    TooLong(usize),
    #[error("the payload of a {kind:?} frame is malformed")]
    Payload {
        kind: FrameKind,
        #[source]
        source: serde_json::Error,
    },
}

impl Frame {
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, FrameError> {
        serde_json::from_slice(&self.payload).map_err(|source| FrameError::Payload {
            kind: self.kind,
            source,
        })
    }
}

/// Appends one frame to `buffer`. The payload must not exceed [`MAXIMUM_PAYLOAD_BYTES`].
pub fn encode(kind: FrameKind, payload: &[u8], buffer: &mut Vec<u8>) {
    debug_assert!(payload.len() <= MAXIMUM_PAYLOAD_BYTES);
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    buffer.push(kind as u8);
    buffer.extend_from_slice(&length.to_le_bytes());
    buffer.extend_from_slice(payload);
}

/// Removes the first complete frame from `buffer`, if there is one.
pub fn decode(buffer: &mut Vec<u8>) -> Result<Option<Frame>, FrameError> {
    let Some((&[kind, a, b, c, d], rest)) = buffer.split_first_chunk::<HEADER_BYTES>() else {
        return Ok(None);
    };
    let kind = FrameKind::parse(kind).ok_or(FrameError::UnknownKind(kind))?;
    let length = usize::try_from(u32::from_le_bytes([a, b, c, d])).unwrap_or(usize::MAX);
    if length > MAXIMUM_PAYLOAD_BYTES {
        return Err(FrameError::TooLong(length));
    }
    if rest.len() < length {
        return Ok(None);
    }
    let payload = rest[..length].to_vec();
    buffer.drain(..HEADER_BYTES + length);
    Ok(Some(Frame { kind, payload }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_decoded_from_any_pieces_of_the_byte_stream() {
        let mut whole = Vec::new();
        encode(FrameKind::Stdout, b"hello", &mut whole);
        encode(FrameKind::StdinClosed, b"", &mut whole);
        for cut in 0..=whole.len() {
            let mut buffer = whole[..cut].to_vec();
            let mut kinds = Vec::new();
            while let Some(frame) = decode(&mut buffer).unwrap() {
                kinds.push(frame.kind);
            }
            buffer.extend_from_slice(&whole[cut..]);
            while let Some(frame) = decode(&mut buffer).unwrap() {
                kinds.push(frame.kind);
            }
            assert_eq!(kinds, [FrameKind::Stdout, FrameKind::StdinClosed]);
        }
    }

    #[test]
    fn an_oversized_or_unknown_frame_is_refused() {
        assert!(matches!(
            decode(&mut vec![0x82, 0xff, 0xff, 0xff, 0xff]),
            Err(FrameError::TooLong(_))
        ));
        assert!(matches!(
            decode(&mut vec![0x7f, 0, 0, 0, 0]),
            Err(FrameError::UnknownKind(0x7f))
        ));
    }
}

//! The frames of SPDY/3.1 as values. Their wire format is in `codec`.

use bytes::Bytes;

use super::headers::Headers;

/// A frame. A DATA frame may be decoded in several pieces; only the last piece carries `fin`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    SynStream {
        stream: u32,
        associated: u32,
        priority: u8,
        fin: bool,
        unidirectional: bool,
        headers: Headers,
    },
    SynReply {
        stream: u32,
        fin: bool,
        headers: Headers,
    },
    RstStream {
        stream: u32,
        status: ResetStatus,
    },
    /// Pairs of setting and value. The persistence flags are discarded.
    Settings {
        values: Vec<(u32, u32)>,
    },
    Ping {
        id: u32,
    },
    GoAway {
        last_stream: u32,
        status: GoAwayStatus,
    },
    Headers {
        stream: u32,
        fin: bool,
        headers: Headers,
    },
    /// Stream 0 stands for the whole connection.
    WindowUpdate {
        stream: u32,
        delta: u32,
    },
    Data {
        stream: u32,
        fin: bool,
        data: Bytes,
    },
}

/// The setting for the initial flow-control window: how many bytes may be sent on a new stream before a WINDOW_UPDATE.
pub const SETTING_INITIAL_WINDOW: u32 = 7;

/// The initial flow-control window of a stream, and of the connection, unless a SETTINGS frame changes it.
pub const DEFAULT_WINDOW: u32 = 65_536;

/// Why a stream was reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResetStatus {
    ProtocolError,
    InvalidStream,
    RefusedStream,
    UnsupportedVersion,
    Cancel,
    InternalError,
    FlowControlError,
    StreamInUse,
    StreamAlreadyClosed,
    Other(u32),
}

impl ResetStatus {
    const KNOWN: [Self; 9] = [
        Self::ProtocolError,
        Self::InvalidStream,
        Self::RefusedStream,
        Self::UnsupportedVersion,
        Self::Cancel,
        Self::InternalError,
        Self::FlowControlError,
        Self::StreamInUse,
        Self::StreamAlreadyClosed,
    ];

    pub fn from_code(code: u32) -> Self {
        Self::KNOWN
            .into_iter()
            .find(|status| status.code() == code)
            .unwrap_or(Self::Other(code))
    }

    pub fn code(self) -> u32 {
        match self {
            Self::ProtocolError => 1,
            Self::InvalidStream => 2,
            Self::RefusedStream => 3,
            Self::UnsupportedVersion => 4,
            Self::Cancel => 5,
            Self::InternalError => 6,
            Self::FlowControlError => 7,
            Self::StreamInUse => 8,
            Self::StreamAlreadyClosed => 9,
            Self::Other(code) => code,
        }
    }
}

/// Why a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GoAwayStatus {
    Ok,
    ProtocolError,
    InternalError,
    Other(u32),
}

impl GoAwayStatus {
    pub fn from_code(code: u32) -> Self {
        match code {
            0 => Self::Ok,
            1 => Self::ProtocolError,
            2 => Self::InternalError,
            other => Self::Other(other),
        }
    }

    pub fn code(self) -> u32 {
        match self {
            Self::Ok => 0,
            Self::ProtocolError => 1,
            Self::InternalError => 2,
            Self::Other(code) => code,
        }
    }
}

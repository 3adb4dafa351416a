//! Encodes and decodes SPDY frames. Pure: it does no I/O, holds no stream state, and reads from a buffer that the caller owns.
//!
//! A control frame is decoded as a whole, so its length is limited. A DATA frame is decoded in pieces as they arrive, so even a
//! frame of 16 MiB needs little memory.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::frame::{Frame, GoAwayStatus, ResetStatus};
use super::headers::{self, Inflater, Storer};

/// The longest accepted control frame. Those that we and Kubernetes send are shorter than 200 bytes.
pub const CONTROL_MAX: usize = 16 * 1024;

/// The longest DATA frame that the encoder writes.
pub const DATA_MAX: usize = 0xff_ffff;

const PREFIX: usize = 8;
const VERSION: u16 = 3;
const CONTROL_BIT: u32 = 0x8000_0000;
const ID_MASK: u32 = 0x7fff_ffff;
const FLAG_FIN: u8 = 1;
const FLAG_UNIDIRECTIONAL: u8 = 2;

const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const SETTINGS: u16 = 4;
const PING: u16 = 6;
const GO_AWAY: u16 = 7;
const HEADERS: u16 = 8;
const WINDOW_UPDATE: u16 = 9;

/// A protocol violation by the peer. It ends the connection.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("unsupported SPDY version {0}")]
    Version(u16),
    #[error("a control frame of {0} bytes exceeds the limit of {CONTROL_MAX}")]
    TooLong(usize),
    #[error("a control frame of type {kind} has the invalid length {length}")]
    Length { kind: u16, length: usize },
    #[error("a frame has the invalid stream ID 0")]
    NoStream,
    #[error("stream ID {0} is not the client's next")]
    StreamId(u32),
    #[error("the headers of stream {stream} are invalid")]
    Headers {
        stream: u32,
        #[source]
        source: headers::Error,
    },
    #[error("the flow-control window of the connection overflows")]
    Window,
}

#[derive(Debug)]
enum State {
    Prefix,
    Data { stream: u32, fin: bool, left: usize },
    Skip { left: usize },
}

/// Decodes frames from a buffer that the caller fills.
#[derive(Debug)]
pub struct Decoder {
    state: State,
    headers: Inflater,
}

impl Default for Decoder {
    fn default() -> Self {
        Self {
            state: State::Prefix,
            headers: Inflater::default(),
        }
    }
}

impl Decoder {
    /// Removes the next frame from `input`. Returns `None` if more bytes are needed. After an error, the connection cannot
    /// continue.
    pub fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Frame>, Error> {
        loop {
            match self.state {
                State::Data { stream, fin, left } => return Ok(self.data(input, stream, fin, left)),
                State::Skip { left } => {
                    let skipped = left.min(input.len());
                    input.advance(skipped);
                    if skipped < left {
                        self.state = State::Skip {
                            left: left - skipped,
                        };
                        return Ok(None);
                    }
                    self.state = State::Prefix;
                }
                State::Prefix => {
                    let Some(prefix) = input.first_chunk::<PREFIX>() else {
                        return Ok(None);
                    };
                    let prefix = u64::from_be_bytes(*prefix);
                    let first = u32::try_from(prefix >> 32).expect("the upper half of 64 bits");
                    let flags = u8::try_from(prefix >> 24 & 0xff).expect("eight bits");
                    let length = usize::try_from(prefix & 0xff_ffff).expect("24 bits");
                    if first & CONTROL_BIT == 0 {
                        input.advance(PREFIX);
                        if first == 0 {
                            return Err(Error::NoStream);
                        }
                        self.state = State::Data {
                            stream: first,
                            fin: flags & FLAG_FIN != 0,
                            left: length,
                        };
                    } else if let Some(found) = self.control(input, first, flags, length)? {
                        return Ok(found);
                    }
                }
            }
        }
    }

    /// The next piece of a DATA frame. An empty frame gives one empty piece.
    fn data(&mut self, input: &mut BytesMut, stream: u32, fin: bool, left: usize) -> Option<Frame> {
        let length = left.min(input.len());
        if length == 0 && left > 0 {
            return None;
        }
        let data = input.split_to(length).freeze();
        let left = left - length;
        self.state = if left == 0 {
            State::Prefix
        } else {
            State::Data { stream, fin, left }
        };
        Some(Frame::Data {
            stream,
            fin: fin && left == 0,
            data,
        })
    }

    /// Returns `Some(Some(frame))` for a frame, `Some(None)` if more bytes are needed, and `None` if the frame was skipped.
    #[expect(
        clippy::option_option,
        reason = "three outcomes, used only by the loop above"
    )]
    fn control(
        &mut self,
        input: &mut BytesMut,
        first: u32,
        flags: u8,
        length: usize,
    ) -> Result<Option<Option<Frame>>, Error> {
        let version = u16::try_from(first >> 16 & 0x7fff).expect("15 bits");
        let kind = u16::try_from(first & 0xffff).expect("16 bits");
        if version != VERSION {
            return Err(Error::Version(version));
        }
        if !matches!(kind, SYN_STREAM..=SETTINGS | PING..=WINDOW_UPDATE) {
            // The protocol requires that unknown control frames are ignored, whatever their length.
            input.advance(PREFIX);
            self.state = State::Skip { left: length };
            return Ok(None);
        }
        if length > CONTROL_MAX {
            return Err(Error::TooLong(length));
        }
        if input.len() < PREFIX + length {
            return Ok(Some(None));
        }
        input.advance(PREFIX);
        let payload = input.split_to(length).freeze();
        self.payload(kind, flags, payload)
            .map(|frame| Some(Some(frame)))
    }

    fn payload(&mut self, kind: u16, flags: u8, mut payload: Bytes) -> Result<Frame, Error> {
        let length = payload.len();
        let wrong_length = Error::Length { kind, length };
        let (least, exact) = match kind {
            SYN_STREAM => (10, false),
            SYN_REPLY | HEADERS | SETTINGS => (4, false),
            PING => (4, true),
            _ => (8, true),
        };
        if length < least || exact && length != least {
            return Err(wrong_length);
        }
        let first = payload.get_u32();
        let fin = flags & FLAG_FIN != 0;
        let stream = first & ID_MASK;
        if stream == 0 && matches!(kind, SYN_STREAM | SYN_REPLY | RST_STREAM | HEADERS) {
            return Err(Error::NoStream);
        }
        Ok(match kind {
            SYN_STREAM => {
                let associated = payload.get_u32() & ID_MASK;
                let priority = payload.get_u8() >> 5;
                payload.advance(1);
                Frame::SynStream {
                    stream,
                    associated,
                    priority,
                    fin,
                    unidirectional: flags & FLAG_UNIDIRECTIONAL != 0,
                    headers: self.headers(stream, &payload)?,
                }
            }
            SYN_REPLY => Frame::SynReply {
                stream,
                fin,
                headers: self.headers(stream, &payload)?,
            },
            HEADERS => Frame::Headers {
                stream,
                fin,
                headers: self.headers(stream, &payload)?,
            },
            RST_STREAM => Frame::RstStream {
                stream,
                status: ResetStatus::from_code(payload.get_u32()),
            },
            SETTINGS => {
                if usize::try_from(first)
                    .ok()
                    .and_then(|count| count.checked_mul(8))
                    != Some(payload.len())
                {
                    return Err(wrong_length);
                }
                let values = std::iter::from_fn(|| {
                    payload
                        .has_remaining()
                        .then(|| (payload.get_u32() & 0xff_ffff, payload.get_u32()))
                });
                Frame::Settings {
                    values: values.collect(),
                }
            }
            PING => Frame::Ping { id: first },
            GO_AWAY => Frame::GoAway {
                last_stream: stream,
                status: GoAwayStatus::from_code(payload.get_u32()),
            },
            _ => Frame::WindowUpdate {
                stream,
                delta: payload.get_u32() & ID_MASK,
            },
        })
    }

    fn headers(&mut self, stream: u32, block: &[u8]) -> Result<headers::Headers, Error> {
        self.headers
            .read(block)
            .map_err(|source| Error::Headers { stream, source })
    }
}

/// Encodes frames. Header compression has state, so frames must be sent in the order in which they were encoded.
#[derive(Debug, Default)]
pub struct Encoder {
    headers: Storer,
}

impl Encoder {
    pub fn encode(&mut self, frame: &Frame, out: &mut BytesMut) {
        match frame {
            Frame::Data { stream, fin, data } => encode_data(*stream, data, *fin, out),
            Frame::SynStream {
                stream,
                associated,
                priority,
                fin,
                unidirectional,
                headers,
            } => {
                let flags =
                    u8::from(*fin) * FLAG_FIN + u8::from(*unidirectional) * FLAG_UNIDIRECTIONAL;
                let start = begin(SYN_STREAM, flags, out);
                out.put_u32(stream & ID_MASK);
                out.put_u32(associated & ID_MASK);
                out.put_u8(priority << 5);
                out.put_u8(0);
                self.headers.write(headers, out);
                end(start, out);
            }
            Frame::SynReply {
                stream,
                fin,
                headers,
            } => self.with_headers(SYN_REPLY, *stream, *fin, headers, out),
            Frame::Headers {
                stream,
                fin,
                headers,
            } => self.with_headers(HEADERS, *stream, *fin, headers, out),
            Frame::RstStream { stream, status } => {
                two_words(RST_STREAM, *stream, status.code(), out);
            }
            Frame::GoAway {
                last_stream,
                status,
            } => two_words(GO_AWAY, *last_stream, status.code(), out),
            Frame::WindowUpdate { stream, delta } => two_words(WINDOW_UPDATE, *stream, *delta, out),
            Frame::Ping { id } => {
                let start = begin(PING, 0, out);
                out.put_u32(*id);
                end(start, out);
            }
            Frame::Settings { values } => {
                let start = begin(SETTINGS, 0, out);
                out.put_u32(
                    u32::try_from(values.len()).expect("the number of settings fits into 32 bits"),
                );
                for (setting, value) in values {
                    out.put_u32(setting & 0xff_ffff);
                    out.put_u32(*value);
                }
                end(start, out);
            }
        }
    }

    fn with_headers(
        &mut self,
        kind: u16,
        stream: u32,
        fin: bool,
        headers: &headers::Headers,
        out: &mut BytesMut,
    ) {
        let start = begin(kind, u8::from(fin) * FLAG_FIN, out);
        out.put_u32(stream & ID_MASK);
        self.headers.write(headers, out);
        end(start, out);
    }
}

/// Writes data as one or more DATA frames.
pub fn encode_data(stream: u32, data: &[u8], fin: bool, out: &mut BytesMut) {
    let mut rest = data;
    loop {
        let (piece, behind) = rest.split_at(rest.len().min(DATA_MAX));
        let last = behind.is_empty();
        out.put_u32(stream & ID_MASK);
        out.put_u8(u8::from(fin && last) * FLAG_FIN);
        out.put_uint(piece.len() as u64, 3);
        out.extend_from_slice(piece);
        if last {
            return;
        }
        rest = behind;
    }
}

fn two_words(kind: u16, first: u32, second: u32, out: &mut BytesMut) {
    let start = begin(kind, 0, out);
    out.put_u32(first & ID_MASK);
    out.put_u32(second);
    end(start, out);
}

/// Writes the prefix of a control frame with a placeholder for its length. Returns the position of the prefix.
fn begin(kind: u16, flags: u8, out: &mut BytesMut) -> usize {
    let start = out.len();
    out.put_u16(0x8000 | VERSION);
    out.put_u16(kind);
    out.put_u32(u32::from(flags) << 24);
    start
}

fn end(start: usize, out: &mut BytesMut) {
    let length = u32::try_from(out.len() - start - PREFIX)
        .expect("our control frames are shorter than 4 GiB");
    out[start + 5..start + PREFIX].copy_from_slice(&length.to_be_bytes()[1..]);
}

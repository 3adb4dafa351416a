//! Refuses HTTP/1 requests that another parser could read differently (request smuggling): lines that end in LF without CR, and
//! `Content-Length` together with `Transfer-Encoding`.
//!
//! The codec accepts a bare LF, and drops a `Content-Length` that follows `Transfer-Encoding` without reporting it; it has
//! no setting for either. So this module checks the bytes before the codec reads them. It parses only the framing, to find
//! where a body ends; the codec validates everything else.
//!
//! ```text
//! head ──► body, by length ──────────────► head …
//!      ├─► chunk size ⇄ chunk ──► trailers ──► head …
//!      └─► opaque: HTTP/2, an upgrade, and what the codec refuses anyway
//! ```

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::{io, mem};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// How much of a line is buffered if it arrives in several reads: no header that matters here is longer.
const MAX_LINE_BUFFER: usize = 128;
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0";
/// The line end of a chunk.
const CRLF: u64 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Head,
    Body(u64),
    ChunkSize,
    Chunk(u64),
    Trailers,
    /// No more requests that could be looked at.
    Opaque,
}

/// The framing of the body that follows a head.
#[derive(Debug, Default)]
struct Framing {
    has_request_line: bool,
    length: Option<u64>,
    is_encoded: bool,
    /// An upgrade, or an invalid length.
    is_opaque: bool,
}

#[derive(Debug)]
struct Requests {
    state: State,
    framing: Framing,
    /// The beginning of an incomplete line, and its last byte.
    line: Vec<u8>,
    last: u8,
}

/// The position at which a request became ambiguous.
#[derive(Debug, PartialEq, Eq)]
struct Ambiguous {
    at: usize,
}

impl Default for Requests {
    fn default() -> Self {
        Self {
            state: State::Head,
            framing: Framing::default(),
            line: Vec::new(),
            last: 0,
        }
    }
}

impl Requests {
    /// Processes the next bytes.
    fn take(&mut self, bytes: &[u8]) -> Result<(), Ambiguous> {
        let mut at = 0;
        while at < bytes.len() {
            let rest = &bytes[at..];
            let left = u64::try_from(rest.len()).unwrap_or(u64::MAX);
            match self.state {
                State::Opaque => return Ok(()),
                State::Body(length) | State::Chunk(length) if length > left => {
                    let remaining = length - left;
                    self.state = match self.state {
                        State::Body(_) => State::Body(remaining),
                        _ => State::Chunk(remaining),
                    };
                    return Ok(());
                }
                State::Body(length) => {
                    at += usize::try_from(length).unwrap_or(rest.len());
                    self.state = State::Head;
                }
                State::Chunk(length) => {
                    at += usize::try_from(length).unwrap_or(rest.len());
                    self.state = State::ChunkSize;
                }
                State::Head | State::ChunkSize | State::Trailers => {
                    let Some(end) = memchr::memchr(b'\n', rest) else {
                        self.keep(rest);
                        return Ok(());
                    };
                    self.keep(&rest[..end]);
                    let line = mem::take(&mut self.line);
                    let ambiguous = Ambiguous { at: at + end };
                    if mem::take(&mut self.last) != b'\r' {
                        return Err(ambiguous);
                    }
                    let line = line.strip_suffix(b"\r").unwrap_or(&line);
                    self.take_line(line).ok_or(ambiguous)?;
                    at += end + 1;
                }
            }
        }
        Ok(())
    }

    fn keep(&mut self, piece: &[u8]) {
        let room = MAX_LINE_BUFFER.saturating_sub(self.line.len());
        self.line.extend_from_slice(&piece[..piece.len().min(room)]);
        self.last = piece.last().copied().unwrap_or(self.last);
    }

    /// Processes a line, without its line end. `None` if it makes the request ambiguous.
    fn take_line(&mut self, line: &[u8]) -> Option<()> {
        match self.state {
            State::Head if !self.framing.has_request_line => {
                // Empty lines before a request are ignored.
                self.framing.has_request_line = !line.is_empty();
                if line == HTTP2_PREFACE {
                    self.state = State::Opaque;
                }
            }
            State::Head if line.is_empty() => {
                let framing = mem::take(&mut self.framing);
                if framing.length.is_some() && framing.is_encoded {
                    return None;
                }
                self.state = match framing.length {
                    _ if framing.is_opaque => State::Opaque,
                    _ if framing.is_encoded => State::ChunkSize,
                    Some(length @ 1..) => State::Body(length),
                    _ => State::Head,
                };
            }
            State::Head => self.take_header(line),
            State::Trailers if line.is_empty() => self.state = State::Head,
            State::ChunkSize => {
                self.state = match chunk_size(line) {
                    Some(0) => State::Trailers,
                    Some(size) => State::Chunk(size.saturating_add(CRLF)),
                    None => State::Opaque,
                };
            }
            State::Trailers | State::Body(_) | State::Chunk(_) | State::Opaque => {}
        }
        Some(())
    }

    fn take_header(&mut self, line: &[u8]) {
        let colon = line.iter().position(|byte| *byte == b':');
        let Some((name, value)) = colon.map(|colon| (&line[..colon], &line[colon + 1..])) else {
            return;
        };
        if name.eq_ignore_ascii_case(b"content-length") {
            let value = std::str::from_utf8(value.trim_ascii()).ok();
            let length = value.and_then(|value| value.parse().ok());
            self.framing.is_opaque |= length.is_none();
            self.framing.length = Some(length.unwrap_or(0));
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            self.framing.is_encoded = true;
        } else if name.eq_ignore_ascii_case(b"upgrade") {
            self.framing.is_opaque = true;
        }
    }
}

/// Parses the size in a chunk header; extensions follow a semicolon.
fn chunk_size(line: &[u8]) -> Option<u64> {
    let digits = line.split(|byte| *byte == b';').next()?.trim_ascii();
    let digits = std::str::from_utf8(digits).ok()?;
    u64::from_str_radix(digits, 16).ok()
}

/// A connection from which the codec reads nothing ambiguous. An ambiguous byte is replaced by one that no head may contain, so
/// that the codec responds 400 and closes the connection; the bytes before it are unchanged.
#[derive(Debug)]
pub struct Strict<I> {
    io: I,
    requests: Requests,
    is_refused: bool,
}

impl<I> Strict<I> {
    pub fn new(io: I) -> Self {
        Self {
            io,
            requests: Requests::default(),
            is_refused: false,
        }
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Strict<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_refused {
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(context, buffer))?;
        let come = buffer.filled_mut().get_mut(before..).unwrap_or_default();
        if let Err(Ambiguous { at }) = self.requests.take(come) {
            come[at] = 0;
            buffer.set_filled(before + at + 1);
            self.is_refused = true;
        }
        Poll::Ready(Ok(()))
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Strict<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn verdict(bytes: &[u8], piece: usize) -> Result<State, usize> {
        let mut requests = Requests::default();
        let mut before = 0;
        for piece in bytes.chunks(piece.max(1)) {
            requests
                .take(piece)
                .map_err(|Ambiguous { at }| before + at)?;
            before += piece.len();
        }
        Ok(requests.state)
    }

    #[test]
    fn bodies_are_skipped_and_heads_are_checked_at_every_split() {
        let get = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
        let bare = "GET / HTTP/1.1\nHost: x\r\n\r\n";
        let sized = "POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\na\nb\n";
        let chunked = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\n\n\n\r\n0\r\nA: b\r\n\r\n";
        let upgrade = "GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n\n\n";
        let both = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\ncontent-length: 0\r\n\r\n";
        let long = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(2 * MAX_LINE_BUFFER));
        for (requests, expected) in [
            (vec![get, get, sized, chunked, &long, get], Ok(State::Head)),
            (vec![get, upgrade], Ok(State::Opaque)),
            (
                vec!["PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\n"],
                Ok(State::Opaque),
            ),
            (vec!["\r\n", get], Ok(State::Head)),
            (vec![bare], Err(bare.find('\n').unwrap())),
            (vec![get, bare], Err(get.len() + bare.find('\n').unwrap())),
            (
                vec![sized, bare],
                Err(sized.len() + bare.find('\n').unwrap()),
            ),
            (
                vec![chunked, bare],
                Err(chunked.len() + bare.find('\n').unwrap()),
            ),
            (vec![both], Err(both.len() - 1)),
        ] {
            let bytes = requests.concat();
            for piece in 1..=bytes.len() {
                let found = verdict(bytes.as_bytes(), piece);
                assert_eq!(found, expected, "{bytes:?} in pieces of {piece}");
            }
        }
    }

    proptest! {
        #[test]
        fn the_verdict_does_not_depend_on_the_split(bytes in "[\r\n :a0GcT]{0,80}", piece in 1_usize..9) {
            let whole = verdict(bytes.as_bytes(), usize::MAX);
            prop_assert_eq!(verdict(bytes.as_bytes(), piece), whole);
        }
    }
}

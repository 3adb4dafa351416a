//! The server side of a SPDY connection as a pure state machine: bytes go in through [`Session::receive`] and out through
//! [`Session::take_output`]; streams are identified by number. It owns the flow-control windows and the limits. Wakers and
//! sockets belong to `connection`.
//!
//! The life of a stream: the peer opens it → it waits for [`Session::accept`] → we reply → each side finishes, or either side
//! resets it → [`Session::remove`].

use std::collections::{HashMap, HashSet, VecDeque};

use bytes::{Buf, BytesMut};

use super::codec::{Decoder, Encoder, Error, encode_data};
use super::frame::{DEFAULT_WINDOW, Frame, GoAwayStatus, ResetStatus, SETTING_INITIAL_WINDOW};
use super::headers::Headers;

/// The longest DATA frame that is sent, so that one stream does not block the others for long.
const DATA_FRAME: usize = 32 * 1024;

/// After this many bytes are read from a stream, a WINDOW_UPDATE reopens its window.
const WINDOW_STEP: u32 = DEFAULT_WINDOW / 2;

const WINDOW_MAX: i64 = 0x7fff_ffff;

/// The memory limits of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The maximum number of open streams. Further streams are refused.
    pub streams: usize,
    /// The maximum number of received and unread bytes over all streams. At this limit, the connection is not read from.
    pub received: usize,
    /// The limit of queued output, in bytes, above which streams accept no more data.
    pub queued_data: usize,
    /// The limit of queued output, in bytes, above which the connection is not read from. It keeps a peer that sends pings but
    /// does not read the answers from filling memory. Stream data alone never reaches it.
    pub queued: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            streams: 2_048,
            received: 1024 * 1024,
            queued_data: 256 * 1024,
            queued: 1024 * 1024,
        }
    }
}

/// The result of reading from a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadOutcome {
    /// This many bytes were copied.
    Read(usize),
    /// Nothing has arrived yet.
    Pending,
    /// The peer has finished sending.
    End,
    /// The stream was reset, or the connection has ended.
    Reset,
}

/// The result of writing to a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteOutcome {
    Written(usize),
    /// The flow-control window or the output queue is full.
    Blocked,
    /// We have finished sending, or the stream was reset.
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Receiving {
    Open,
    /// Incoming data is discarded.
    Discarding,
    /// The peer has finished sending.
    Ended,
}

/// The streams whose readers or writers must be woken.
#[derive(Debug)]
enum Touched {
    Some(HashSet<u32>),
    All,
}

impl Touched {
    fn add(&mut self, stream: u32) {
        if let Self::Some(streams) = self {
            streams.insert(stream);
        }
    }
}

#[derive(Debug)]
struct StreamState {
    received: BytesMut,
    receiving: Receiving,
    sent_end: bool,
    reset: bool,
    window: i64,
    /// Bytes read since the last WINDOW_UPDATE.
    consumed: u32,
}

#[derive(Debug)]
pub struct Session {
    limits: Limits,
    decoder: Decoder,
    encoder: Encoder,
    streams: HashMap<u32, StreamState>,
    waiting: VecDeque<(u32, Headers)>,
    output: BytesMut,
    received: usize,
    last_stream: u32,
    touched: Touched,
    going_away: bool,
    /// Whether the peer has shown that it uses stream windows, and the connection window.
    stream_windows: bool,
    connection_windows: bool,
    initial_window: u32,
    window: i64,
    consumed: u32,
}

impl Session {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            decoder: Decoder::default(),
            encoder: Encoder::default(),
            streams: HashMap::new(),
            waiting: VecDeque::new(),
            output: BytesMut::new(),
            received: 0,
            last_stream: 0,
            touched: Touched::Some(HashSet::new()),
            going_away: false,
            stream_windows: false,
            connection_windows: false,
            initial_window: DEFAULT_WINDOW,
            window: i64::from(DEFAULT_WINDOW),
            consumed: 0,
        }
    }

    /// Whether there is room for more input from the peer.
    pub fn wants_input(&self) -> bool {
        self.received < self.limits.received && self.output.len() < self.limits.queued
    }

    /// Handles the frames in `input`, as long as there is room. The rest of `input` stays for the next call.
    ///
    /// An error ends the connection. The GOAWAY frame for it is already in the output.
    pub fn receive(&mut self, input: &mut BytesMut) -> Result<(), Error> {
        while self.wants_input() {
            let handled = match self.decoder.decode(input) {
                Ok(Some(frame)) => self.handle(frame),
                Ok(None) => return Ok(()),
                Err(error) => Err(error),
            };
            if let Err(error) = handled {
                self.go_away(GoAwayStatus::ProtocolError);
                return Err(error);
            }
        }
        Ok(())
    }

    fn handle(&mut self, frame: Frame) -> Result<(), Error> {
        match frame {
            Frame::SynStream {
                stream,
                fin,
                unidirectional,
                headers,
                ..
            } => self.open(stream, fin, unidirectional, headers),
            Frame::Data { stream, fin, data } => {
                self.data(stream, &data, fin);
                Ok(())
            }
            Frame::RstStream { stream, .. } => {
                self.peer_reset(stream);
                Ok(())
            }
            // Pings with odd numbers come from the peer and need an answer. We send no pings.
            Frame::Ping { id } => {
                if id % 2 == 1 {
                    self.queue(&Frame::Ping { id });
                }
                Ok(())
            }
            Frame::Settings { values } => {
                let mut windows = values.iter().rev();
                match windows.find(|(setting, _)| *setting == SETTING_INITIAL_WINDOW) {
                    Some((_, value)) => self.set_initial_window(*value),
                    None => Ok(()),
                }
            }
            Frame::WindowUpdate { stream, delta } => self.open_window(stream, delta),
            Frame::Headers { stream, fin, .. } => {
                if fin {
                    self.data(stream, &[], true);
                }
                Ok(())
            }
            // After GOAWAY, the peer still ends its streams one by one. SYN_REPLY is ignored, because we open no streams.
            Frame::GoAway { .. } | Frame::SynReply { .. } => Ok(()),
        }
    }

    fn open(
        &mut self,
        stream: u32,
        fin: bool,
        unidirectional: bool,
        headers: Headers,
    ) -> Result<(), Error> {
        if stream.is_multiple_of(2) || stream <= self.last_stream {
            return Err(Error::StreamId(stream));
        }
        self.last_stream = stream;
        if self.going_away || self.streams.len() >= self.limits.streams {
            self.queue_reset(stream, ResetStatus::RefusedStream);
            return Ok(());
        }
        self.streams.insert(
            stream,
            StreamState {
                received: BytesMut::new(),
                receiving: if fin {
                    Receiving::Ended
                } else {
                    Receiving::Open
                },
                sent_end: unidirectional,
                reset: false,
                window: i64::from(self.initial_window),
                consumed: 0,
            },
        );
        self.waiting.push_back((stream, headers));
        Ok(())
    }

    fn data(&mut self, stream: u32, data: &[u8], fin: bool) {
        let Some(state) = self.streams.get_mut(&stream) else {
            // Data may still arrive for a stream that we have just removed. That is no error.
            if stream > self.last_stream && fin {
                self.queue_reset(stream, ResetStatus::InvalidStream);
            }
            self.consume_connection(data.len());
            return;
        };
        if state.reset || state.receiving != Receiving::Open {
            self.consume(stream, data.len());
        } else {
            state.received.extend_from_slice(data);
            self.received += data.len();
        }
        if fin && let Some(state) = self.streams.get_mut(&stream) {
            state.receiving = Receiving::Ended;
        }
        self.touched.add(stream);
    }

    fn peer_reset(&mut self, stream: u32) {
        let Some(state) = self.streams.get_mut(&stream) else {
            return;
        };
        state.reset = true;
        self.touched.add(stream);
        if let Some(position) = self.waiting.iter().position(|(id, _)| *id == stream) {
            self.waiting.remove(position);
            self.remove(stream);
        }
    }

    fn set_initial_window(&mut self, value: u32) -> Result<(), Error> {
        if i64::from(value) > WINDOW_MAX {
            return Err(Error::Window);
        }
        let change = i64::from(value) - i64::from(self.initial_window);
        self.initial_window = value;
        self.stream_windows = true;
        for state in self.streams.values_mut() {
            state.window += change;
        }
        self.touched = Touched::All;
        Ok(())
    }

    fn open_window(&mut self, stream: u32, delta: u32) -> Result<(), Error> {
        let delta = i64::from(delta);
        if stream == 0 {
            self.connection_windows = true;
            self.window += delta;
            self.touched = Touched::All;
            return if self.window > WINDOW_MAX {
                Err(Error::Window)
            } else {
                Ok(())
            };
        }
        self.stream_windows = true;
        if let Some(state) = self.streams.get_mut(&stream) {
            state.window += delta;
            self.touched.add(stream);
            if state.window > WINDOW_MAX {
                state.reset = true;
                self.queue_reset(stream, ResetStatus::FlowControlError);
            }
        }
        Ok(())
    }

    /// The next stream that the peer has opened, with its headers. The caller must answer it with `reply` or end it with
    /// `remove`.
    pub fn accept(&mut self) -> Option<(u32, Headers)> {
        self.waiting.pop_front()
    }

    pub fn reply(&mut self, stream: u32) {
        self.queue(&Frame::SynReply {
            stream,
            fin: false,
            headers: Headers::default(),
        });
    }

    /// Discards everything that the peer sends on this stream, now and later.
    pub fn discard_input(&mut self, stream: u32) {
        let Some(state) = self.streams.get_mut(&stream) else {
            return;
        };
        if state.receiving == Receiving::Open {
            state.receiving = Receiving::Discarding;
        }
        let discarded = std::mem::take(&mut state.received).len();
        self.received -= discarded;
        self.consume(stream, discarded);
    }

    pub fn read(&mut self, stream: u32, buffer: &mut [u8]) -> ReadOutcome {
        let Some(state) = self.streams.get_mut(&stream) else {
            return ReadOutcome::Reset;
        };
        if state.received.is_empty() {
            return match state.receiving {
                Receiving::Ended => ReadOutcome::End,
                _ if state.reset => ReadOutcome::Reset,
                _ => ReadOutcome::Pending,
            };
        }
        let length = buffer.len().min(state.received.len());
        buffer[..length].copy_from_slice(&state.received[..length]);
        state.received.advance(length);
        if state.received.is_empty() {
            // Free the memory: a stream whose buffer was once full may stay open for hours.
            state.received = BytesMut::new();
        }
        self.received -= length;
        self.consume(stream, length);
        ReadOutcome::Read(length)
    }

    pub fn write(&mut self, stream: u32, data: &[u8]) -> WriteOutcome {
        let queue_full = self.output.len() >= self.limits.queued_data;
        let Some(state) = self.streams.get_mut(&stream) else {
            return WriteOutcome::Closed;
        };
        if state.reset || state.sent_end || self.going_away {
            return WriteOutcome::Closed;
        }
        let mut room = DATA_FRAME;
        if self.stream_windows {
            room = room.min(usize::try_from(state.window).unwrap_or(0));
        }
        if self.connection_windows {
            room = room.min(usize::try_from(self.window).unwrap_or(0));
        }
        if data.is_empty() {
            return WriteOutcome::Written(0);
        }
        if queue_full || room == 0 {
            return WriteOutcome::Blocked;
        }
        let length = data.len().min(room);
        state.window = state.window.saturating_sub_unsigned(length as u64);
        self.window = self.window.saturating_sub_unsigned(length as u64);
        encode_data(stream, &data[..length], false, &mut self.output);
        WriteOutcome::Written(length)
    }

    /// Finishes sending on this stream.
    pub fn finish(&mut self, stream: u32) {
        if let Some(state) = self.streams.get_mut(&stream)
            && !state.sent_end
            && !state.reset
            && !self.going_away
        {
            state.sent_end = true;
            encode_data(stream, &[], true, &mut self.output);
        }
    }

    /// Removes a stream. Sends a reset to the peer unless both sides had finished.
    pub fn remove(&mut self, stream: u32) {
        self.remove_with(stream, ResetStatus::Cancel);
    }

    pub fn remove_with(&mut self, stream: u32, status: ResetStatus) {
        let Some(state) = self.streams.remove(&stream) else {
            return;
        };
        self.received -= state.received.len();
        self.consume_connection(state.received.len());
        let finished = state.sent_end && state.receiving == Receiving::Ended;
        if !(finished || state.reset || self.going_away) {
            self.queue_reset(stream, status);
        }
    }

    /// Sends GOAWAY after all output that was written before. No streams or data are accepted after it.
    pub fn go_away(&mut self, status: GoAwayStatus) {
        if !self.going_away {
            self.going_away = true;
            let last_stream = self.last_stream;
            self.queue(&Frame::GoAway {
                last_stream,
                status,
            });
        }
    }

    /// The bytes to send.
    pub fn take_output(&mut self) -> BytesMut {
        self.output.split()
    }

    pub fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// The streams that may have become readable or writable since the last call.
    pub fn take_touched(&mut self) -> Vec<u32> {
        match std::mem::replace(&mut self.touched, Touched::Some(HashSet::new())) {
            Touched::Some(streams) => streams.into_iter().collect(),
            Touched::All => self.streams.keys().copied().collect(),
        }
    }

    /// Whether a stream is waiting for `accept`.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The number of buffered bytes: received and unread, and queued for sending.
    pub fn buffered(&self) -> usize {
        self.received + self.output.len()
    }

    fn consume(&mut self, stream: u32, length: usize) {
        if let Some(state) = self.streams.get_mut(&stream) {
            state.consumed = state.consumed.saturating_add(clamp(length));
            if state.consumed >= WINDOW_STEP && state.receiving != Receiving::Ended && !state.reset
            {
                let delta = std::mem::take(&mut state.consumed);
                self.queue(&Frame::WindowUpdate { stream, delta });
            }
        }
        self.consume_connection(length);
    }

    fn consume_connection(&mut self, length: usize) {
        self.consumed = self.consumed.saturating_add(clamp(length));
        if self.consumed >= WINDOW_STEP {
            let delta = std::mem::take(&mut self.consumed);
            self.queue(&Frame::WindowUpdate { stream: 0, delta });
        }
    }

    fn queue_reset(&mut self, stream: u32, status: ResetStatus) {
        self.queue(&Frame::RstStream { stream, status });
    }

    fn queue(&mut self, frame: &Frame) {
        self.encoder.encode(frame, &mut self.output);
    }
}

fn clamp(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX >> 1)
}

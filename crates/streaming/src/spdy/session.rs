//! The server side of one SPDY connection as a pure state machine: bytes go in by [`Session::receive`] and out by
//! [`Session::take_output`]; streams are numbers. It owns the windows and the limits; wakers and sockets belong to the connection.
//!
//! A stream's life: opened by the peer → waiting in the queue of [`Session::accept`] → replied to → each side finishes, or either
//! resets → removed when its owner lets go of it.

use std::collections::{HashMap, HashSet, VecDeque};

use bytes::{Buf, BytesMut};

use super::codec::{Decoder, Encoder, Error, encode_data};
use super::frame::{DEFAULT_WINDOW, Frame, GoAwayStatus, ResetStatus, SETTING_INITIAL_WINDOW};
use super::headers::Headers;

/// The longest DATA frame sent, so that no stream holds the connection for long.
const DATA_FRAME: usize = 32 * 1024;

/// How many bytes are read off a stream before its window is opened again.
const WINDOW_STEP: u32 = DEFAULT_WINDOW / 2;

const WINDOW_MAX: i64 = 0x7fff_ffff;

/// What bounds the memory of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Streams that are open at once; more are refused.
    pub streams: usize,
    /// Received bytes that nobody has read yet, over all streams. At this many the connection is not read from.
    pub received: usize,
    /// Bytes waiting to be sent, above which streams accept no more.
    pub queued_data: usize,
    /// Bytes waiting to be sent, above which the connection is not read from, so that a peer that sends pings and reads no
    /// answers cannot fill memory. Data alone never reaches it.
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

/// What reading off a stream gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadOutcome {
    /// So many bytes were copied.
    Read(usize),
    /// Nothing has arrived yet.
    Pending,
    /// The peer has finished.
    End,
    /// The stream was reset, or the connection is over.
    Reset,
}

/// What writing to a stream gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteOutcome {
    Written(usize),
    /// The window or the queue is full.
    Blocked,
    /// We have finished, or the stream was reset.
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Receiving {
    Open,
    /// Nobody wants what arrives.
    Discarding,
    /// The peer has finished.
    Ended,
}

/// Streams that somebody may have to look at again.
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
    /// Set once the peer has shown that it keeps stream windows, and the connection's.
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

    /// Whether there is room for what the peer may send next.
    pub fn wants_input(&self) -> bool {
        self.received < self.limits.received && self.output.len() < self.limits.queued
    }

    /// Handles the frames in `input`, as long as there is room; the rest stays there for the next call.
    ///
    /// An error ends the connection: the GOAWAY that says so is already in the output.
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
            // Odd pings are the peer's and want an answer; we send none of our own.
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
            // A peer that goes away still ends its streams one by one. We open no streams, so a reply answers none.
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
            // What was on its way to a stream that we have just dropped is no error.
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

    /// The next stream that the peer opened, with its headers. It must be answered by `reply` or ended by `remove`.
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

    /// Throws away what the peer sends on this stream, now and later.
    pub fn discard_input(&mut self, stream: u32) {
        let Some(state) = self.streams.get_mut(&stream) else {
            return;
        };
        if state.receiving == Receiving::Open {
            state.receiving = Receiving::Discarding;
        }
        let thrown = std::mem::take(&mut state.received).len();
        self.received -= thrown;
        self.consume(stream, thrown);
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
            // Gives the memory back: a stream that was once full may live for hours.
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

    /// Says that we send no more on this stream.
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

    /// Forgets a stream; the peer is told unless both sides had finished.
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

    /// Announces the end of the connection. Whatever was written before is sent before it; nothing is accepted after it.
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

    /// The streams that may be readable or writable since the last call.
    pub fn take_touched(&mut self) -> Vec<u32> {
        match std::mem::replace(&mut self.touched, Touched::Some(HashSet::new())) {
            Touched::Some(streams) => streams.into_iter().collect(),
            Touched::All => self.streams.keys().copied().collect(),
        }
    }

    /// Whether somebody can be served by `accept`.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The bytes that this session holds for others: received and unread, and queued to be sent.
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

//! Property tests of the SPDY codec and session with arbitrary bytes, and tests of a session with a client that follows the
//! protocol.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use bytes::{Bytes, BytesMut};
use proptest::collection::vec;
use proptest::prelude::*;
use streaming::spdy::{
    Decoder, Encoder, Frame, GoAwayStatus, Headers, Limits, ReadOutcome, ResetStatus, Session,
    WriteOutcome,
};

fn headers() -> impl Strategy<Value = Headers> {
    vec(("[a-z][a-z0-9-]{0,12}", "[ -~]{0,40}"), 0..6).prop_map(|pairs| {
        pairs
            .iter()
            .fold(Headers::default(), |headers, (name, value)| {
                headers.with(name, value)
            })
    })
}

fn frame() -> impl Strategy<Value = Frame> {
    let stream = 1..0x7fff_ffff_u32;
    prop_oneof![
        (
            stream.clone(),
            0..9_u32,
            0..8_u8,
            any::<bool>(),
            any::<bool>(),
            headers()
        )
            .prop_map(
                |(stream, associated, priority, fin, unidirectional, headers)| Frame::SynStream {
                    stream,
                    associated,
                    priority,
                    fin,
                    unidirectional,
                    headers
                }
            ),
        (stream.clone(), any::<bool>(), headers()).prop_map(|(stream, fin, headers)| {
            Frame::SynReply {
                stream,
                fin,
                headers,
            }
        }),
        (stream.clone(), any::<bool>(), headers()).prop_map(|(stream, fin, headers)| {
            Frame::Headers {
                stream,
                fin,
                headers,
            }
        }),
        (stream.clone(), any::<u32>()).prop_map(|(stream, code)| Frame::RstStream {
            stream,
            status: ResetStatus::from_code(code)
        }),
        vec((0..0xff_ffff_u32, any::<u32>()), 0..9).prop_map(|values| Frame::Settings { values }),
        any::<u32>().prop_map(|id| Frame::Ping { id }),
        (0..0x7fff_ffff_u32, any::<u32>()).prop_map(|(last_stream, code)| Frame::GoAway {
            last_stream,
            status: GoAwayStatus::from_code(code)
        }),
        (0..0x7fff_ffff_u32, 0..0x7fff_ffff_u32)
            .prop_map(|(stream, delta)| Frame::WindowUpdate { stream, delta }),
        (stream, any::<bool>(), vec(any::<u8>(), 0..200)).prop_map(|(stream, fin, data)| {
            Frame::Data {
                stream,
                fin,
                data: data.into(),
            }
        }),
    ]
}

/// Frames that open and use streams, with stream IDs from so small a range that they often collide.
fn client_frame() -> impl Strategy<Value = Frame> {
    let stream = 1..12_u32;
    prop_oneof![
        (stream.clone(), headers()).prop_map(|(stream, headers)| Frame::SynStream {
            stream,
            associated: 0,
            priority: 0,
            fin: false,
            unidirectional: false,
            headers
        }),
        (stream.clone(), any::<bool>(), vec(any::<u8>(), 0..2_000)).prop_map(
            |(stream, fin, data)| {
                Frame::Data {
                    stream,
                    fin,
                    data: data.into(),
                }
            }
        ),
        stream.clone().prop_map(|stream| Frame::RstStream {
            stream,
            status: ResetStatus::Cancel
        }),
        (0..12_u32, 0..0x7fff_ffff_u32)
            .prop_map(|(stream, delta)| Frame::WindowUpdate { stream, delta }),
        any::<u32>().prop_map(|id| Frame::Ping { id }),
        (0..9_u32, any::<u32>()).prop_map(|pair| Frame::Settings { values: vec![pair] }),
    ]
}

/// Decodes all frames, and joins the pieces of each DATA frame.
fn decode_all(
    decoder: &mut Decoder,
    input: &mut BytesMut,
    frames: &mut Vec<Frame>,
    open: &mut bool,
) {
    while let Some(frame) = decoder
        .decode(input)
        .expect("the encoder's output is valid")
    {
        if let Frame::Data { data, fin, .. } = &frame
            && *open
            && let Some(Frame::Data {
                data: before,
                fin: ended,
                ..
            }) = frames.last_mut()
        {
            *before = Bytes::from([&before[..], &data[..]].concat());
            *ended = *fin;
        } else {
            *open = matches!(frame, Frame::Data { .. });
            frames.push(frame);
        }
    }
}

proptest! {
    #[test]
    fn frames_survive_encoding_and_decoding_in_any_pieces(frames in vec(frame(), 1..12), cut in 1..64_usize) {
        let (mut encoder, mut decoder) = (Encoder::default(), Decoder::default());
        for frame in &frames {
            let mut wire = BytesMut::new();
            encoder.encode(frame, &mut wire);
            let (mut input, mut decoded, mut open) = (BytesMut::new(), Vec::new(), false);
            for piece in wire.chunks(cut) {
                input.extend_from_slice(piece);
                decode_all(&mut decoder, &mut input, &mut decoded, &mut open);
            }
            prop_assert!(input.is_empty());
            prop_assert_eq!(&decoded, std::slice::from_ref(frame));
        }
    }

    #[test]
    fn arbitrary_bytes_do_not_panic_the_decoder(pieces in vec(vec(any::<u8>(), 0..300), 0..20)) {
        let mut decoder = Decoder::default();
        let mut input = BytesMut::new();
        for piece in pieces {
            input.extend_from_slice(&piece);
            loop {
                match decoder.decode(&mut input) {
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(_) => return Ok(()),
                }
            }
        }
    }

    /// A valid frame prefix gets an arbitrary payload past the first checks.
    #[test]
    fn arbitrary_payloads_of_real_frames_do_not_panic(
        kind in 0..12_u16,
        flags in any::<u8>(),
        payload in vec(any::<u8>(), 0..400),
    ) {
        let mut wire = BytesMut::from(&[0x80, 3][..]);
        wire.extend_from_slice(&kind.to_be_bytes());
        let length = u32::try_from(payload.len()).unwrap() | u32::from(flags) << 24;
        wire.extend_from_slice(&length.to_be_bytes());
        wire.extend_from_slice(&payload);
        let mut session = Session::new(Limits::default());
        let _ = session.receive(&mut wire);
    }

    /// Whatever frames a client sends, and whether or not the streams are read, a session buffers no more than its limits allow.
    #[test]
    fn a_session_stays_within_its_limits(frames in vec(client_frame(), 0..120), serve in any::<bool>()) {
        let limits = Limits { streams: 4, received: 8_000, queued_data: 2_000, queued: 4_000 };
        let mut session = Session::new(limits);
        let (mut encoder, mut input) = (Encoder::default(), BytesMut::new());
        let mut open = Vec::new();
        for frame in frames {
            encoder.encode(&frame, &mut input);
            if session.receive(&mut input).is_err() {
                break;
            }
            // The session may hold one frame above the limit, and the answer to that frame.
            prop_assert!(session.buffered() <= limits.received + limits.queued + 2_000 + 2_000);
            if serve {
                while let Some((stream, _)) = session.accept() {
                    session.reply(stream);
                    open.push(stream);
                }
                for stream in &open {
                    let _ = session.read(*stream, &mut [0; 64]);
                    let _ = session.write(*stream, &[0; 512]);
                }
                session.take_output();
            }
        }
        for stream in open {
            session.remove(stream);
        }
    }
}

struct Client {
    encoder: Encoder,
    decoder: Decoder,
}

impl Client {
    fn new() -> Self {
        Self {
            encoder: Encoder::default(),
            decoder: Decoder::default(),
        }
    }

    fn send(&mut self, session: &mut Session, frames: &[Frame]) {
        let mut wire = BytesMut::new();
        for frame in frames {
            self.encoder.encode(frame, &mut wire);
        }
        session.receive(&mut wire).unwrap();
    }

    fn receive(&mut self, session: &mut Session) -> Vec<Frame> {
        let mut wire = session.take_output();
        std::iter::from_fn(|| self.decoder.decode(&mut wire).unwrap()).collect()
    }
}

fn syn(stream: u32) -> Frame {
    Frame::SynStream {
        stream,
        associated: 0,
        priority: 0,
        fin: false,
        unidirectional: false,
        headers: Headers::default().with("streamType", "data"),
    }
}

fn data(stream: u32, data: &'static [u8], fin: bool) -> Frame {
    Frame::Data {
        stream,
        fin,
        data: Bytes::from_static(data),
    }
}

#[test]
fn a_stream_is_opened_used_and_finished() {
    let (mut session, mut client) = (Session::new(Limits::default()), Client::new());
    client.send(
        &mut session,
        &[syn(1), data(1, b"hello", true), Frame::Ping { id: 7 }],
    );
    let (stream, headers) = session.accept().unwrap();
    assert_eq!((stream, headers.get("streamtype")), (1, Some("data")));
    session.reply(1);
    let mut buffer = [0; 16];
    assert_eq!(session.read(1, &mut buffer), ReadOutcome::Read(5));
    assert_eq!(&buffer[..5], b"hello");
    assert_eq!(session.read(1, &mut buffer), ReadOutcome::End);
    assert_eq!(session.write(1, b"world"), WriteOutcome::Written(5));
    session.finish(1);
    assert_eq!(session.write(1, b"more"), WriteOutcome::Closed);
    session.remove(1);
    let reply = Frame::SynReply {
        stream: 1,
        fin: false,
        headers: Headers::default(),
    };
    let expected = [
        Frame::Ping { id: 7 },
        reply,
        data(1, b"world", false),
        data(1, b"", true),
    ];
    assert_eq!(client.receive(&mut session), expected);
}

#[test]
fn a_stream_that_is_dropped_early_is_reset() {
    let (mut session, mut client) = (Session::new(Limits::default()), Client::new());
    client.send(&mut session, &[syn(1), data(1, b"unread", false)]);
    session.accept().unwrap();
    session.remove(1);
    let reset = Frame::RstStream {
        stream: 1,
        status: ResetStatus::Cancel,
    };
    assert_eq!(client.receive(&mut session), [reset]);
    assert_eq!(session.buffered(), 0);
    // Data that the client sent before it received the reset is no error.
    client.send(&mut session, &[data(1, b"late", true)]);
    assert!(client.receive(&mut session).is_empty());
}

#[test]
fn windows_limit_sending_only_once_the_peer_uses_them() {
    let (mut session, mut client) = (
        Session::new(Limits {
            queued_data: usize::MAX,
            ..Limits::default()
        }),
        Client::new(),
    );
    client.send(&mut session, &[syn(1), syn(3)]);
    let big = vec![0; 32 * 1024];
    for _ in 0..4 {
        assert_eq!(session.write(1, &big), WriteOutcome::Written(big.len()));
    }
    client.send(
        &mut session,
        &[Frame::WindowUpdate {
            stream: 1,
            delta: 65_536 + 10,
        }],
    );
    assert_eq!(session.write(1, &big), WriteOutcome::Written(10));
    assert_eq!(session.write(1, &big), WriteOutcome::Blocked);
    // A smaller initial window also applies to the open streams.
    client.send(
        &mut session,
        &[Frame::Settings {
            values: vec![(7, 100)],
        }],
    );
    assert_eq!(session.write(3, &big), WriteOutcome::Written(100));
    assert_eq!(session.write(3, &big), WriteOutcome::Blocked);
}

#[test]
fn reading_reopens_the_window() {
    let (mut session, mut client) = (Session::new(Limits::default()), Client::new());
    let half = vec![1; 32 * 1024];
    client.send(
        &mut session,
        &[
            syn(1),
            Frame::Data {
                stream: 1,
                fin: false,
                data: half.clone().into(),
            },
        ],
    );
    session.accept().unwrap();
    assert!(client.receive(&mut session).is_empty());
    let mut buffer = half;
    assert_eq!(session.read(1, &mut buffer), ReadOutcome::Read(32 * 1024));
    let update = |stream| Frame::WindowUpdate {
        stream,
        delta: 32 * 1024,
    };
    assert_eq!(client.receive(&mut session), [update(1), update(0)]);
}

#[test]
fn too_many_streams_are_refused_and_wrong_numbers_end_the_connection() {
    let limits = Limits {
        streams: 1,
        ..Limits::default()
    };
    let (mut session, mut client) = (Session::new(limits), Client::new());
    client.send(&mut session, &[syn(1), syn(3)]);
    let refused = Frame::RstStream {
        stream: 3,
        status: ResetStatus::RefusedStream,
    };
    assert_eq!(client.receive(&mut session), [refused]);
    for wrong in [2, 3] {
        let mut wire = BytesMut::new();
        client.encoder.encode(&syn(wrong), &mut wire);
        assert!(session.receive(&mut wire).is_err(), "{wrong}");
    }
    let farewell = Frame::GoAway {
        last_stream: 3,
        status: GoAwayStatus::ProtocolError,
    };
    assert_eq!(client.receive(&mut session), [farewell]);
}

#[test]
fn unread_data_stops_reading_from_the_connection_until_it_is_read() {
    let limits = Limits {
        received: 10,
        ..Limits::default()
    };
    let (mut session, mut client) = (Session::new(limits), Client::new());
    let mut wire = BytesMut::new();
    for frame in [
        syn(1),
        data(1, b"0123456789", false),
        data(1, b"abcde", true),
    ] {
        client.encoder.encode(&frame, &mut wire);
    }
    session.receive(&mut wire).unwrap();
    assert!(!session.wants_input());
    assert!(!wire.is_empty());
    let mut buffer = [0; 10];
    assert_eq!(session.read(1, &mut buffer), ReadOutcome::Read(10));
    session.receive(&mut wire).unwrap();
    assert_eq!(session.read(1, &mut buffer), ReadOutcome::Read(5));
    assert_eq!(session.read(1, &mut buffer), ReadOutcome::End);
}

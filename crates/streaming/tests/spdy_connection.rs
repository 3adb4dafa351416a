//! A SPDY connection with peers that do not read, send without end, or stay silent.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use streaming::spdy::{Connection, Decoder, Encoder, Frame, Headers, Limits, Timeouts};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::time::timeout;

const TIMEOUT: Duration = Duration::from_secs(120);

/// If nothing moves for this long, the connection has stalled.
const STALL: Duration = Duration::from_millis(300);

const TIMEOUTS: Timeouts = Timeouts {
    idle: TIMEOUT,
    linger: TIMEOUT,
};

fn wire(encoder: &mut Encoder, frame: &Frame) -> BytesMut {
    let mut wire = BytesMut::new();
    encoder.encode(frame, &mut wire);
    wire
}

fn syn(stream: u32) -> Frame {
    Frame::SynStream {
        stream,
        associated: 0,
        priority: 0,
        fin: false,
        unidirectional: false,
        headers: Headers::default(),
    }
}

fn data(stream: u32, length: usize, fin: bool) -> Frame {
    Frame::Data {
        stream,
        fin,
        data: Bytes::from(vec![b'x'; length]),
    }
}

/// Writes `piece` repeatedly until the connection accepts no more, and returns the number of accepted bytes.
async fn write_until_stalled(peer: &mut DuplexStream, piece: &[u8]) -> usize {
    let mut accepted = 0;
    while let Ok(written) = timeout(STALL, peer.write(&piece[accepted % piece.len()..])).await {
        accepted += written.unwrap();
        assert!(accepted < 64 * 1024 * 1024, "the connection never stalls");
    }
    accepted
}

#[tokio::test]
async fn a_peer_that_pings_without_reading_is_not_read_from() {
    let (mut peer, ours) = duplex(1_024);
    let _connection = Connection::serve(ours, Limits::default(), TIMEOUTS);
    let pings = wire(&mut Encoder::default(), &Frame::Ping { id: 1 }).repeat(100);
    let accepted = write_until_stalled(&mut peer, &pings).await;
    let limits = Limits::default();
    assert!(
        accepted < 4 * limits.queued,
        "{accepted} bytes of pings were accepted"
    );
}

#[tokio::test]
async fn an_unread_stream_blocks_the_sender_and_loses_no_data() {
    let (mut peer, ours) = duplex(1_024);
    let mut connection = Connection::serve(ours, Limits::default(), TIMEOUTS);
    let mut encoder = Encoder::default();
    peer.write_all(&wire(&mut encoder, &syn(1))).await.unwrap();
    let mut stream = connection.accept().await.unwrap().accept();
    let (mut read_half, mut write_half) = tokio::io::split(peer);
    let drain =
        tokio::spawn(async move { tokio::io::copy(&mut read_half, &mut tokio::io::sink()).await });
    let mut sending = tokio::spawn(async move {
        for _ in 0..100 {
            write_half
                .write_all(&wire(&mut encoder, &data(1, 100_000, false)))
                .await
                .unwrap();
        }
        write_half
            .write_all(&wire(&mut encoder, &data(1, 0, true)))
            .await
            .unwrap();
        write_half
    });
    assert!(
        timeout(STALL, &mut sending).await.is_err(),
        "ten megabytes were accepted although the stream is not read"
    );
    let mut received = Vec::new();
    timeout(TIMEOUT, stream.read_to_end(&mut received))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(received.len(), 10_000_000);
    drop(sending.await.unwrap());
    drain.abort();
}

#[tokio::test]
async fn written_data_is_delivered_after_the_connection_is_dropped() {
    let (mut peer, ours) = duplex(1_024);
    let mut connection = Connection::serve(ours, Limits::default(), TIMEOUTS);
    peer.write_all(&wire(&mut Encoder::default(), &syn(1)))
        .await
        .unwrap();
    let mut stream = connection.accept().await.unwrap().accept();
    stream.write_all(&vec![b'y'; 200_000]).await.unwrap();
    stream.shutdown().await.unwrap();
    drop(connection);
    drop(stream);
    let mut all = BytesMut::new();
    while timeout(TIMEOUT, peer.read_buf(&mut all))
        .await
        .unwrap()
        .unwrap()
        > 0
    {}
    let mut decoder = Decoder::default();
    let frames: Vec<Frame> = std::iter::from_fn(|| decoder.decode(&mut all).unwrap()).collect();
    let bytes: usize = frames
        .iter()
        .map(|frame| match frame {
            Frame::Data { data, .. } => data.len(),
            _ => 0,
        })
        .sum();
    assert_eq!(bytes, 200_000);
    assert!(matches!(
        frames.last(),
        Some(Frame::GoAway { last_stream: 1, .. })
    ));
}

#[tokio::test]
async fn an_idle_connection_ends() {
    let (peer, ours) = duplex(1_024);
    let timeouts = Timeouts {
        idle: Duration::from_millis(50),
        ..TIMEOUTS
    };
    let mut connection = Connection::serve(ours, Limits::default(), timeouts);
    assert!(
        timeout(TIMEOUT, connection.accept())
            .await
            .unwrap()
            .is_none()
    );
    timeout(TIMEOUT, connection.closed()).await.unwrap();
    drop(peer);
}

#[tokio::test]
async fn a_disconnect_of_the_peer_ends_every_stream() {
    let (mut peer, ours) = duplex(1_024);
    let mut connection = Connection::serve(ours, Limits::default(), TIMEOUTS);
    let mut encoder = Encoder::default();
    peer.write_all(&wire(&mut encoder, &syn(1))).await.unwrap();
    let mut stream = connection.accept().await.unwrap().accept();
    drop(peer);
    let ended = timeout(TIMEOUT, stream.read(&mut [0; 8])).await.unwrap();
    assert_eq!(
        ended.unwrap_err().kind(),
        std::io::ErrorKind::ConnectionReset
    );
    let broken = timeout(TIMEOUT, stream.write_all(&[0; 8])).await.unwrap();
    assert_eq!(broken.unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
    assert!(
        timeout(TIMEOUT, connection.accept())
            .await
            .unwrap()
            .is_none()
    );
}

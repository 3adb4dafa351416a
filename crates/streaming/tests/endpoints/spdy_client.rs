//! The endpoints with a SPDY client that sends single frames: exec in every protocol version, port-forward, and clients that
//! violate the protocol.

use std::time::Duration;

use crate::support::Cluster;
use bytes::{Bytes, BytesMut};
use streaming::spdy::{Decoder, Encoder, Frame, GoAwayStatus, Headers, ResetStatus};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

const TIMEOUT: Duration = Duration::from_secs(120);

struct Client {
    stream: TcpStream,
    input: BytesMut,
    encoder: Encoder,
    decoder: Decoder,
    next_stream: u32,
    head: String,
}

impl Client {
    /// Sends the upgrade request to the API server, which proxies it to the kubelet.
    async fn connect(cluster: &Cluster, path: &str, protocols: &[&str]) -> Self {
        let mut stream = TcpStream::connect(cluster.api).await.unwrap();
        let versions: String = protocols
            .iter()
            .flat_map(|protocol| ["X-Stream-Protocol-Version: ", protocol, "\r\n"])
            .collect();
        let request = format!(
            "POST /api/v1/namespaces/default/pods/web/{path} HTTP/1.1\r\nHost: api\r\n\
             Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n{versions}\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(timeout(TIMEOUT, stream.read_u8()).await.unwrap().unwrap());
        }
        Self {
            stream,
            input: BytesMut::new(),
            encoder: Encoder::default(),
            decoder: Decoder::default(),
            next_stream: 1,
            head: String::from_utf8(head).unwrap().to_ascii_lowercase(),
        }
    }

    async fn send(&mut self, frame: &Frame) {
        let mut wire = BytesMut::new();
        self.encoder.encode(frame, &mut wire);
        self.stream.write_all(&wire).await.unwrap();
    }

    async fn open(&mut self, headers: &[(&str, &str)]) -> u32 {
        let stream = self.next_stream;
        self.next_stream += 2;
        let headers = headers
            .iter()
            .fold(Headers::default(), |headers, (name, value)| {
                headers.with(name, value)
            });
        self.send(&Frame::SynStream {
            stream,
            associated: 0,
            priority: 0,
            fin: false,
            unidirectional: false,
            headers,
        })
        .await;
        stream
    }

    async fn data(&mut self, stream: u32, data: &[u8], fin: bool) {
        let data = Bytes::copy_from_slice(data);
        self.send(&Frame::Data { stream, fin, data }).await;
    }

    /// The next frame, or `None` when the server has closed the connection.
    async fn next(&mut self) -> Option<Frame> {
        let receiving = async {
            loop {
                if let Some(frame) = self.decoder.decode(&mut self.input).unwrap() {
                    return Some(frame);
                }
                if self.stream.read_buf(&mut self.input).await.unwrap() == 0 {
                    return None;
                }
            }
        };
        timeout(TIMEOUT, receiving).await.expect("a frame")
    }

    /// All data of a stream until the stream ends.
    async fn read_to_end(&mut self, wanted: u32) -> String {
        let mut text = Vec::new();
        loop {
            match self
                .next()
                .await
                .expect("more before the end of the connection")
            {
                Frame::Data { stream, fin, data } if stream == wanted => {
                    text.extend_from_slice(&data);
                    if fin {
                        return String::from_utf8(text).unwrap();
                    }
                }
                _ => {}
            }
        }
    }
}

#[tokio::test]
async fn every_protocol_version_reports_the_exit_code() {
    let cluster = Cluster::start().await;
    let path = "exec?command=sh&command=-c&command=exit+5&stdout=true";
    for (version, structured) in [
        ("v5.channel.k8s.io", true),
        ("v4.channel.k8s.io", true),
        ("v3.channel.k8s.io", false),
        ("v2.channel.k8s.io", false),
        ("channel.k8s.io", false),
    ] {
        let mut client = Client::connect(&cluster, path, &["v9.channel.k8s.io", version]).await;
        assert!(client.head.starts_with("http/1.1 101"), "{}", client.head);
        assert!(
            client
                .head
                .contains(&format!("x-stream-protocol-version: {version}\r\n"))
        );
        let error = client.open(&[("streamType", "error")]).await;
        client.open(&[("streamType", "stdout")]).await;
        let report = client.read_to_end(error).await;
        let status: Option<serde_json::Value> = serde_json::from_str(&report).ok();
        assert_eq!(status.is_some(), structured, "{version}: {report}");
        if let Some(status) = status {
            assert_eq!(status["details"]["causes"][0]["message"], "5");
        } else {
            assert!(report.contains("exit status 5"), "{report}");
        }
        while client.next().await.is_some() {}
    }
}

#[tokio::test]
async fn all_output_arrives_before_the_connection_ends() {
    let cluster = Cluster::start().await;
    let path = "exec?command=head&command=-c&command=6000000&command=/dev/zero&stdout=true";
    let mut client = Client::connect(&cluster, path, &["v4.channel.k8s.io"]).await;
    let error = client.open(&[("streamType", "error")]).await;
    let stdout = client.open(&[("streamType", "stdout")]).await;
    let (mut bytes, mut status, mut farewell) = (0, Vec::new(), None);
    while let Some(frame) = client.next().await {
        match frame {
            Frame::Data { stream, data, .. } if stream == stdout => bytes += data.len(),
            Frame::Data { stream, data, .. } if stream == error => status.extend_from_slice(&data),
            Frame::GoAway { status, .. } => farewell = Some(status),
            _ => {}
        }
    }
    assert_eq!(bytes, 6_000_000);
    assert_eq!(status, br#"{"metadata":{},"status":"Success"}"#);
    assert_eq!(farewell, Some(GoAwayStatus::Ok));
}

#[tokio::test]
async fn streams_that_were_not_asked_for_are_refused() {
    let cluster = Cluster::start().await;
    let mut client = Client::connect(
        &cluster,
        "exec?command=cat&stdin=true",
        &["v4.channel.k8s.io"],
    )
    .await;
    let stranger = client.open(&[("streamType", "telepathy")]).await;
    let status = ResetStatus::RefusedStream;
    assert_eq!(
        client.next().await,
        Some(Frame::RstStream {
            stream: stranger,
            status
        })
    );
    let error = client.open(&[("streamType", "error")]).await;
    let stdin = client.open(&[("streamType", "stdin")]).await;
    client.data(stdin, b"to cat", true).await;
    assert!(client.read_to_end(error).await.contains("Success"));
}

#[tokio::test]
async fn a_client_without_a_common_protocol_gets_the_supported_ones() {
    let cluster = Cluster::start().await;
    let client = Client::connect(
        &cluster,
        "exec?command=ls&stdout=true",
        &["v9.channel.k8s.io"],
    )
    .await;
    assert!(client.head.starts_with("http/1.1 403"), "{}", client.head);
    assert!(
        client
            .head
            .contains("x-accepted-stream-protocol-versions: v4.channel.k8s.io")
    );
}

#[tokio::test]
async fn a_protocol_violation_is_answered_with_goaway_and_ends_the_command() {
    let cluster = Cluster::start().await;
    let path = "exec?command=sleep&command=600&stdout=true";
    let mut client = Client::connect(&cluster, path, &["v4.channel.k8s.io"]).await;
    client.open(&[("streamType", "error")]).await;
    client.open(&[("streamType", "stdout")]).await;
    cluster.wait_for_commands(1).await;
    client
        .stream
        .write_all(&[0x80, 2, 0, 1, 0, 0, 0, 0])
        .await
        .unwrap();
    let mut last = None;
    while let Some(frame) = client.next().await {
        last = Some(frame);
    }
    let status = GoAwayStatus::ProtocolError;
    assert_eq!(
        last,
        Some(Frame::GoAway {
            last_stream: 3,
            status
        })
    );
    cluster.wait_for_commands(0).await;
}

#[tokio::test]
async fn a_port_forward_pairs_streams_by_request() {
    let cluster = Cluster::start().await;
    let mut client = Client::connect(&cluster, "portforward", &["portforward.k8s.io"]).await;
    let mut pairs = Vec::new();
    for request in ["a", "b"] {
        let headers = |kind| [("streamType", kind), ("port", "80"), ("requestID", request)];
        let error = client.open(&headers("error")).await;
        pairs.push((error, request));
    }
    for (error, request) in pairs {
        let data = client
            .open(&[
                ("streamType", "data"),
                ("port", "80"),
                ("requestID", request),
            ])
            .await;
        client.data(error, b"", true).await;
        client.data(data, request.as_bytes(), true).await;
        assert_eq!(client.read_to_end(data).await, request);
    }
    // A stream without a request ID, as old clients open it, is paired; a stream with port 0 is refused.
    let error = client
        .open(&[("streamType", "error"), ("port", "81")])
        .await;
    client.open(&[("streamType", "data"), ("port", "81")]).await;
    assert!(
        client
            .read_to_end(error)
            .await
            .contains("nothing listens on 81")
    );
    let refused = client
        .open(&[("streamType", "data"), ("port", "0"), ("requestID", "c")])
        .await;
    loop {
        if let Frame::RstStream { stream, status } = client.next().await.expect("a refusal")
            && stream == refused
        {
            assert_eq!(status, ResetStatus::RefusedStream);
            break;
        }
    }
}

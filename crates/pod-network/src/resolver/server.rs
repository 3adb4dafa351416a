//! The resolver's sockets, and the watches that feed its zone.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::watcher::Event;
use kube::{Client, Resource};
use object_watch::{Failure, Watched};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::message::{Code, Malformed, Question, Transport, complaint};
use super::zone::{Answer, Zone};
use crate::follow::follow;

const PORT: u16 = 53;
/// The timeout of a query to one of the machine's resolvers.
const UPSTREAM: Duration = Duration::from_secs(3);
/// The longest wait of a query for a cluster name until all names were listed. Clients usually wait five seconds.
const FIRST_LIST: Duration = Duration::from_secs(3);
/// The timeout of receiving a query over TCP.
const IDLE: Duration = Duration::from_secs(10);
/// The limit of concurrent queries of one pod, so that a pod that floods the resolver does not affect others.
const QUESTIONS_PER_POD: usize = 64;
const LARGEST_UDP: usize = 4096;

#[derive(Debug, thiserror::Error)]
pub enum ResolverError {
    #[error("listening on {address} for the cluster's DNS")]
    Listen {
        address: SocketAddr,
        #[source]
        source: std::io::Error,
    },
}

#[derive(Debug, Default)]
struct Known {
    services: Watched<Service>,
    slices: Watched<EndpointSlice>,
    pods: Watched<(String, Vec<IpAddr>)>,
}

impl Known {
    fn is_complete(&self) -> bool {
        self.services.complete && self.slices.complete && self.pods.complete
    }
}

/// The cluster's DNS, bound but not yet served.
#[derive(Debug)]
pub struct Resolver {
    domain: String,
    upstreams: Vec<SocketAddr>,
    sockets: Vec<(UdpSocket, TcpListener)>,
}

#[derive(Debug)]
struct Served {
    domain: String,
    upstreams: Vec<SocketAddr>,
    known: Mutex<Known>,
    /// Whether all names were listed. Before that, a name that is not found may exist.
    is_complete: watch::Sender<bool>,
    zone: RwLock<Option<Zone>>,
    under_way: Mutex<HashMap<IpAddr, usize>>,
}

/// The resolvers of the machine itself, from its `resolv.conf`.
pub fn upstreams(resolver_file: &str) -> Vec<SocketAddr> {
    let lines = resolver_file.lines();
    let servers = lines.filter_map(|line| line.trim().strip_prefix("nameserver"));
    servers
        .filter_map(|server| server.trim().parse::<IpAddr>().ok())
        .map(|server| SocketAddr::new(server, PORT))
        .collect()
}

impl Resolver {
    /// Binds the node's addresses. `resolver_file` is the machine's own `resolv.conf`.
    pub async fn bind(
        addresses: &[IpAddr],
        domain: &str,
        resolver_file: &str,
    ) -> Result<Self, ResolverError> {
        let mut sockets = Vec::new();
        for address in addresses {
            let address = SocketAddr::new(*address, PORT);
            let failed = |source| ResolverError::Listen { address, source };
            let datagrams = UdpSocket::bind(address).await.map_err(failed)?;
            let streams = TcpListener::bind(address).await.map_err(failed)?;
            sockets.push((datagrams, streams));
        }
        Ok(Self {
            domain: domain.to_owned(),
            upstreams: upstreams(resolver_file)
                .into_iter()
                .filter(|upstream| !addresses.contains(&upstream.ip()))
                .collect(),
            sockets,
        })
    }

    /// Serves until `shutdown`.
    pub async fn run(self, client: Client, shutdown: CancellationToken) {
        let served = Arc::new(Served::new(self.domain, self.upstreams));
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(served.clone().watch(client));
        for (datagrams, streams) in self.sockets {
            tasks.spawn(served.clone().serve_datagrams(datagrams));
            tasks.spawn(served.clone().serve_streams(streams));
        }
        shutdown.cancelled().await;
        // Dropping the tasks stops them.
    }
}

fn pod_addresses(pod: &Pod) -> (String, Vec<IpAddr>) {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    let status = pod.status.iter();
    let addresses = status.flat_map(|status| status.pod_ips.iter().flatten());
    let addresses = addresses.filter_map(|address| address.ip.parse().ok());
    (namespace, addresses.collect())
}

/// Applies an event or a failure of a watch. Objects that the node may not see do not exist for the resolver. Returns whether a name
/// may have changed.
fn take<K: Resource, V>(
    watched: &mut Watched<V>,
    news: Result<Event<K>, Failure>,
    facts: impl Fn(K) -> V,
) -> bool {
    match news {
        Ok(event) => watched.take(event, facts),
        Err(Failure::Forbidden { .. }) => !std::mem::replace(&mut watched.complete, true),
        Err(_) => false,
    }
}

impl Served {
    fn new(domain: String, upstreams: Vec<SocketAddr>) -> Self {
        Self {
            domain,
            upstreams,
            known: Mutex::default(),
            is_complete: watch::Sender::new(false),
            zone: RwLock::default(),
            under_way: Mutex::default(),
        }
    }

    async fn watch(self: Arc<Self>, client: Client) {
        let services = follow::<Service>(&client, |news| {
            self.learn(|known| take(&mut known.services, news, |service| service));
        });
        let slices = follow::<EndpointSlice>(&client, |news| {
            self.learn(|known| take(&mut known.slices, news, |slice| slice));
        });
        let pods = follow::<Pod>(&client, |news| {
            self.learn(|known| take(&mut known.pods, news, |pod: Pod| pod_addresses(&pod)));
        });
        tokio::join!(services, slices, pods);
    }

    /// Handles a watch event. The zone is rebuilt at the next query.
    fn learn(&self, take: impl FnOnce(&mut Known) -> bool) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if take(&mut known) {
            *self.zone.write().unwrap_or_else(PoisonError::into_inner) = None;
            let complete = known.is_complete();
            self.is_complete
                .send_if_modified(|before| std::mem::replace(before, complete) != complete);
        }
    }

    /// Looks up a name after all names were listed. `None` if that takes too long. Names outside of the cluster do not wait.
    async fn find(&self, name: &str, kind: u16) -> Option<Answer> {
        let mut is_complete = self.is_complete.subscribe();
        let all_known = *is_complete.borrow_and_update();
        let answer = self.look_up(name, kind);
        if all_known || answer == Answer::NotOurs {
            return Some(answer);
        }
        let complete = is_complete.wait_for(|complete| *complete);
        timeout(FIRST_LIST, complete).await.ok()?.ok()?;
        Some(self.look_up(name, kind))
    }

    fn look_up(&self, name: &str, kind: u16) -> Answer {
        {
            let zone = self.zone.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(zone) = zone.as_ref() {
                return zone.look_up(name, kind);
            }
        }
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let zone = Zone::new(
            &self.domain,
            known.services.objects.values(),
            known.slices.objects.values(),
            known.pods.objects.values().cloned(),
        );
        let answer = zone.look_up(name, kind);
        // Stored while the objects are locked, so that the zone is never older than they are.
        *self.zone.write().unwrap_or_else(PoisonError::into_inner) = Some(zone);
        answer
    }

    async fn serve_datagrams(self: Arc<Self>, socket: UdpSocket) {
        let socket = Arc::new(socket);
        let mut buffer = vec![0; LARGEST_UDP];
        loop {
            let (count, from) = match socket.recv_from(&mut buffer).await {
                Ok(received) => received,
                Err(error) => {
                    // An ICMP error of an earlier response is reported at the next read.
                    tracing::debug!(%error, "the resolver's socket");
                    tokio::task::yield_now().await;
                    continue;
                }
            };
            let Some(turn) = self.begin(from.ip()) else {
                continue;
            };
            let packet = buffer[..count].to_vec();
            let (served, socket) = (self.clone(), socket.clone());
            tokio::spawn(async move {
                let _turn = turn;
                if let Some(answer) = served.answer(&packet, Transport::Udp).await {
                    let _ = socket.send_to(&answer, from).await;
                }
            });
        }
    }

    async fn serve_streams(self: Arc<Self>, listener: TcpListener) {
        loop {
            let Ok((stream, from)) = listener.accept().await else {
                // For example, no free file descriptors: waits until others are closed.
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let Some(turn) = self.begin(from.ip()) else {
                continue;
            };
            let served = self.clone();
            tokio::spawn(async move {
                let _turn = turn;
                let _ = served.serve_stream(stream).await;
            });
        }
    }

    async fn serve_stream(&self, mut stream: TcpStream) -> std::io::Result<()> {
        loop {
            let packet = timeout(IDLE, read_message(&mut stream)).await??;
            let Some(answer) = self.answer(&packet, Transport::Tcp).await else {
                return Ok(());
            };
            write_message(&mut stream, &answer).await?;
        }
    }

    fn begin(self: &Arc<Self>, from: IpAddr) -> Option<Turn> {
        let mut under_way = self
            .under_way
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let count = under_way.entry(from).or_default();
        if *count >= QUESTIONS_PER_POD {
            return None;
        }
        *count += 1;
        Some(Turn {
            served: self.clone(),
            from,
        })
    }

    async fn answer(&self, packet: &[u8], transport: Transport) -> Option<Vec<u8>> {
        let question = match Question::parse(packet) {
            Ok(question) => question,
            Err(Malformed::NotAQuestion) => return None,
            Err(Malformed::Unreadable) => return complaint(packet),
        };
        let local = match question.name.as_deref() {
            Some(name) if question.is_for_internet() => self.find(name, question.kind).await,
            _ => Some(Answer::NotOurs),
        };
        let failure = || question.answer(Code::ServerFailure, &[], transport);
        Some(match local {
            Some(Answer::Records(records)) => question.answer(Code::Fine, &records, transport),
            Some(Answer::NoSuchName) => question.answer(Code::NoSuchName, &[], transport),
            Some(Answer::NotOurs) => self
                .forward(packet, &question, transport)
                .await
                .unwrap_or_else(failure),
            None => failure(),
        })
    }

    /// Forwards a query to the machine's resolvers, one after the other.
    async fn forward(
        &self,
        packet: &[u8],
        question: &Question,
        transport: Transport,
    ) -> Option<Vec<u8>> {
        for upstream in &self.upstreams {
            let asked = async {
                match transport {
                    Transport::Udp => ask_by_datagram(*upstream, packet, question.id).await,
                    Transport::Tcp => ask_by_stream(*upstream, packet).await,
                }
            };
            if let Ok(Ok(answer)) = timeout(UPSTREAM, asked).await {
                return Some(answer);
            }
        }
        None
    }
}

/// A query in progress.
struct Turn {
    served: Arc<Served>,
    from: IpAddr,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut under_way = self
            .served
            .under_way
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = under_way.get_mut(&self.from) {
            *count -= 1;
            if *count == 0 {
                under_way.remove(&self.from);
            }
        }
    }
}

async fn ask_by_datagram(upstream: SocketAddr, packet: &[u8], id: u16) -> std::io::Result<Vec<u8>> {
    let any: IpAddr = match upstream {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(upstream).await?;
    socket.send(packet).await?;
    let mut buffer = vec![0; LARGEST_UDP];
    loop {
        let count = socket.recv(&mut buffer).await?;
        if buffer[..count].starts_with(&id.to_be_bytes()) {
            buffer.truncate(count);
            return Ok(buffer);
        }
    }
}

async fn ask_by_stream(upstream: SocketAddr, packet: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(upstream).await?;
    write_message(&mut stream, packet).await?;
    read_message(&mut stream).await
}

async fn read_message(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut message = vec![0; usize::from(length)];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

async fn write_message(stream: &mut TcpStream, message: &[u8]) -> std::io::Result<()> {
    let length = u16::try_from(message.len()).map_err(std::io::Error::other)?;
    let mut framed = length.to_be_bytes().to_vec();
    framed.extend(message);
    stream.write_all(&framed).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const NAME: &str = "s.n.svc.cluster.local";
    const ADDRESSES: u16 = 1;

    fn served() -> Served {
        Served::new("cluster.local".to_owned(), Vec::new())
    }

    fn all_pods_are_listed(served: &Served) {
        let none = Ok(Event::InitDone);
        served.learn(|known| take(&mut known.pods, none, |pod: Pod| pod_addresses(&pod)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_query_waits_until_all_names_were_listed() {
        let served = served();
        let mut asked = std::pin::pin!(served.find(NAME, ADDRESSES));
        assert_eq!(futures::poll!(&mut asked), std::task::Poll::Pending);
        let foreign = served.find("example.org", ADDRESSES).await;
        assert_eq!(foreign, Some(Answer::NotOurs), "waits for nothing");

        let service: Service = serde_json::from_value(
            json!({"metadata": {"name": "s", "namespace": "n", "uid": "1"}}),
        )
        .unwrap();
        for event in [Event::InitApply(service), Event::InitDone] {
            served.learn(|known| take(&mut known.services, Ok(event), |service| service));
        }
        assert_eq!(futures::poll!(&mut asked), std::task::Poll::Pending);
        // A user without access to endpoint slices counts as having listed none.
        let slices = |failure| {
            served.learn(|known| {
                take(&mut known.slices, Err(failure), |slice: EndpointSlice| {
                    slice
                })
            });
        };
        slices(Failure::NotServed);
        all_pods_are_listed(&served);
        assert_eq!(futures::poll!(&mut asked), std::task::Poll::Pending);
        slices(Failure::Forbidden {
            message: "forbidden".to_owned(),
        });
        assert_eq!(asked.await, Some(Answer::Records(Vec::new())));
        assert_eq!(
            served.find("none.n.svc.cluster.local", ADDRESSES).await,
            Some(Answer::NoSuchName)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_gets_no_negative_response_before_all_names_were_listed() {
        let served = served();
        all_pods_are_listed(&served);
        assert_eq!(served.find(NAME, ADDRESSES).await, None);
    }

    #[test]
    fn the_machines_resolvers_are_parsed_from_resolv_conf() {
        let file = "# x\nnameserver 127.0.0.53\n nameserver 2001:db8::1\nsearch lan\nnameserver nonsense\n";
        let expected: Vec<SocketAddr> = vec![
            "127.0.0.53:53".parse().unwrap(),
            "[2001:db8::1]:53".parse().unwrap(),
        ];
        assert_eq!(upstreams(file), expected);
    }
}

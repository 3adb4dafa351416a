//! A network for a test: the test's machine, and an internet beside it.
//!
//! The test runs in its own network namespace, so that it does not affect the machine it runs on and leaves nothing there. The internet
//! is a second namespace.

use std::future::Future;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};

use futures::TryStreamExt;
use rtnetlink::{Handle, LinkUnspec, LinkVeth, RouteMessageBuilder, new_connection};

/// Public addresses of the internet.
pub const PUBLIC: [&str; 3] = ["203.0.113.1", "198.51.100.7", "2001:db8::1"];
/// Private addresses that are in use outside.
pub const PRIVATE: [&str; 6] = [
    "10.99.0.1",
    "172.16.5.5",
    "192.168.7.7",
    "169.254.169.254",
    "fd77::7",
    "100.64.3.3",
];
const MACHINE: [(&str, u8); 2] = [("203.0.113.254", 24), ("2001:db8::fe", 64)];
pub const PORT: u16 = 80;

fn leave_for_own_network() {
    #[expect(
        deprecated,
        reason = "what makes it unsound is a flag that is not used here"
    )]
    rustix::thread::unshare(rustix::thread::UnshareFlags::NEWNET)
        .expect("these tests make network namespaces and need to run as root");
}

/// Runs a test in its own network namespace.
pub fn on_own_network<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send + 'static) {
    let thread = std::thread::spawn(move || {
        leave_for_own_network();
        // Threads are in the namespace of the thread that starts them, so the whole runtime is in this one.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(test());
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// What a host on the internet received: the sender and the data.
pub type Received = Arc<Mutex<Vec<(SocketAddr, String)>>>;

pub struct Internet {
    /// Datagrams to port 80.
    pub received: Received,
    run: mpsc::Sender<Box<dyn FnOnce() + Send>>,
}

async fn index(handle: &Handle, name: &str) -> u32 {
    let mut found = handle.link().get().match_name(name.to_owned()).execute();
    found.try_next().await.unwrap().unwrap().header.index
}

async fn up(handle: &Handle, link: u32) {
    let message = LinkUnspec::new_with_index(link).up().build();
    handle.link().set(message).execute().await.unwrap();
}

async fn address(handle: &Handle, link: u32, address: &str, length: u8) {
    use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags};
    let address: IpAddr = address.parse().unwrap();
    let mut add = handle.address().add(link, address, length);
    if address.is_ipv6() {
        add.message_mut()
            .attributes
            .push(AddressAttribute::Flags(AddressFlags::Nodad));
    }
    add.execute().await.unwrap();
}

pub async fn route(handle: &Handle, to: Option<(&str, u8)>, gateway: &str) {
    let everywhere = if gateway.contains(':') {
        "::"
    } else {
        "0.0.0.0"
    };
    let (to, length) = to.unwrap_or((everywhere, 0));
    let message = RouteMessageBuilder::<IpAddr>::new()
        .destination_prefix(to.parse().unwrap(), length)
        .unwrap()
        .gateway(gateway.parse().unwrap())
        .unwrap()
        .build();
    handle.route().add(message).execute().await.unwrap();
}

/// A new network namespace has a loopback interface that is down.
pub async fn bring_up_loopback() {
    let (connection, handle, _) = new_connection().unwrap();
    tokio::spawn(connection);
    up(&handle, index(&handle, "lo").await).await;
}

/// Runs netlink requests in the namespace of the calling thread.
pub fn configure<F: Future<Output = ()>>(work: impl FnOnce(Handle) -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let (connection, handle, _) = new_connection().unwrap();
        tokio::spawn(connection);
        work(handle).await;
    });
}

/// Removes a node's links from the calling thread's namespace.
pub fn remove_links(holder: &str, prefix: &str) {
    use rtnetlink::packet_route::link::LinkAttribute;
    configure(|handle| async move {
        let mut links = handle.link().get().execute();
        let mut found = Vec::new();
        while let Ok(Some(link)) = links.try_next().await {
            let named = |attribute: &LinkAttribute| match attribute {
                LinkAttribute::IfName(name) => name == holder || name.starts_with(prefix),
                _ => false,
            };
            if link.attributes.iter().any(named) {
                found.push(link.header.index);
            }
        }
        for index in found {
            let _ = handle.link().del(index).execute().await;
        }
    });
}

/// Adds an address to an interface of the calling thread's namespace.
pub fn take_address(interface: &'static str, own: &'static str) {
    configure(|handle| async move {
        let link = index(&handle, interface).await;
        let length = if own.contains(':') { 128 } else { 32 };
        address(&handle, link, own, length).await;
    });
}

/// Runs work on a thread in the network namespace pinned at `pin`.
pub fn inside<T: Send + 'static>(
    pin: &std::path::Path,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let namespace = std::fs::File::open(pin).unwrap();
    let thread = std::thread::spawn(move || {
        rustix::thread::move_into_link_name_space(
            std::os::fd::AsFd::as_fd(&namespace),
            Some(rustix::thread::LinkNameSpaceType::Network),
        )
        .unwrap();
        work()
    });
    thread.join().unwrap()
}

/// Responds to every connection with the client's address.
pub fn serve(port: u16, received: &Received) {
    // One socket serves both families.
    let any: IpAddr = "::".parse().unwrap();
    let listener = TcpListener::bind((any, port)).unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            use std::io::Write;
            let peer = stream.peer_addr().map(|peer| peer.ip().to_string());
            let _ = writeln!(stream, "{}", peer.unwrap_or_default());
        }
    });
    let socket = UdpSocket::bind((any, port)).unwrap();
    let received = received.clone();
    std::thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((count, from)) = socket.recv_from(&mut buffer) {
            let text = String::from_utf8_lossy(&buffer[..count]).into_owned();
            received.lock().unwrap().push((from, text));
            let _ = socket.send_to(b"answer\n", from);
        }
    });
}

impl Internet {
    /// Creates an internet beside the machine whose namespace this thread is in. `pods` are ranges that it has routes to.
    pub async fn beside_machine() -> Self {
        let (run, work) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let (send_namespace, namespace) = tokio::sync::oneshot::channel::<OwnedFd>();
        std::thread::spawn(move || {
            leave_for_own_network();
            let own = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
            send_namespace.send(own.into()).unwrap();
            for work in work {
                work();
            }
        });
        let namespace = namespace.await.unwrap();
        let (connection, handle, _) = new_connection().unwrap();
        tokio::spawn(connection);
        up(&handle, index(&handle, "lo").await).await;
        let pair = LinkVeth::new("wan", "far").build();
        handle.link().add(pair).execute().await.unwrap();
        let (near, far) = (index(&handle, "wan").await, index(&handle, "far").await);
        let give = LinkUnspec::new_with_index(far).setns_by_fd(namespace.as_raw_fd());
        handle.link().set(give.build()).execute().await.unwrap();
        for (own, length) in MACHINE {
            address(&handle, near, own, length).await;
        }
        up(&handle, near).await;
        let received = Received::default();
        let internet = Self {
            received: received.clone(),
            run,
        };
        internet.run(move || {
            configure(|handle| async move {
                let (lo, far) = (index(&handle, "lo").await, index(&handle, "far").await);
                up(&handle, lo).await;
                address(&handle, far, PUBLIC[0], 24).await;
                address(&handle, far, PUBLIC[2], 64).await;
                up(&handle, far).await;
                let others = PRIVATE.into_iter().chain([PUBLIC[1]]);
                for other in others {
                    let length = if other.contains(':') { 128 } else { 32 };
                    address(&handle, lo, other, length).await;
                }
            });
            serve(PORT, &received);
        });
        for gateway in [PUBLIC[0], PUBLIC[2]] {
            route(&handle, None, gateway).await;
        }
        internet
    }

    /// Runs work on the internet's side.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (send, receive) = mpsc::channel();
        self.run
            .send(Box::new(move || {
                let _ = send.send(work());
            }))
            .unwrap();
        receive.recv().unwrap()
    }

    /// Lets the internet reach pods' addresses by way of the machine.
    pub fn route_to_pods(&self, ranges: Vec<(String, u8)>) {
        self.run(move || {
            configure(|handle| async move {
                for (range, length) in &ranges {
                    let machine = usize::from(range.contains(':'));
                    route(&handle, Some((range, *length)), MACHINE[machine].0).await;
                }
            });
        });
    }
}

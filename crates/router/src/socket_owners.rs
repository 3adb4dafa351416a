//! Finds the local user at the other end of a TCP connection, by asking the kernel through `sock_diag` (netlink).
//!
//! TCP has no `SO_PEERCRED`. But a client on the same machine has a socket with the same two addresses in reverse
//! order, and the kernel knows its owner. A client on another machine, or in another network namespace, has no such socket here.
//! See `sock_diag(7)`.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

const NETLINK_HEADER: usize = 16;
/// `struct inet_diag_req_v2` and `struct inet_diag_msg` both have the two addresses at or near their end.
const REQUEST: usize = NETLINK_HEADER + 56;
const ANSWER: usize = NETLINK_HEADER + 72;
/// Where `struct inet_diag_sockid` begins in each, and the length of the part that identifies a socket: two ports and two addresses.
const ID_IN_REQUEST: usize = NETLINK_HEADER + 8;
const ID_IN_ANSWER: usize = NETLINK_HEADER + 4;
const ID: usize = 36;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const IPPROTO_TCP: u8 = 6;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// States of a TCP socket that a process holds: established, or closed on one side only.
const HELD: [u8; 4] = [
    1, // TCP_ESTABLISHED
    4, // TCP_FIN_WAIT1
    5, // TCP_FIN_WAIT2
    8, // TCP_CLOSE_WAIT
];

/// Looks up sockets of one network namespace: that in which its netlink socket was opened.
#[derive(Debug)]
pub struct SocketOwners {
    netlink: Mutex<OwnedFd>,
}

impl SocketOwners {
    /// For the network namespace of the calling thread.
    pub fn of_this_network() -> io::Result<Self> {
        Self::over(open()?)
    }

    /// For the network namespace and the user namespace in which this socket of [`open`] was opened.
    pub fn over(netlink: OwnedFd) -> io::Result<Self> {
        // A connected netlink socket receives messages of the kernel only.
        rustix::net::connect(&netlink, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self {
            netlink: Mutex::new(netlink),
        })
    }

    /// The UID of the socket with `local` as its own address and `remote` as its peer's. `None` if no process in this network
    /// namespace holds such a socket.
    pub fn owner(&self, local: SocketAddr, remote: SocketAddr) -> io::Result<Option<u32>> {
        let Some(request) = request(local, remote) else {
            return Ok(None);
        };
        let mut answer = [0; 512];
        let netlink = self.netlink.lock().unwrap_or_else(PoisonError::into_inner);
        rustix::net::send(&*netlink, &request, SendFlags::empty())?;
        // The kernel responds within the send call, so there is nothing to wait for.
        let (_, length) = rustix::net::recv(&*netlink, &mut answer, RecvFlags::DONTWAIT)?;
        Ok(owner_in(&answer[..length.min(answer.len())], &request))
    }
}

/// Opens a socket for [`SocketOwners::over`].
pub fn open() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        Some(netlink::SOCK_DIAG),
    )?)
}

/// The query for one socket. `None` if the addresses are of two families.
fn request(local: SocketAddr, remote: SocketAddr) -> Option<[u8; REQUEST]> {
    // A dual-stack listener reports IPv4 clients with mapped addresses.
    let (local_ip, remote_ip) = (local.ip().to_canonical(), remote.ip().to_canonical());
    let family = match (local_ip, remote_ip) {
        (IpAddr::V4(_), IpAddr::V4(_)) => AF_INET,
        (IpAddr::V6(_), IpAddr::V6(_)) => AF_INET6,
        _ => return None,
    };
    let mut request = [0; REQUEST];
    let mut put = |at: usize, bytes: &[u8]| request[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &u32::try_from(REQUEST).ok()?.to_ne_bytes());
    put(4, &SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    put(6, &NLM_F_REQUEST.to_ne_bytes());
    put(NETLINK_HEADER, &[family, IPPROTO_TCP]);
    // Query all states; the response decides which count.
    put(NETLINK_HEADER + 4, &u32::MAX.to_ne_bytes());
    put(ID_IN_REQUEST, &local.port().to_be_bytes());
    put(ID_IN_REQUEST + 2, &remote.port().to_be_bytes());
    put(ID_IN_REQUEST + 4, &octets(local_ip));
    put(ID_IN_REQUEST + 20, &octets(remote_ip));
    // Any socket: INET_DIAG_NOCOOKIE.
    put(ID_IN_REQUEST + 40, &[0xff; 8]);
    Some(request)
}

/// An address in 16 bytes, as the kernel encodes it.
fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V6(address) => address.octets(),
        IpAddr::V4(address) => {
            let mut octets = [0; 16];
            octets[..4].copy_from_slice(&address.octets());
            octets
        }
    }
}

/// The UID in the kernel's response. The kernel reports UID 0 for sockets that no process holds any more (closed ones that still
/// send, and `TIME_WAIT`), and returns a listener if no connection matches. Neither may count as root's.
fn owner_in(answer: &[u8], request: &[u8; REQUEST]) -> Option<u32> {
    let number = |at: usize| {
        let bytes = answer.get(at..at + 4)?;
        Some(u32::from_ne_bytes(bytes.try_into().ok()?))
    };
    let kind = answer.get(4..6)?;
    if answer.len() < ANSWER || kind != SOCK_DIAG_BY_FAMILY.to_ne_bytes() {
        return None;
    }
    let is_the_one =
        answer[ID_IN_ANSWER..ID_IN_ANSWER + ID] == request[ID_IN_REQUEST..ID_IN_REQUEST + ID];
    let (state, uid, inode) = (
        answer[NETLINK_HEADER + 1],
        number(NETLINK_HEADER + 64)?,
        number(NETLINK_HEADER + 68)?,
    );
    (is_the_one && HELD.contains(&state) && inode != 0).then_some(uid)
}

/// The client of one connection. The kernel is asked at most once, on first use.
#[derive(Debug)]
pub struct Client {
    owners: Arc<SocketOwners>,
    /// The connection's address on the router's side.
    local: SocketAddr,
    remote: SocketAddr,
    owner: OnceLock<Option<u32>>,
}

impl Client {
    pub fn new(owners: Arc<SocketOwners>, local: SocketAddr, remote: SocketAddr) -> Self {
        Self {
            owners,
            local,
            remote,
            owner: OnceLock::new(),
        }
    }

    /// The local user whose process has connected; `None` for a client elsewhere, and if the kernel does not answer.
    pub fn user(&self) -> Option<u32> {
        *self.owner.get_or_init(|| {
            // The client's own address is the router's remote address.
            self.owners
                .owner(self.remote, self.local)
                .unwrap_or_else(|error| {
                    tracing::warn!(%error, "the kernel does not report the owner of a connection; the client needs a token");
                    None
                })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn asked() -> [u8; REQUEST] {
        request(
            "127.0.0.1:40000".parse().unwrap(),
            "127.0.0.1:8080".parse().unwrap(),
        )
        .unwrap()
    }

    /// The kernel's response for the socket that was queried.
    fn answer(state: u8, uid: u32, inode: u32) -> Vec<u8> {
        let mut answer = vec![0; ANSWER];
        answer[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        answer[NETLINK_HEADER] = AF_INET;
        answer[NETLINK_HEADER + 1] = state;
        answer[ID_IN_ANSWER..ID_IN_ANSWER + ID]
            .copy_from_slice(&asked()[ID_IN_REQUEST..ID_IN_REQUEST + ID]);
        answer[NETLINK_HEADER + 64..NETLINK_HEADER + 68].copy_from_slice(&uid.to_ne_bytes());
        answer[NETLINK_HEADER + 68..NETLINK_HEADER + 72].copy_from_slice(&inode.to_ne_bytes());
        answer
    }

    #[test]
    fn a_socket_without_a_process_does_not_count_as_roots() {
        let (established, fin_wait1, time_wait, listening) = (1, 4, 6, 10);
        for (state, uid, inode, owner) in [
            (established, 0, 77, Some(0)),
            (established, 1000, 77, Some(1000)),
            (fin_wait1, 1000, 77, Some(1000)),
            (established, 0, 0, None),
            (fin_wait1, 0, 0, None),
            (time_wait, 0, 0, None),
            (listening, 0, 77, None),
        ] {
            let answer = answer(state, uid, inode);
            assert_eq!(owner_in(&answer, &asked()), owner, "{state} {uid} {inode}");
            assert_eq!(owner_in(&answer[..ANSWER - 1], &asked()), None);
        }
        let mut of_another = answer(established, 0, 77);
        of_another[ID_IN_ANSWER] ^= 1;
        assert_eq!(owner_in(&of_another, &asked()), None);
        let mut error = answer(established, 0, 77);
        error[4..6].copy_from_slice(&2_u16.to_ne_bytes());
        assert_eq!(owner_in(&error, &asked()), None);
    }

    #[test]
    fn the_kernel_reports_the_owner_of_a_connection() {
        let owners = SocketOwners::of_this_network().unwrap();
        let own = rustix::process::geteuid().as_raw();
        for address in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            let listener = TcpListener::bind(address).unwrap();
            let port = listener.local_addr().unwrap().port();
            let reached = if address == "[::1]:0" {
                "::1"
            } else {
                "127.0.0.1"
            };
            let client = TcpStream::connect((reached, port)).unwrap();
            let (stream, remote) = listener.accept().unwrap();
            let local = stream.local_addr().unwrap();
            assert_eq!(owners.owner(remote, local).unwrap(), Some(own), "{address}");
            let mut another = remote;
            another.set_port(remote.port() ^ 1);
            assert_eq!(owners.owner(another, local).unwrap(), None, "{address}");
            drop(client);
            assert_eq!(
                owners.owner(remote, local).unwrap(),
                None,
                "{address}: closed"
            );
        }
    }
}

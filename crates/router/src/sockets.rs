//! Socket options: TCP keep-alive and `TCP_NODELAY`.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::sockopt;

/// The idle time after which the kernel sends the first keep-alive probe.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
/// The interval between probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// The connection is closed after this many probes without an acknowledgement.
const KEEPALIVE_PROBES: u32 = 4;

/// Sends small writes at once, and detects vanished peers: tunnels and streams have no timeout that would end them. Options set
/// on a listener apply to every connection that it accepts.
pub fn tune(socket: impl AsFd) -> io::Result<()> {
    sockopt::set_tcp_nodelay(&socket, true)?;
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(&socket, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(&socket, KEEPALIVE_PROBES)?;
    Ok(())
}

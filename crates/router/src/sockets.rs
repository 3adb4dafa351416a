//! How the kernel is to treat the router's sockets.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::sockopt;

/// A silent connection is asked for a sign of life after this time,
const SILENCE: Duration = Duration::from_secs(30);
/// then this often,
const ASK_EVERY: Duration = Duration::from_secs(15);
/// and is over when as many questions got no answer.
const UNANSWERED: u32 = 4;

/// Has small pieces sent at once, and a peer noticed that vanished without a word: tunnels and streams have no time limit that
/// would end them. Set on a listener, it holds for every connection that it accepts.
pub fn tune(socket: impl AsFd) -> io::Result<()> {
    sockopt::set_tcp_nodelay(&socket, true)?;
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, SILENCE)?;
    sockopt::set_tcp_keepintvl(&socket, ASK_EVERY)?;
    sockopt::set_tcp_keepcnt(&socket, UNANSWERED)?;
    Ok(())
}

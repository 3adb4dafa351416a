//! Opens connections and configures links inside a pod's network namespace.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::thread::LinkNameSpaceType;

use super::links::NetworkError;

pub(super) fn open_namespace(pin: &Path) -> Result<OwnedFd, NetworkError> {
    rustix::fs::open(pin, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(|source| {
        NetworkError::Enter {
            path: pin.display().to_string(),
            source: source.into(),
        }
    })
}

/// Runs `work` inside a network namespace, on its own thread. The thread exits after the work, so that no other code runs in that
/// namespace.
pub(super) async fn in_namespace<T: Send + 'static>(
    namespace: OwnedFd,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NetworkError> {
    let (send, receive) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let entered = rustix::thread::move_into_link_name_space(
            namespace.as_fd(),
            Some(LinkNameSpaceType::Network),
        )
        .map_err(|source| NetworkError::Enter {
            path: "of a pod".to_owned(),
            source: source.into(),
        });
        let _ = send.send(entered.map(|()| work()));
    });
    receive.await.map_err(|_| NetworkError::ThreadDied)?
}

/// Opens a TCP connection from inside a pod's network namespace.
pub async fn connect_inside(
    pin: &Path,
    port: u16,
) -> Result<std::io::Result<std::net::TcpStream>, NetworkError> {
    let namespace = open_namespace(pin)?;
    in_namespace(namespace, move || {
        let timeout = std::time::Duration::from_secs(10);
        std::net::TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, port).into(), timeout)
    })
    .await
}

/// Opens a TCP connection from inside a pod's network namespace to any address. A socket stays in the namespace in which it was
/// created, so only its creation needs a thread there.
pub async fn connect_from(
    pin: &Path,
    target: SocketAddr,
) -> Result<std::io::Result<tokio::net::TcpStream>, NetworkError> {
    let namespace = open_namespace(pin)?;
    let made = in_namespace(namespace, move || {
        let family = match target {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socket_with(family, SocketType::STREAM, flags, None)
    })
    .await?;
    let socket = match made {
        Ok(socket) => std::net::TcpStream::from(socket),
        Err(error) => return Ok(Err(error.into())),
    };
    Ok(tokio::net::TcpSocket::from_std_stream(socket)
        .connect(target)
        .await)
}

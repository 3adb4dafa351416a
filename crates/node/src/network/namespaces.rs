//! Work that has to be done inside a pod's network namespace, from outside of the pod.

use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
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

/// Runs `work` on a thread of its own inside a network namespace. The thread ends with the work, so no other code ever
/// runs in the wrong namespace.
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

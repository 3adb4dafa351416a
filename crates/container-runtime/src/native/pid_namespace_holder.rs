//! Shared PID namespaces (`shareProcessNamespace`): an extra container, like Kubernetes' pause container, is PID 1 of the pod and
//! holds the namespace.
//!
//! It has no command and no files. Only the runtime knows of it: it does not appear in the pod's status.

use std::path::PathBuf;

use futures::FutureExt;
use futures::future::BoxFuture;

use super::launching::start_ticks;
use super::{ContainerId, NativeRuntime};
use crate::cgroups::Limits;
use crate::privileges::Privileges;
use crate::{ContainerSpec, ImageSource, Runtime, RuntimeError, StartError};

/// The name of the container. It is not a valid container name, so no container of a pod has it.
pub(super) const PID_NAMESPACE_HOLDER: &str = ".processes";

/// The UID of the holder. No process of a container runs as it, so none can access the holder.
const HOLDER_UID: u32 = 65_535;

fn id_of(pod: &str) -> ContainerId {
    ContainerId {
        pod: pod.to_owned(),
        container: PID_NAMESPACE_HOLDER.to_owned(),
        attempt: 0,
    }
}

fn specification(id: ContainerId) -> ContainerSpec {
    let user = match Privileges::current() {
        Privileges::Root => Some(HOLDER_UID),
        Privileges::Rootless | Privileges::None => None,
    };
    ContainerSpec {
        user,
        group: user,
        read_only_root: true,
        limits: Limits {
            memory_bytes: Some(32 << 20),
            processes: Some(8),
            ..Limits::default()
        },
        ..ContainerSpec::plain(id, ImageSource::Nothing, Vec::new())
    }
}

fn namespace_of(pid: i32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/ns/pid"))
}

impl NativeRuntime {
    /// The PID namespace that a container joins. `None` if it gets its own.
    pub(super) async fn pid_namespace(
        &self,
        spec: &ContainerSpec,
        shared: bool,
    ) -> Result<Option<PathBuf>, StartError> {
        if spec.id.container == PID_NAMESPACE_HOLDER {
            return Ok(None);
        }
        if shared {
            return Ok(Some(self.shared_namespace(&spec.id.pod).await?));
        }
        let Some(beside) = &spec.beside else {
            return Ok(None);
        };
        let found = {
            let running = self
                .running
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            running
                .iter()
                .filter(|(id, _)| id.pod == spec.id.pod && id.container == *beside)
                .max_by_key(|(id, _)| id.attempt)
                .map(|(_, container)| container.record.pid)
        };
        let pid = found.ok_or_else(|| {
            StartError::Configuration(format!("target container {beside:?} is not running"))
        })?;
        Ok(Some(namespace_of(pid)))
    }

    /// The PID namespace that the pod's containers share; starts its holder if necessary. Boxed, because it is recursive: it starts
    /// a container, and starting a container calls it.
    fn shared_namespace<'a>(&'a self, pod: &'a str) -> BoxFuture<'a, Result<PathBuf, StartError>> {
        async move {
            let _alone = self.making_holder.lock().await;
            let id = id_of(pod);
            if let Some(known) = self.running(&id) {
                if start_ticks(known.record.pid) == Some(known.record.start_ticks) {
                    return Ok(namespace_of(known.record.pid));
                }
                // All processes of the namespace ended with its PID 1, so the next holder has a new namespace.
                self.wait(&id).await;
            }
            let _ = directory_tree::remove(&self.container_directory(&id));
            self.start(specification(id.clone())).await?;
            let made = self
                .running(&id)
                .ok_or(RuntimeError::NotRunning(id.container))?;
            Ok(namespace_of(made.record.pid))
        }
        .boxed()
    }

    /// Kills the holder of a pod's PID namespace, if there is one, and with it all processes of the namespace.
    pub(super) async fn end_pid_namespace_holder(&self, pod: &str) {
        let id = id_of(pod);
        if self.running(&id).is_some() {
            let _ = self.kill(&id).await;
            self.wait(&id).await;
        }
    }
}

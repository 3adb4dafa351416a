//! Finds the pod and the run of a container that a request refers to, and serves the request. The pod comes from the API server, the
//! runs of its containers from the runtime's files, which survive restarts of the node.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use api::decoding::Decoded;
use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use streaming::kubelet::{
    AttachRequest, Backend, Error, ExecRequest, LogRequest, LogStream, Since, Target, TargetPod,
};
use streaming::port_forward::Duplex;
use streaming::remote_command::Process;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::process::process;
use crate::pod_uid::PodUid;
use crate::runtime::agent::AgentError;
use crate::runtime::{ContainerId, Runtime, RuntimeError};
use api::errors::chain;
use container_runtime::logs::{self, LogOptions};

/// The limit of buffered pieces of a log for a slow client.
const LOG_PIECES: usize = 64;

pub struct PodBackend<R> {
    pub runtime: Arc<R>,
    pub client: Client,
    pub node_name: String,
    pub host_services: Vec<SocketAddr>,
    /// Ends requests that follow a log.
    pub shutdown: CancellationToken,
}

fn missing(pod: &TargetPod) -> Error {
    Error::NotFound(format!("pod \"{}\" not found", pod.name))
}

impl<R: Runtime> PodBackend<R> {
    async fn pod(&self, target: &TargetPod) -> Result<Pod, Error> {
        let pods = Api::<Pod>::namespaced(self.client.clone(), &target.namespace);
        let pod = pods
            .get_opt(&target.name)
            .await
            .map_err(|error| Error::Internal(chain(&error)))?
            .ok_or_else(|| missing(target))?;
        let here = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
        if here != Some(&self.node_name) || (target.uid.is_some() && pod.uid() != target.uid) {
            return Err(missing(target));
        }
        Ok(pod)
    }

    /// The last run of the container, and whether it still runs.
    async fn last_run(&self, target: &Target) -> Result<(ContainerId, bool), Error> {
        let pod = self.pod(&target.pod).await?;
        if api::labels::is_mirror(&pod) {
            return Err(Error::Invalid(no_container(&pod)));
        }
        let uid = PodUid::of(&pod.metadata).ok_or_else(|| missing(&target.pod))?;
        let id = uid.container(&target.container, 0);
        let attempt = last_attempt(&self.runtime.log_path(&id));
        let Some(attempt) = attempt else {
            return Err(not_started(&pod, &target.container));
        };
        let id = ContainerId { attempt, ..id };
        let runs = !self.runtime.has_ended(&id);
        Ok((id, runs))
    }

    async fn running(&self, target: &Target) -> Result<ContainerId, Error> {
        let (id, runs) = self.last_run(target).await?;
        if !runs {
            return Err(ended(&target.container));
        }
        if self.runtime.is_frozen(&id.pod) {
            return Err(frozen(&target.pod));
        }
        Ok(id)
    }

    /// Refuses a pod whose processes are frozen. The kernel would accept a connection that nothing answers.
    fn must_answer(&self, target: &TargetPod, pod: &Pod) -> Result<(), Error> {
        let uid = PodUid::of(&pod.metadata);
        if uid.is_some_and(|uid| self.runtime.is_frozen(uid.as_str())) {
            return Err(frozen(target));
        }
        Ok(())
    }

    async fn connect(&self, pod: &Pod, port: u16) -> std::io::Result<TcpStream> {
        if api::labels::is_mirror(pod) {
            let service = host_service(pod, port, &self.host_services)?;
            let mut stream = TcpStream::connect(service).await?;
            let header = api::proxy_header::encode(&pod.namespace().unwrap_or_default());
            stream.write_all(&header).await?;
            return Ok(stream);
        }
        let uid = PodUid::of(&pod.metadata).ok_or(std::io::ErrorKind::NotFound)?;
        let stream = self
            .runtime
            .connect_to_port(uid.as_str(), port)
            .await
            .map_err(std::io::Error::other)??;
        stream.set_nonblocking(true)?;
        TcpStream::from_std(stream)
    }
}

/// The number of a container's last run, by the logs beside `log`.
fn last_attempt(log: &Path) -> Option<u32> {
    let entries = std::fs::read_dir(log.parent()?).ok()?;
    entries
        .filter_map(|entry| {
            let name = entry.ok()?.file_name();
            name.to_str()?.strip_suffix(".log")?.parse().ok()
        })
        .max()
}

/// The reason why a container has no run yet, with a kubelet's message.
fn not_started(pod: &Pod, container: &str) -> Error {
    let status = pod.status.as_ref();
    let all = status.into_iter().flat_map(|status| {
        let lists = [
            &status.init_container_statuses,
            &status.container_statuses,
            &status.ephemeral_container_statuses,
        ];
        lists.into_iter().flatten().flatten()
    });
    let waiting = all
        .filter(|status| status.name == container)
        .find_map(|status| status.state.as_ref()?.waiting.as_ref()?.reason.clone());
    Error::Invalid(format!(
        "container \"{container}\" in pod \"{}\" is waiting to start: {}",
        pod.name_any(),
        waiting.unwrap_or_else(|| "ContainerCreating".to_owned())
    ))
}

/// The address that serves a mirror pod's port.
fn host_service(pod: &Pod, port: u16, allowed: &[SocketAddr]) -> std::io::Result<SocketAddr> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
    let named = ports.find(|candidate| candidate.container_port == i32::from(port));
    let service = named.and_then(|named| {
        let number = u16::try_from(named.host_port?).ok()?;
        let address = match named.host_ip.as_deref() {
            None | Some("") => IpAddr::V4(Ipv4Addr::LOCALHOST),
            Some(address) => address.parse().ok()?,
        };
        Some(SocketAddr::new(address, number))
    });
    service
        .filter(|service| allowed.contains(service))
        .ok_or_else(|| {
            let message = format!("the node has no service behind port {port} of this pod");
            std::io::Error::new(std::io::ErrorKind::ConnectionRefused, message)
        })
}

/// The error for logs and exec of a mirror pod, which represents a part of this process and has no container.
fn no_container(pod: &Pod) -> String {
    format!(
        "pod \"{}\" has no container: what it stands for runs inside the agent-sandbox process on node \"{}\"; its log is that process's \
         standard error, and commands cannot be run in it",
        pod.name_any(),
        pod.spec
            .iter()
            .find_map(|spec| spec.node_name.as_deref())
            .unwrap_or_default()
    )
}

fn ended(container: &str) -> Error {
    Error::NotFound(format!(
        "container not found (\"{container}\"): it has ended"
    ))
}

fn frozen(pod: &TargetPod) -> Error {
    Error::Invalid(format!(
        "pod \"{}\" is frozen because its sandbox is suspended; resume the sandbox first",
        pod.name
    ))
}

/// The error for a container whose agent cannot be reached: the agent has ended, and the container with it.
fn unreachable(id: &ContainerId, error: &RuntimeError) -> Error {
    match error {
        RuntimeError::Agent(AgentError::Connect(_) | AgentError::Stream(_) | AgentError::Gone) => {
            ended(&id.container)
        }
        other => Error::Internal(chain(other)),
    }
}

/// The options of a log request that arrives `now`.
fn log_options(request: &LogRequest, now: Timestamp) -> LogOptions {
    LogOptions {
        follow: request.follow,
        tail_lines: request
            .tail_lines
            .map(|lines| usize::try_from(lines).unwrap_or(usize::MAX)),
        since: request.since.map(|since| match since {
            Since::Seconds(seconds) => now
                .checked_sub(SignedDuration::from_secs(seconds))
                .unwrap_or(Timestamp::MIN),
            Since::Time(time) => time,
        }),
        timestamps: request.timestamps,
        limit_bytes: request.limit_bytes,
        stream: match request.stream {
            LogStream::All => None,
            LogStream::Stdout => Some("stdout"),
            LogStream::Stderr => Some("stderr"),
        },
    }
}

impl<R: Runtime> Backend for PodBackend<R> {
    async fn find(&self, target: &Target) -> Result<(), Error> {
        self.running(target).await.map(drop)
    }

    async fn find_pod(&self, pod: &TargetPod) -> Result<(), Error> {
        let found = self.pod(pod).await?;
        self.must_answer(pod, &found)?;
        let phase = found.status.and_then(|status| status.phase);
        match phase.as_deref() {
            Some("Running") => Ok(()),
            phase => Err(Error::Invalid(format!(
                "unable to forward port because pod is not running. Current status={}",
                phase.unwrap_or("Pending")
            ))),
        }
    }

    async fn exec(&self, request: ExecRequest) -> Result<Process, Error> {
        let id = self.running(&request.target).await?;
        let streams = request.streams;
        let environment = if streams.tty {
            vec![("TERM".to_owned(), "xterm".to_owned())]
        } else {
            Vec::new()
        };
        let exec = shim_protocol::ExecRequest {
            arguments: request.command,
            environment,
            terminal: streams.tty,
            stdin: streams.stdin,
            window: None,
        };
        let session = self
            .runtime
            .exec(&id, exec)
            .await
            .map_err(|error| unreachable(&id, &error))?;
        Ok(process(session, streams.stdin))
    }

    async fn attach(&self, request: AttachRequest) -> Result<Process, Error> {
        let id = self.running(&request.target).await?;
        let session = self
            .runtime
            .attach(&id, request.streams.stdin)
            .await
            .map_err(|error| unreachable(&id, &error))?;
        Ok(process(session, request.streams.stdin))
    }

    async fn port_forward(&self, pod: TargetPod, port: u16) -> Result<Box<dyn Duplex>, Error> {
        let target = pod;
        let pod = self.pod(&target).await?;
        self.must_answer(&target, &pod)?;
        let stream = self.connect(&pod, port).await;
        let stream = stream.map_err(|error| {
            Error::Internal(format!(
                "failed to connect to port {port}: {}",
                chain(&error)
            ))
        })?;
        // TCP_NODELAY: a keystroke must not wait for the next one (Nagle's algorithm).
        let _ = stream.set_nodelay(true);
        Ok(Box::new(stream))
    }

    async fn logs(
        &self,
        request: LogRequest,
    ) -> Result<BoxStream<'static, std::io::Result<Bytes>>, Error> {
        let (mut id, _) = self.last_run(&request.target).await?;
        if request.previous {
            id.attempt = id.attempt.wrapping_sub(1);
            if !self.runtime.log_path(&id).exists() {
                return Err(Error::Invalid(format!(
                    "previous terminated container \"{}\" in pod \"{}\" not found",
                    request.target.container, request.target.pod.name
                )));
            }
        }
        let options = log_options(&request, Timestamp::now());
        let (sender, receiver) = mpsc::channel(LOG_PIECES);
        let (runtime, shutdown) = (self.runtime.clone(), self.shutdown.clone());
        tokio::spawn(async move {
            let copied = shutdown
                .run_until_cancelled(logs::stream(&*runtime, &id, options, sender))
                .await;
            if let Some(Err(error)) = copied {
                tracing::warn!(container = id.container, error = %chain(&error), "a log cannot be read");
            }
        });
        let pieces = futures::stream::unfold(receiver, |mut receiver| async move {
            let piece: Vec<u8> = receiver.recv().await?;
            Some((Ok(Bytes::from(piece)), receiver))
        });
        Ok(pieces.boxed())
    }

    async fn pods(&self) -> Result<Vec<serde_json::Value>, Error> {
        let own = ListParams::default().fields(&format!("spec.nodeName={}", self.node_name));
        let pods = Api::<Decoded<Pod>>::all(self.client.clone())
            .list(&own)
            .await
            .map_err(|error| Error::Internal(chain(&error)))?;
        pods.items
            .iter()
            .map(|pod| {
                serde_json::to_value(pod).map_err(|error| Error::Internal(error.to_string()))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn mirror(port: &serde_json::Value) -> Pod {
        let container = json!({"name": "router", "ports": [port]});
        let pod = json!({"metadata": {"annotations": {api::labels::MIRROR: "router"}}, "spec": {"containers": [container]}});
        serde_json::from_value(pod).unwrap()
    }

    #[test]
    fn a_mirror_pod_reaches_only_the_services_the_node_was_told_of() {
        let allowed = ["127.0.0.1:41000".parse().unwrap()];
        let router = json!({"containerPort": 8080, "hostIP": "127.0.0.1", "hostPort": 41000});
        assert_eq!(
            host_service(&mirror(&router), 8080, &allowed).unwrap(),
            allowed[0]
        );
        let without_address = json!({"containerPort": 8080, "hostPort": 41000});
        assert!(host_service(&mirror(&without_address), 8080, &allowed).is_ok());
        for (port, asked) in [
            (json!({"containerPort": 8080, "hostPort": 22}), 8080),
            (json!({"containerPort": 8080}), 8080),
            (router, 22),
        ] {
            assert!(host_service(&mirror(&port), asked, &allowed).is_err());
        }
    }

    #[test]
    fn a_mirror_pod_says_where_its_log_is() {
        let pod = json!({"metadata": {"name": "sandbox-router"}, "spec": {"nodeName": "n", "containers": []}});
        let text = no_container(&serde_json::from_value(pod).unwrap());
        assert_eq!(
            text,
            "pod \"sandbox-router\" has no container: what it stands for runs inside the agent-sandbox process on node \"n\"; its log is \
             that process's standard error, and commands cannot be run in it"
        );
    }

    #[test]
    fn an_agent_that_does_not_answer_has_ended_with_its_container() {
        let id = ContainerId {
            pod: "u".to_owned(),
            container: "main".to_owned(),
            attempt: 0,
        };
        let refused = || std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        for error in [
            AgentError::Gone,
            AgentError::Connect(refused()),
            AgentError::Stream(refused()),
        ] {
            let text = unreachable(&id, &error.into()).to_string();
            assert_eq!(text, "container not found (\"main\"): it has ended");
        }
        let message = "starting \"x\": not found".to_owned();
        let refusal = AgentError::Refused { message, code: 127 };
        let text = unreachable(&id, &refusal.into()).to_string();
        assert_eq!(text, "starting \"x\": not found");
    }

    #[test]
    fn the_last_run_is_the_one_with_the_highest_number() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("0.log");
        assert_eq!(last_attempt(&log), None);
        for name in ["0.log", "9.log", "10.log", "10.log.1", "11"] {
            std::fs::write(directory.path().join(name), "").unwrap();
        }
        assert_eq!(last_attempt(&log), Some(10));
    }

    #[test]
    fn a_container_that_waits_says_why() {
        let waiting = json!({"name": "main", "state": {"waiting": {"reason": "ImagePullBackOff"}}, "image": "", "imageID": "", "ready": false, "restartCount": 0});
        let pod = json!({"metadata": {"name": "p"}, "status": {"containerStatuses": [waiting]}});
        let pod: Pod = serde_json::from_value(pod).unwrap();
        assert_eq!(
            not_started(&pod, "main").to_string(),
            "container \"main\" in pod \"p\" is waiting to start: ImagePullBackOff"
        );
    }
}

//! The streaming endpoints exec, attach and port-forward: each parses the request, finds the container, negotiates a protocol and
//! serves the upgraded connection in a task of its own.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use futures::FutureExt;
use futures::future::BoxFuture;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tracing::{Instrument, debug, info_span};

use super::Shared;
use super::backend::{AttachRequest, Backend, Error, ExecRequest, Target, TargetPod};
use super::query::Query;
use crate::port_forward::{self, Connect, Duplex};
use crate::remote_command::{self, Failure, Process, Streams};
use crate::upgrade::{Offer, Upgrade};

/// The named segments of the path. The UID is optional.
type Segments = Path<HashMap<String, String>>;

fn target_pod(segments: &mut HashMap<String, String>) -> TargetPod {
    TargetPod {
        namespace: segments.remove("namespace").unwrap_or_default(),
        name: segments.remove("pod").unwrap_or_default(),
        uid: segments.remove("uid"),
    }
}

fn target(mut segments: HashMap<String, String>) -> Target {
    Target {
        pod: target_pod(&mut segments),
        container: segments.remove("container").unwrap_or_default(),
    }
}

pub async fn exec<B: Backend>(
    State(kubelet): State<Shared<B>>,
    Path(segments): Segments,
    request: Request,
) -> Response {
    let query = Query::parse(request.uri().query());
    let target = target(segments);
    let streams = match query.streams() {
        Ok(streams) => streams,
        Err(error) => return error.into_response(),
    };
    let command = query.command();
    if command.is_empty() {
        return Error::Invalid("you must specify a command".into()).into_response();
    }
    if let Err(error) = kubelet.backend.find(&target).await {
        return error.into_response();
    }
    let backend = Arc::clone(&kubelet);
    let exec = ExecRequest {
        target,
        command,
        streams,
    };
    let start = async move { backend.backend.exec(exec).await };
    remote_command(&kubelet, request, streams, start.boxed())
}

pub async fn attach<B: Backend>(
    State(kubelet): State<Shared<B>>,
    Path(segments): Segments,
    request: Request,
) -> Response {
    let target = target(segments);
    let streams = match Query::parse(request.uri().query()).streams() {
        Ok(streams) => streams,
        Err(error) => return error.into_response(),
    };
    if let Err(error) = kubelet.backend.find(&target).await {
        return error.into_response();
    }
    let backend = Arc::clone(&kubelet);
    let start = async move {
        let request = AttachRequest { target, streams };
        let mut process = backend.backend.attach(request).await?;
        // Attach succeeds when the container ends, whatever its exit code.
        process.exit = process.exit.map(|exit| exit.map(|_code| 0)).boxed();
        Ok(process)
    };
    remote_command(&kubelet, request, streams, start.boxed())
}

fn remote_command<B: Backend>(
    kubelet: &Shared<B>,
    mut request: Request,
    streams: Streams,
    start: BoxFuture<'static, Result<Process, Error>>,
) -> Response {
    let (upgrade, upgraded) = match switch(&mut request, remote_command::OFFER) {
        Ok(switched) => switched,
        Err(refusal) => return *refusal,
    };
    let response = upgrade.response();
    let settings = kubelet.settings;
    let span = info_span!("remote command", path = request.uri().path());
    let session = async move {
        let Some(io) = connection(upgraded).await else {
            return;
        };
        let start = start.map(|started| started.map_err(|error| Failure(error.to_string())));
        match remote_command::serve(io, &upgrade, streams, start, settings).await {
            Ok(outcome) => debug!(?outcome, "ended"),
            Err(error) => debug!(error = &error as &dyn std::error::Error, "failed"),
        }
    };
    tokio::spawn(session.instrument(span));
    response
}

pub async fn port_forward<B: Backend>(
    State(kubelet): State<Shared<B>>,
    Path(mut segments): Segments,
    mut request: Request,
) -> Response {
    let pod = target_pod(&mut segments);
    if let Err(error) = kubelet.backend.find_pod(&pod).await {
        return error.into_response();
    }
    let (upgrade, upgraded) = match switch(&mut request, port_forward::OFFER) {
        Ok(switched) => switched,
        Err(refusal) => return *refusal,
    };
    let ports = if port_forward::ports_in_request(&upgrade) {
        match Query::parse(request.uri().query()).ports() {
            Ok(ports) => ports,
            Err(error) => return error.into_response(),
        }
    } else {
        Vec::new()
    };
    let response = upgrade.response();
    let settings = kubelet.settings;
    let span = info_span!("port forward", path = request.uri().path());
    let session = async move {
        if let Some(io) = connection(upgraded).await {
            let connect = PodPorts { kubelet, pod };
            port_forward::serve(io, &upgrade, &ports, connect, settings).await;
        }
    };
    tokio::spawn(session.instrument(span));
    response
}

/// Negotiates the protocol. hyper upgrades the connection after it has sent the response.
fn switch(request: &mut Request, offer: Offer) -> Result<(Upgrade, OnUpgrade), Box<Response>> {
    let upgrade =
        Upgrade::negotiate(request.headers(), offer).map_err(|error| Box::new(error.response()))?;
    Ok((upgrade, hyper::upgrade::on(request)))
}

async fn connection(upgraded: OnUpgrade) -> Option<TokioIo<Upgraded>> {
    match upgraded.await {
        Ok(upgraded) => Some(TokioIo::new(upgraded)),
        Err(error) => {
            debug!(
                error = &error as &dyn std::error::Error,
                "the client disconnected before the upgrade"
            );
            None
        }
    }
}

/// Connects to the ports of one pod.
struct PodPorts<B> {
    kubelet: Shared<B>,
    pod: TargetPod,
}

impl<B> Clone for PodPorts<B> {
    fn clone(&self) -> Self {
        Self {
            kubelet: Arc::clone(&self.kubelet),
            pod: self.pod.clone(),
        }
    }
}

impl<B: Backend> Connect for PodPorts<B> {
    fn connect(
        &self,
        port: u16,
    ) -> BoxFuture<'static, Result<Box<dyn Duplex>, port_forward::Failure>> {
        let Self { kubelet, pod } = self.clone();
        let connecting = async move { kubelet.backend.port_forward(pod, port).await };
        connecting
            .map(|connected| connected.map_err(|error| port_forward::Failure(error.to_string())))
            .boxed()
    }

    fn name(&self) -> &str {
        &self.pod.name
    }
}

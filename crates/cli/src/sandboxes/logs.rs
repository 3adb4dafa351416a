//! `agent-sandbox logs`: what a sandbox's container prints.

use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use api::{Sandbox, SandboxClaim};
use clap::Args;
use futures::{AsyncRead, AsyncReadExt};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::LogParams;

use super::{connect, explain, scoped};
use crate::connection::{self, Connected};
use crate::output::{parse_duration, print_bytes};

/// How much is read and printed at a time.
const PIECE: usize = 32 * 1024;

/// Print what a claim's sandbox has logged
#[derive(Debug, Args)]
pub struct LogsArguments {
    /// Go on with what comes, until Ctrl-C
    #[arg(short, long)]
    follow: bool,

    /// Container, where there are several
    #[arg(short, long)]
    container: Option<String>,

    /// Only the last lines
    #[arg(long, value_name = "LINES")]
    tail: Option<u32>,

    /// Only lines of this much time, such as 10m
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    since: Option<Duration>,

    /// With the time of each line
    #[arg(long)]
    timestamps: bool,

    /// Of the container before its last restart
    #[arg(short, long)]
    previous: bool,

    /// Name of the claim; or of a sandbox, as sandbox/NAME
    #[arg(value_name = "NAME")]
    name: String,

    #[command(flatten)]
    connection: connection::Arguments,
}

pub async fn logs(arguments: LogsArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    let pod = pod_of(&connected, &arguments.name).await?;
    let container = match &arguments.container {
        Some(container) => check_container(&pod, container)?,
        None => pod
            .spec
            .as_ref()
            .and_then(|spec| spec.containers.first().map(|first| first.name.clone())),
    };
    let parameters = LogParams {
        follow: arguments.follow,
        container,
        previous: arguments.previous,
        tail_lines: arguments.tail.map(i64::from),
        since_seconds: arguments
            .since
            .map(|since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX)),
        timestamps: arguments.timestamps,
        ..LogParams::default()
    };
    let pods = scoped::<Pod>(&connected.client, Some(&connected.namespace));
    let stream = pods.log_stream(&pod.name_any(), &parameters).await;
    let stream = stream.with_context(|| format!("cannot read the logs of {}", arguments.name))?;
    print_all(stream).await?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the log unchanged as it arrives: a container's output need not be text.
async fn print_all(stream: impl AsyncRead) -> anyhow::Result<()> {
    let mut stream = pin!(stream);
    let mut piece = vec![0; PIECE];
    loop {
        match stream
            .read(&mut piece)
            .await
            .context("the logs broke off")?
        {
            0 => return Ok(()),
            length => print_bytes(&piece[..length])?,
        }
    }
}

fn check_container(pod: &Pod, wanted: &str) -> anyhow::Result<Option<String>> {
    let spec = pod.spec.as_ref();
    let names: Vec<&str> = spec
        .into_iter()
        .flat_map(|spec| {
            spec.init_containers
                .iter()
                .flatten()
                .chain(&spec.containers)
        })
        .map(|container| container.name.as_str())
        .collect();
    if names.contains(&wanted) {
        return Ok(Some(wanted.to_owned()));
    }
    anyhow::bail!(
        "no container named {wanted}; containers here: {}",
        names.join(", ")
    )
}

/// The pod behind a claim, or behind a sandbox.
async fn pod_of(connected: &Connected, name: &str) -> anyhow::Result<Pod> {
    let (client, namespace) = (&connected.client, connected.namespace.as_str());
    let sandbox = if let Some(sandbox) = name.strip_prefix("sandbox/") {
        sandbox.to_owned()
    } else {
        let name = name.strip_prefix("claim/").unwrap_or(name);
        let claim: SandboxClaim = explain::get(client, namespace, name).await?;
        let bound = claim.status.and_then(|status| status.sandbox);
        bound
            .filter(|bound| !bound.name.is_empty())
            .with_context(|| {
                format!("{name} has no sandbox yet; `agent-sandbox get {name}` says why")
            })?
            .name
    };
    let object: Sandbox = explain::get(client, namespace, &sandbox).await?;
    let annotated = object.annotations().get(api::labels::POD_NAME).cloned();
    let pod = annotated.unwrap_or_else(|| sandbox.clone());
    let found = scoped::<Pod>(client, Some(namespace)).get_opt(&pod).await?;
    found.with_context(|| {
        if object.spec.suspension().is_requested() {
            format!("{name} is suspended and has no pod; `agent-sandbox resume` starts one")
        } else {
            format!("{name} has no pod yet; `agent-sandbox get {name}` says why")
        }
    })
}

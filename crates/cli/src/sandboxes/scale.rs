//! `agent-sandbox scale`: how many sandboxes a pool keeps warm.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use api::SandboxWarmPool;
use clap::Args;
use kube::api::{Patch, PatchParams};
use kube::runtime::wait::await_condition;
use serde_json::json;

use super::{connect, explain, scoped};
use crate::connection;
use crate::output::parse_duration;
use crate::terminal::Progress;

/// Set how many sandboxes a warm pool keeps ready
#[derive(Debug, Args)]
pub struct ScaleArguments {
    /// Unclaimed sandboxes to keep
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(0..))]
    replicas: u16,

    /// Wait until so many are ready
    #[arg(long)]
    wait: bool,

    /// How long to wait
    #[arg(long, value_name = "DURATION", default_value = "3m", value_parser = parse_duration)]
    timeout: Duration,

    /// Name of the warm pool
    #[arg(value_name = "POOL")]
    name: String,

    #[command(flatten)]
    connection: connection::Arguments,
}

pub async fn scale(arguments: ScaleArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    let name = arguments.name.trim_start_matches("pool/");
    let (client, namespace) = (&connected.client, connected.namespace.as_str());
    let before: SandboxWarmPool = explain::get(client, namespace, name).await?;
    let pools = scoped::<SandboxWarmPool>(client, Some(namespace));
    let patch = Patch::Merge(json!({"spec": {"replicas": arguments.replicas}}));
    pools
        .patch_scale(name, &PatchParams::default(), &patch)
        .await
        .with_context(|| format!("cannot scale pool {name}"))?;
    if arguments.wait {
        let progress = Progress::begin();
        progress.say(&format!(
            "waiting for {} ready sandboxes",
            arguments.replicas
        ));
        let wanted = i32::from(arguments.replicas);
        let full = |pool: Option<&SandboxWarmPool>| {
            let status = pool.and_then(|pool| pool.status.as_ref());
            status
                .is_some_and(|status| status.ready_replicas == wanted && status.replicas == wanted)
                || (wanted == 0 && pool.is_some_and(|pool| pool.status.is_none()))
        };
        let waiting = tokio::time::timeout(arguments.timeout, await_condition(pools, name, full));
        let outcome = waiting.await;
        progress.finish();
        outcome.with_context(|| {
            format!("pool {name} is not full yet; `agent-sandbox get pool/{name}` says why")
        })??;
    }
    println!(
        "{name}: {} to {} warm sandboxes",
        before.spec.desired_replicas(),
        arguments.replicas
    );
    Ok(ExitCode::SUCCESS)
}

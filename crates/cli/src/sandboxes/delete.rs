//! `agent-sandbox delete`: claims by name, or everything.

use std::collections::HashSet;
use std::pin::pin;
use std::process::ExitCode;

use anyhow::Context;
use api::{Sandbox, SandboxClaim, SandboxWarmPool, kruise};
use clap::Args;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams};
use kube::runtime::wait::{await_condition, conditions};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};

use super::{Known, connect, explain, scoped};
use crate::connection::{self, Connected};
use crate::output::{chain, counted};

/// Delete claims, and their sandboxes with them
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct DeleteArguments {
    /// Every claim, warm pool and sandbox of the namespace; templates stay
    #[arg(long, conflicts_with = "names")]
    all: bool,

    /// In all namespaces; goes with --all
    #[arg(short = 'A', long, requires = "all")]
    all_namespaces: bool,

    /// Wait until the sandboxes are gone
    #[arg(long)]
    wait: bool,

    /// A claim that does not exist is no error
    #[arg(long)]
    ignore_not_found: bool,

    /// Names of the claims
    #[arg(required_unless_present = "all", value_name = "NAME")]
    names: Vec<String>,

    #[command(flatten)]
    connection: connection::Arguments,
}

pub async fn delete(arguments: DeleteArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    if arguments.all {
        let namespace = (!arguments.all_namespaces).then_some(connected.namespace.as_str());
        let deleted = delete_everything(&connected.client, namespace, arguments.wait).await?;
        println!(
            "deleted {}, {} and {}",
            counted(deleted.claims, "claim"),
            counted(deleted.pools, "pool"),
            counted(deleted.sandboxes, "sandbox"),
        );
        return Ok(ExitCode::SUCCESS);
    }
    let mut code = ExitCode::SUCCESS;
    for name in &arguments.names {
        match delete_one(&connected, &arguments, name).await {
            Ok(()) => println!("{name} is deleted"),
            // What comes after it is to be deleted all the same.
            Err(error) => {
                eprintln!("error: {}", chain(&error));
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

async fn delete_one(
    connected: &Connected,
    arguments: &DeleteArguments,
    name: &str,
) -> anyhow::Result<()> {
    let claims: Api<SandboxClaim> = Api::namespaced(connected.client.clone(), &connected.namespace);
    // In the foreground the claim stays until its sandbox is gone, so that there is something to wait for.
    let parameters = if arguments.wait {
        DeleteParams::foreground()
    } else {
        DeleteParams::default()
    };
    let deleted = match claims.delete(name, &parameters).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {
            if arguments.ignore_not_found {
                return Ok(());
            }
            let missing =
                explain::missing::<SandboxClaim>(&connected.client, &connected.namespace, name);
            return Err(missing.await);
        }
        deleted => deleted.with_context(|| format!("cannot delete {name}"))?,
    };
    if arguments.wait
        && let Some(uid) = deleted.left().and_then(|claim| claim.uid())
    {
        await_condition(claims, name, conditions::is_deleted(&uid)).await?;
    }
    Ok(())
}

/// How many of each kind were deleted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Deleted {
    pub pools: usize,
    pub claims: usize,
    pub sandboxes: usize,
}

/// Deletes every pool, claim and sandbox, in the order in which nothing is made again.
pub async fn delete_everything(
    client: &Client,
    namespace: Option<&str>,
    wait: bool,
) -> anyhow::Result<Deleted> {
    let deleted = Deleted {
        pools: delete_all::<SandboxWarmPool>(client, namespace).await?
            + delete_all::<kruise::SandboxSet>(client, namespace).await?,
        claims: delete_all::<SandboxClaim>(client, namespace).await?
            + delete_all::<kruise::SandboxClaim>(client, namespace).await?,
        sandboxes: delete_all::<Sandbox>(client, namespace).await?,
    };
    if wait {
        await_no_pods(client, namespace).await?;
    }
    Ok(deleted)
}

/// Deletes one by one, because a collection can only be deleted within a namespace.
async fn delete_all<Kind: Known>(
    client: &Client,
    namespace: Option<&str>,
) -> anyhow::Result<usize> {
    let listed = scoped::<Kind>(client, namespace)
        .list_metadata(&ListParams::default())
        .await;
    let objects = match listed {
        // Not every cluster has every kind.
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(0),
        listed => listed?,
    };
    let count = objects.items.len();
    for object in objects {
        let namespace = object.namespace().unwrap_or_default();
        let deleted = Api::<Kind>::namespaced(client.clone(), &namespace)
            .delete(&object.name_any(), &DeleteParams::default())
            .await;
        match deleted {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            deleted => {
                deleted.with_context(|| {
                    format!("cannot delete {} {}", Kind::kind(&()), object.name_any())
                })?;
            }
        }
    }
    Ok(count)
}

/// Waits until no pod of a sandbox is left.
async fn await_no_pods(client: &Client, namespace: Option<&str>) -> anyhow::Result<()> {
    let of_sandboxes = watcher::Config::default().labels(api::labels::SANDBOX_NAME_HASH);
    let mut pods = HashSet::new();
    let mut listed = false;
    let mut events = pin!(watcher(scoped::<Pod>(client, namespace), of_sandboxes));
    while let Some(event) = events.next().await {
        match event? {
            watcher::Event::Init => pods.clear(),
            watcher::Event::InitApply(pod) | watcher::Event::Apply(pod) => {
                pods.insert(pod.uid());
            }
            watcher::Event::Delete(pod) => {
                pods.remove(&pod.uid());
            }
            watcher::Event::InitDone => listed = true,
        }
        if listed && pods.is_empty() {
            return Ok(());
        }
    }
    anyhow::bail!("the watch of pods ended")
}

//! `agent-sandbox delete`: claims by name, all of them, or everything.

use std::process::ExitCode;

use anyhow::Context;
use api::decoding::Decoded;
use api::{Sandbox, SandboxClaim, SandboxWarmPool, kruise};
use clap::Args;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, ListParams};
use kube::runtime::wait::{await_condition, conditions};
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use object_watch::Watched;

use super::{Known, connect, explain, scoped};
use crate::connection::{self, Connected};
use crate::output::{chain, counted};

/// Delete claims, and their sandboxes with them
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct DeleteArguments {
    /// Every claim of the namespace; warm pools stay, and so do sandboxes without a claim
    #[arg(long, conflicts_with = "names")]
    all: bool,

    /// Every warm pool and every other sandbox of the namespace as well; templates stay. Goes with --all
    #[arg(long, requires = "all")]
    pools: bool,

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
        if arguments.pools {
            let deleted = delete_everything(&connected.client, namespace, arguments.wait).await?;
            println!(
                "deleted {}, {} and {}",
                counted(deleted.claims, "claim"),
                counted(deleted.pools, "pool"),
                counted(deleted.sandboxes, "sandbox"),
            );
        } else {
            let claims = delete_claims(&connected.client, namespace, arguments.wait).await?;
            println!("deleted {}", counted(claims, "claim"));
        }
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
    let claims: Api<Decoded<SandboxClaim>> =
        Api::namespaced(connected.client.clone(), &connected.namespace);
    let deleted = match claims.delete(name, &propagation(arguments.wait)).await {
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

/// In the foreground an object stays until what it owns is gone, so that there is something to wait for.
fn propagation(wait: bool) -> DeleteParams {
    if wait {
        DeleteParams::foreground()
    } else {
        DeleteParams::default()
    }
}

/// Deletes every claim of both dialects, and says how many there were.
async fn delete_claims(
    client: &Client,
    namespace: Option<&str>,
    wait: bool,
) -> anyhow::Result<usize> {
    let claims = delete_all::<SandboxClaim>(client, namespace, &propagation(wait)).await?;
    let kruise = delete_all::<kruise::SandboxClaim>(client, namespace, &propagation(wait)).await?;
    if wait {
        await_deleted::<SandboxClaim>(client, &claims).await?;
        await_deleted::<kruise::SandboxClaim>(client, &kruise).await?;
    }
    Ok(claims.len() + kruise.len())
}

async fn await_deleted<Kind: Known>(client: &Client, deleted: &[ObjectMeta]) -> anyhow::Result<()> {
    for object in deleted {
        let (name, uid) = (object.name.as_deref(), object.uid.as_deref());
        let api: Api<Decoded<Kind>> = Api::namespaced(
            client.clone(),
            object.namespace.as_deref().unwrap_or_default(),
        );
        let is_deleted = conditions::is_deleted(uid.unwrap_or_default());
        await_condition(api, name.unwrap_or_default(), is_deleted).await?;
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
    let how = DeleteParams::default();
    let pools = delete_all::<SandboxWarmPool>(client, namespace, &how).await?;
    let sets = delete_all::<kruise::SandboxSet>(client, namespace, &how).await?;
    let claims = delete_claims(client, namespace, false).await?;
    let sandboxes = delete_all::<Sandbox>(client, namespace, &how).await?;
    let deleted = Deleted {
        pools: pools.len() + sets.len(),
        claims,
        sandboxes: sandboxes.len(),
    };
    if wait {
        await_no_pods(client, namespace).await?;
    }
    Ok(deleted)
}

/// Deletes one by one, because a collection can only be deleted within a namespace. Returns what there was.
async fn delete_all<Kind: Known>(
    client: &Client,
    namespace: Option<&str>,
    how: &DeleteParams,
) -> anyhow::Result<Vec<ObjectMeta>> {
    let listed = scoped::<Decoded<Kind>>(client, namespace)
        .list(&ListParams::default())
        .await;
    let objects = match listed {
        // Not every cluster has every kind.
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(Vec::new()),
        listed => listed?,
    };
    for object in &objects {
        let namespace = object.namespace().unwrap_or_default();
        let deleted = Api::<Decoded<Kind>>::namespaced(client.clone(), &namespace)
            .delete(&object.name_any(), how)
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
    Ok(objects.iter().map(|object| object.meta().clone()).collect())
}

/// Waits until no pod of a sandbox is left.
async fn await_no_pods(client: &Client, namespace: Option<&str>) -> anyhow::Result<()> {
    let of_sandboxes = watcher::Config::default().labels(api::labels::SANDBOX_NAME_HASH);
    let mut pods = Watched::default();
    let objects = scoped::<Decoded<Pod>>(client, namespace);
    let mut events = object_watch::watch_without_log(objects, of_sandboxes);
    while let Some(event) = events.next().await {
        let event = event.context("cannot watch pods")?;
        if pods.take(event, drop) && pods.complete && pods.objects.is_empty() {
            return Ok(());
        }
    }
    anyhow::bail!("the watch of pods ended")
}

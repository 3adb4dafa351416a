//! The commands on claims and sandboxes: claim, list, exec, suspend, resume, delete.

use std::collections::HashSet;
use std::fmt::Debug;
use std::pin::pin;
use std::process::ExitCode;

use anyhow::Context;
use api::conditions::ConditionType;
use api::{Sandbox, SandboxClaim, SandboxWarmPool, kruise};
use clap::Args;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ListParams};
use kube::core::NamespaceResourceScope;
use kube::runtime::wait::{await_condition, conditions};
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;

use crate::connection::{self, Connected};
use crate::output::{Format, Table};
use crate::terminal;

/// Claim a sandbox and print the claim's name once it is ready
#[derive(Debug, Args)]
pub struct ClaimArguments {
    #[command(flatten)]
    connection: connection::Arguments,

    /// Template to make the sandbox from, or to choose a warm one by [default: python-runtime-template]
    #[arg(long, conflicts_with = "pool")]
    template: Option<String>,

    /// Warm pool to take the sandbox from
    #[arg(long)]
    pool: Option<String>,

    /// Name of the claim [default: a new one]
    name: Option<String>,
}

/// List claims and the sandboxes that meet them
#[derive(Debug, Args)]
pub struct ListArguments {
    #[command(flatten)]
    connection: connection::Arguments,

    /// In all namespaces
    #[arg(short = 'A', long)]
    all_namespaces: bool,

    /// How to print
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// Run a command in a claimed sandbox
#[derive(Debug, Args)]
pub struct ExecArguments {
    #[command(flatten)]
    connection: connection::Arguments,

    /// Run the command on a terminal
    #[arg(short, long)]
    tty: bool,

    /// Pass standard input on; always done, accepted for those used to it
    #[arg(short, long)]
    interactive: bool,

    /// Name of the claim
    name: String,

    /// Command and arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    command: Vec<String>,
}

/// A claim to act on
#[derive(Debug, Args)]
pub struct OneArguments {
    #[command(flatten)]
    connection: connection::Arguments,

    /// Name of the claim
    name: String,
}

/// Delete claims, and their sandboxes with them
#[derive(Debug, Args)]
pub struct DeleteArguments {
    #[command(flatten)]
    connection: connection::Arguments,

    /// Every claim, warm pool and sandbox of the namespace
    #[arg(long, conflicts_with = "names")]
    all: bool,

    /// In all namespaces; goes with --all
    #[arg(short = 'A', long, requires = "all")]
    all_namespaces: bool,

    /// Wait until the sandboxes are gone
    #[arg(long)]
    wait: bool,

    /// Names of the claims
    #[arg(required_unless_present = "all", value_name = "NAME")]
    names: Vec<String>,
}

pub async fn claim(arguments: ClaimArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    let mut wanted = wanted(arguments.template.as_deref(), arguments.pool.as_deref());
    if let Some(name) = arguments.name {
        wanted = wanted.name(name);
    }
    let sandbox = connected.sandboxes()?.create(wanted).await?;
    println!("{}", sandbox.id());
    Ok(ExitCode::SUCCESS)
}

/// What to create for a template or a pool; the quickstart's template when neither is named.
pub fn wanted(template: Option<&str>, pool: Option<&str>) -> sdk::CreateOptions {
    match pool {
        Some(pool) => sdk::CreateOptions::from_pool(pool),
        None => {
            sdk::CreateOptions::from_template(template.unwrap_or(crate::up::QUICKSTART_TEMPLATE))
        }
    }
}

pub async fn exec(arguments: ExecArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    let sandbox = connected.sandboxes()?.attach(&arguments.name).await?;
    terminal::run(
        &sandbox,
        arguments.command,
        terminal::Mode::from_flag(arguments.tty),
    )
    .await
}

pub async fn suspend(arguments: OneArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    connected
        .sandboxes()?
        .attach(&arguments.name)
        .await?
        .suspend()
        .await?;
    println!("{} is suspended", arguments.name);
    Ok(ExitCode::SUCCESS)
}

pub async fn resume(arguments: OneArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    connected
        .sandboxes()?
        .attach(&arguments.name)
        .await?
        .resume()
        .await?;
    println!("{} is running", arguments.name);
    Ok(ExitCode::SUCCESS)
}

pub async fn list(arguments: ListArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    let namespace = (!arguments.all_namespaces).then_some(connected.namespace.as_str());
    let claims = scoped::<SandboxClaim>(&connected.client, namespace)
        .list(&ListParams::default())
        .await?
        .items;
    let now = Timestamp::now();
    arguments.output.print(&claims, || {
        let mut table = Table::new(&["NAMESPACE", "NAME", "READY", "REASON", "SANDBOX", "AGE"]);
        for claim in &claims {
            table.row(describe(claim, now));
        }
        table
    })?;
    Ok(ExitCode::SUCCESS)
}

fn describe(claim: &SandboxClaim, now: Timestamp) -> Vec<String> {
    let status = claim.status.clone().unwrap_or_default();
    let ready = api::conditions::find(&status.conditions, ConditionType::Ready);
    let age = claim
        .creation_timestamp()
        .map_or_else(String::new, |created| crate::output::age(created.0, now));
    vec![
        claim.namespace().unwrap_or_default(),
        claim.name_any(),
        ready.map_or_else(|| "Unknown".to_owned(), |ready| ready.status.clone()),
        ready.map_or_else(String::new, |ready| ready.reason.clone()),
        status
            .sandbox
            .map_or_else(String::new, |sandbox| sandbox.name),
        age,
    ]
}

pub async fn delete(arguments: DeleteArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    if arguments.all {
        let namespace = (!arguments.all_namespaces).then_some(connected.namespace.as_str());
        delete_everything(&connected.client, namespace, arguments.wait).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let claims: Api<SandboxClaim> = Api::namespaced(connected.client.clone(), &connected.namespace);
    // In the foreground the claim stays until its sandbox is gone, so that there is something to wait for.
    let parameters = if arguments.wait {
        DeleteParams::foreground()
    } else {
        DeleteParams::default()
    };
    for name in &arguments.names {
        let deleted = claims
            .delete(name, &parameters)
            .await
            .with_context(|| format!("cannot delete {name}"))?;
        if arguments.wait
            && let Some(uid) = deleted.left().and_then(|claim| claim.uid())
        {
            await_condition(claims.clone(), name, conditions::is_deleted(&uid)).await?;
        }
        println!("{name} is deleted");
    }
    Ok(ExitCode::SUCCESS)
}

/// Deletes every pool, claim and sandbox, in the order in which nothing is made again.
pub async fn delete_everything(
    client: &Client,
    namespace: Option<&str>,
    wait: bool,
) -> anyhow::Result<()> {
    delete_all::<SandboxWarmPool>(client, namespace).await?;
    delete_all::<kruise::SandboxSet>(client, namespace).await?;
    delete_all::<SandboxClaim>(client, namespace).await?;
    delete_all::<kruise::SandboxClaim>(client, namespace).await?;
    delete_all::<Sandbox>(client, namespace).await?;
    if wait {
        await_no_pods(client, namespace).await?;
    }
    Ok(())
}

fn scoped<Kind>(client: &Client, namespace: Option<&str>) -> Api<Kind>
where
    Kind: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// Deletes one by one, because a collection can only be deleted within a namespace.
async fn delete_all<Kind>(client: &Client, namespace: Option<&str>) -> anyhow::Result<()>
where
    Kind: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Debug,
{
    let listed = scoped::<Kind>(client, namespace)
        .list_metadata(&ListParams::default())
        .await;
    let objects = match listed {
        // Not every cluster has every kind.
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
        listed => listed?,
    };
    for object in objects {
        let namespace = object.namespace().unwrap_or_default();
        let deleted = Api::<Kind>::namespaced(client.clone(), &namespace)
            .delete(&object.name_any(), &DeleteParams::default())
            .await;
        match deleted {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            deleted => {
                deleted.with_context(|| format!("cannot delete {}", object.name_any()))?;
            }
        }
    }
    Ok(())
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

async fn connect(arguments: &connection::Arguments) -> anyhow::Result<Connected> {
    let connected = arguments.connect_or_explain().await?;
    connected.require_kinds().await?;
    Ok(connected)
}

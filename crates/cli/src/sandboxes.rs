//! The commands on claims and sandboxes: claim, list, exec, suspend, resume, delete.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use api::conditions::{self, ConditionType};
use api::{Sandbox, SandboxClaim};
use clap::Args;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ListParams};
use kube::{Api, ResourceExt};

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
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
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
    println!("{}", sandbox.claim_name());
    Ok(ExitCode::SUCCESS)
}

/// What to create for a template or a pool; the quickstart's template when neither is named.
pub fn wanted(template: Option<&str>, pool: Option<&str>) -> sdk::CreateOptions {
    match pool {
        Some(pool) => sdk::CreateOptions::from_pool(pool),
        None => sdk::CreateOptions::from_template(template.unwrap_or(crate::up::QUICKSTART_TEMPLATE)),
    }
}

pub async fn exec(arguments: ExecArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    let sandbox = connected.sandboxes()?.attach(&arguments.name).await?;
    terminal::run(&sandbox, arguments.command, terminal::Mode::from_flag(arguments.tty)).await
}

pub async fn suspend(arguments: OneArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    connected.sandboxes()?.attach(&arguments.name).await?.suspend().await?;
    println!("{} is suspended", arguments.name);
    Ok(ExitCode::SUCCESS)
}

pub async fn resume(arguments: OneArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    connected.sandboxes()?.attach(&arguments.name).await?.resume().await?;
    println!("{} is running", arguments.name);
    Ok(ExitCode::SUCCESS)
}

pub async fn list(arguments: ListArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    let claims: Api<SandboxClaim> = if arguments.all_namespaces {
        Api::all(connected.client.clone())
    } else {
        Api::namespaced(connected.client.clone(), &connected.namespace)
    };
    let claims = claims.list(&ListParams::default()).await?.items;
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
    let ready = conditions::find(&status.conditions, ConditionType::Ready);
    let age = claim
        .creation_timestamp()
        .map_or_else(String::new, |created| crate::output::age(created.0, now));
    vec![
        claim.namespace().unwrap_or_default(),
        claim.name_any(),
        ready.map_or_else(|| "Unknown".to_owned(), |ready| ready.status.clone()),
        ready.map_or_else(String::new, |ready| ready.reason.clone()),
        status.sandbox.map_or_else(String::new, |sandbox| sandbox.name),
        age,
    ]
}

pub async fn delete(arguments: DeleteArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    if arguments.all {
        let namespace = (!arguments.all_namespaces).then_some(connected.namespace.as_str());
        delete_everything(&connected.client, namespace).await?;
        if arguments.wait {
            await_no_pods(&connected.client, namespace).await?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let claims: Api<SandboxClaim> = Api::namespaced(connected.client.clone(), &connected.namespace);
    let parameters = if arguments.wait {
        DeleteParams::foreground()
    } else {
        DeleteParams::default()
    };
    for name in &arguments.names {
        claims
            .delete(name, &parameters)
            .await
            .with_context(|| format!("cannot delete {name}"))?;
        if arguments.wait {
            kube::runtime::wait::await_condition(claims.clone(), name, kube::runtime::wait::conditions::is_deleted(""))
                .await?;
        }
        println!("{name} is deleted");
    }
    Ok(ExitCode::SUCCESS)
}

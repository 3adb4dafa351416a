//! `agent-sandbox status`: an overview of the system.

use std::fmt::Write;
use std::process::ExitCode;

use anyhow::Context;
use api::decoding::{Decoded, Unreadable};
use clap::Args;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::ListParams;

use super::overview::{ObservedObjects, Overview};
use super::{Known, connect, scoped};
use crate::connection::{self, Connected};
use crate::output::{ObjectFormat, Table, counted, print_text};

/// Show what is running, warm and stuck, and why
#[derive(Debug, Args)]
pub struct StatusArguments {
    /// Only the namespace of the connection, instead of all
    #[arg(long)]
    this_namespace: bool,

    /// How to print [default: for people]
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    output: Option<ObjectFormat>,

    #[command(flatten)]
    connection: connection::Arguments,
}

pub async fn status(arguments: StatusArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    let namespace = arguments
        .this_namespace
        .then_some(connected.namespace.as_str());
    let observed = observe(&connected, namespace).await?;
    let overview = Overview::of(&observed, Timestamp::now());
    match arguments.output {
        Some(format) => format.print_text(&format.render(&overview)?)?,
        None => print_text(&render(&overview, &connected.described))?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn observe(
    connected: &Connected,
    namespace: Option<&str>,
) -> anyhow::Result<ObservedObjects> {
    let everything = ListParams::default();
    let of_sandboxes = ListParams::default().labels(api::labels::SANDBOX_NAME_HASH);
    let ((claims, a), (sandboxes, b), (pools, c), (pods, _)) = tokio::try_join!(
        all(connected, namespace, "claim", &everything),
        all(connected, namespace, "sandbox", &everything),
        all(connected, namespace, "pool", &everything),
        all::<Pod>(connected, namespace, "pod", &of_sandboxes),
    )?;
    // A user of sandboxes may lack the permission to list nodes: the overview is then shown without them.
    let nodes = Api::all(connected.client.clone()).list(&everything).await;
    let classes = Api::all(connected.client.clone()).list(&everything).await;
    Ok(ObservedObjects {
        runtime_classes: classes.map(|list| sorted(list.items).0).unwrap_or_default(),
        nodes: nodes.map(|list| sorted(list.items).0).unwrap_or_default(),
        unreadable: [("claim", a), ("sandbox", b), ("pool", c)]
            .into_iter()
            .flat_map(|(kind, left)| left.into_iter().map(move |left| (kind, left)))
            .collect(),
        claims,
        sandboxes,
        pools,
        pods,
    })
}

/// The objects that can be decoded, and the metadata of the others.
fn sorted<Kind>(objects: Vec<Decoded<Kind>>) -> (Vec<Kind>, Vec<Unreadable>) {
    let (mut readable, mut unreadable) = (Vec::with_capacity(objects.len()), Vec::new());
    for object in objects {
        match object {
            Decoded::Readable(object) => readable.push(object),
            Decoded::Unreadable(left) => unreadable.push(*left),
        }
    }
    (readable, unreadable)
}

async fn all<Kind: Known>(
    connected: &Connected,
    namespace: Option<&str>,
    what: &str,
    which: &ListParams,
) -> anyhow::Result<(Vec<Kind>, Vec<Unreadable>)> {
    let listed = scoped::<Decoded<Kind>>(&connected.client, namespace)
        .list(which)
        .await
        .with_context(|| format!("cannot list {}", counted(0, what).trim_start_matches("0 ")))?;
    Ok(sorted(listed.items))
}

fn render(overview: &Overview, described: &str) -> String {
    let mut text = format!("{described}\n\n");
    let (claims, sandboxes) = (&overview.claims, &overview.sandboxes);
    let _ = writeln!(
        text,
        "Sandboxes   {} running, {} warm, {} starting, {} suspended{}, {} ended",
        sandboxes.running,
        sandboxes.warm,
        sandboxes.starting,
        sandboxes.suspended,
        match sandboxes.frozen {
            0 => String::new(),
            frozen => format!(" ({frozen} frozen)"),
        },
        sandboxes.ended
    );
    let _ = writeln!(
        text,
        "Claims      {} ready, {} waiting",
        claims.ready, claims.waiting
    );
    let mut section = |table: Table| {
        if !table.is_empty() {
            let _ = write!(text, "\n{}", table.render());
        }
    };
    section(pools(overview));
    section(nodes(overview));
    section(runtime_handlers(overview));
    section(throttled(overview));
    section(stuck(overview));
    if overview.stuck.is_empty() {
        text.push_str("\nNothing is stuck.\n");
    }
    text
}

fn pools(overview: &Overview) -> Table {
    let mut table = Table::new(&["NAMESPACE", "POOL", "DESIRED", "READY", "TEMPLATE"]);
    for pool in &overview.pools {
        table.row(vec![
            pool.namespace.clone(),
            pool.name.clone(),
            pool.desired.to_string(),
            pool.ready.to_string(),
            pool.template.clone(),
        ]);
    }
    table
}

fn nodes(overview: &Overview) -> Table {
    let mut table = Table::new(&["NODE", "READY", "PROBLEMS"]);
    for node in &overview.nodes {
        let ready = if node.ready { "True" } else { "False" };
        let problems = if node.problems.is_empty() {
            "none".to_owned()
        } else {
            node.problems.join("; ")
        };
        table.row(vec![node.name.clone(), ready.to_owned(), problems]);
    }
    table
}

fn runtime_handlers(overview: &Overview) -> Table {
    let mut table = Table::new(&["RUNTIME HANDLER", "CLASSES", "NODE", "WORKS", "DETAIL"]);
    for handler in &overview.runtime_handlers {
        let works = if handler.works { "yes" } else { "no" };
        table.row(vec![
            handler.name.clone(),
            handler.classes.join(","),
            handler.node.clone(),
            works.to_owned(),
            handler.detail.clone(),
        ]);
    }
    table
}

fn throttled(overview: &Overview) -> Table {
    let mut table = Table::new(&["THROTTLED", "NAMESPACE", "WHY"]);
    for throttled in &overview.throttled {
        table.row(vec![
            format!("pod/{}", throttled.pod),
            throttled.namespace.clone(),
            throttled.why.clone(),
        ]);
    }
    table
}

fn stuck(overview: &Overview) -> Table {
    let mut table = Table::new(&["STUCK", "NAMESPACE", "AGE", "WHY"]);
    for stuck in &overview.stuck {
        table.row(vec![
            format!("{}/{}", stuck.kind, stuck.name),
            stuck.namespace.clone(),
            stuck.age.clone(),
            stuck.why.clone(),
        ]);
    }
    table
}

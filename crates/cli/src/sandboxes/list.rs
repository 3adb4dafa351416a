//! `agent-sandbox list`: objects of a kind as a table, once or as they change.

use std::process::ExitCode;

use anyhow::Context;
use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use clap::Args;
use futures::StreamExt;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::runtime::watcher;

use super::columns::{self, Kind, Shown};
use super::object::Object;
use super::{connect, scoped};
use crate::connection::{self, Connected};
use crate::output::{Detail, Format, Table, Widths, print_text};
use crate::visible;

/// List claims, sandboxes, pools or templates
#[derive(Debug, Args)]
pub struct ListArguments {
    /// What to list
    #[arg(value_enum, default_value_t)]
    kind: Kind,

    /// In all namespaces
    #[arg(short = 'A', long)]
    all_namespaces: bool,

    /// Only those with these labels, such as team=search,tier!=test
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    selector: Option<String>,

    /// Go on and print what changes, until Ctrl-C
    #[arg(short, long)]
    watch: bool,

    /// How to print
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    output: Format,

    #[command(flatten)]
    connection: connection::Arguments,
}

pub async fn list(arguments: ListArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    match arguments.kind {
        Kind::Claim => list_kind::<Object<SandboxClaim>>(&arguments, &connected).await?,
        Kind::Sandbox => list_kind::<Object<Sandbox>>(&arguments, &connected).await?,
        Kind::Pool => list_kind::<Object<SandboxWarmPool>>(&arguments, &connected).await?,
        Kind::Template => list_kind::<Object<SandboxTemplate>>(&arguments, &connected).await?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn list_kind<Kind: Shown>(
    arguments: &ListArguments,
    connected: &Connected,
) -> anyhow::Result<()> {
    if arguments.watch {
        return watch::<Kind>(arguments, connected).await;
    }
    let namespace = (!arguments.all_namespaces).then_some(connected.namespace.as_str());
    let parameters = ListParams {
        label_selector: arguments.selector.clone(),
        ..ListParams::default()
    };
    let objects = scoped::<Kind>(&connected.client, namespace)
        .list(&parameters)
        .await
        .with_context(|| format!("cannot list {}", Kind::PLURAL))?
        .items;
    match arguments.output.shape() {
        Err(format) => format.print_list(&objects),
        Ok(_) if objects.is_empty() => {
            eprintln!(
                "{}",
                nothing_found::<Kind>(namespace, arguments.selector.is_some())
            );
            Ok(())
        }
        Ok(detail) => {
            print_text(&table(&objects, namespace.is_none(), detail, Timestamp::now()).render())
        }
    }
}

fn nothing_found<Kind: Shown>(namespace: Option<&str>, selected: bool) -> String {
    let kind = Kind::PLURAL;
    let such = if selected { "such " } else { "" };
    match namespace {
        Some(namespace) => format!("no {such}{kind} in namespace {namespace}"),
        None => format!("no {such}{kind} in any namespace"),
    }
}

/// A table of these objects.
pub fn table<Kind: Shown>(
    objects: &[Kind],
    with_namespace: bool,
    detail: Detail,
    now: Timestamp,
) -> Table {
    let mut table = Table::new(&columns::header::<Kind>(with_namespace, detail));
    for object in objects {
        table.row(columns::row(object, with_namespace, detail, now));
    }
    table
}

/// Prints the present objects, then one row or document for each change.
async fn watch<Kind: Shown>(
    arguments: &ListArguments,
    connected: &Connected,
) -> anyhow::Result<()> {
    let namespace = (!arguments.all_namespaces).then_some(connected.namespace.as_str());
    let config = watcher::Config {
        label_selector: arguments.selector.clone(),
        ..watcher::Config::default()
    };
    let objects = scoped::<Kind>(&connected.client, namespace);
    let mut printer = Printer::new(arguments.output, namespace.is_none());
    let mut begun = false;
    let mut events = object_watch::watch_without_log(objects, config);
    let mut shown = None;
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Init) => continue,
            Ok(watcher::Event::InitApply(object)) if begun => printer.change(&object, false)?,
            Ok(watcher::Event::InitApply(object)) => printer.collect(object),
            Ok(watcher::Event::InitDone) if begun => {}
            Ok(watcher::Event::InitDone) => {
                begun = true;
                printer.begin()?;
            }
            Ok(watcher::Event::Apply(object)) => printer.change(&object, false)?,
            Ok(watcher::Event::Delete(object)) => printer.change(&object, true)?,
            Err(failure) if begun => {
                if shown.as_ref() != Some(&failure) {
                    let message = failure.to_string();
                    eprintln!(
                        "the connection is lost and tried again: {}",
                        visible::line(&message)
                    );
                }
                shown = Some(failure);
                continue;
            }
            Err(failure) => return Err(failure).context("cannot watch"),
        }
        shown = None;
    }
    Ok(())
}

/// Prints objects as they come.
struct Printer<Kind> {
    format: Format,
    with_namespace: bool,
    first: Vec<Kind>,
    widths: Widths,
}

impl<Kind: Shown> Printer<Kind> {
    fn new(format: Format, with_namespace: bool) -> Self {
        Self {
            format,
            with_namespace,
            first: Vec::new(),
            widths: Widths::default(),
        }
    }

    fn collect(&mut self, object: Kind) {
        self.first.push(object);
    }

    fn begin(&mut self) -> anyhow::Result<()> {
        let objects = std::mem::take(&mut self.first);
        let Ok(detail) = self.format.shape() else {
            return objects
                .iter()
                .try_for_each(|object| self.change(object, false));
        };
        let header = columns::header::<Kind>(self.with_namespace, detail);
        let mut rows: Vec<Vec<String>> = vec![header.into_iter().map(str::to_owned).collect()];
        let now = Timestamp::now();
        rows.extend(
            objects
                .iter()
                .map(|object| columns::row(object, self.with_namespace, detail, now)),
        );
        for row in &rows {
            self.widths.fit(row);
        }
        let lines: String = rows.iter().map(|row| self.widths.line(row)).collect();
        print_text(&lines)
    }

    fn change(&mut self, object: &Kind, deleted: bool) -> anyhow::Result<()> {
        let detail = match self.format.shape() {
            Ok(detail) => detail,
            Err(format) => return format.print(object),
        };
        let mut row = columns::row(object, self.with_namespace, detail, Timestamp::now());
        if deleted {
            let header = columns::header::<Kind>(self.with_namespace, detail);
            if let Some(age) = header.iter().position(|title| *title == "AGE") {
                "deleted".clone_into(&mut row[age]);
            }
        }
        self.widths.fit(&row);
        print_text(&self.widths.line(&row))
    }
}

//! `agent-sandbox get`: everything about one object, for a person; or the object itself, for a program.

use std::process::ExitCode;

use api::decoding::Decoded;
use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use clap::{Args, ValueEnum};
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::{Client, ResourceExt};

use super::columns::{self, Kind, Shown};
use super::list::table;
use super::object::Object;
use super::{connect, explain, scoped};
use crate::connection::{self, Connected};
use crate::output::{Detail, Format, Table, age, print_text};

/// How many events are shown.
const MOST_EVENTS: usize = 12;

/// Show one claim, sandbox, pool or template, with its conditions and events
#[derive(Debug, Args)]
pub struct GetArguments {
    /// How to print [default: a description]
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    output: Option<Format>,

    /// Name of a claim; or of another kind, as pool/NAME, template/NAME or sandbox/NAME
    #[arg(value_name = "[KIND/]NAME")]
    name: String,

    #[command(flatten)]
    connection: connection::Arguments,
}

pub async fn get(arguments: GetArguments) -> anyhow::Result<ExitCode> {
    let (kind, name) = parse(&arguments.name)?;
    let connected = connect(&arguments.connection).await?;
    match kind {
        Kind::Claim => show::<Object<SandboxClaim>>(&connected, name, arguments.output).await?,
        Kind::Sandbox => show::<Object<Sandbox>>(&connected, name, arguments.output).await?,
        Kind::Pool => show::<Object<SandboxWarmPool>>(&connected, name, arguments.output).await?,
        Kind::Template => {
            show::<Object<SandboxTemplate>>(&connected, name, arguments.output).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn parse(name: &str) -> anyhow::Result<(Kind, &str)> {
    let Some((kind, name)) = name.split_once('/') else {
        return Ok((Kind::default(), name));
    };
    let parsed = Kind::from_str(kind, true);
    let parsed = parsed.map_err(|_| {
        anyhow::anyhow!("no kind {kind:?}; there are claim/, sandbox/, pool/ and template/")
    })?;
    Ok((parsed, name))
}

async fn show<Kind: Shown>(
    connected: &Connected,
    name: &str,
    format: Option<Format>,
) -> anyhow::Result<()> {
    let object: Kind = explain::get(&connected.client, &connected.namespace, name).await?;
    match format.map(Format::shape) {
        Some(Err(format)) => format.print(&object),
        Some(Ok(detail)) => {
            let table = table(
                std::slice::from_ref(&object),
                false,
                detail,
                Timestamp::now(),
            );
            print_text(&table.render())
        }
        None => {
            let events = events_about(&connected.client, &object).await;
            print_text(&description(&object, &events, Timestamp::now()))
        }
    }
}

fn description<Kind: Shown>(object: &Kind, events: &[Event], now: Timestamp) -> String {
    let titles = columns::header::<Kind>(true, Detail::Wide);
    let cells = columns::row(object, true, Detail::Wide, now);
    let width = titles.iter().map(|title| title.len()).max().unwrap_or(0) + 2;
    let lines: Vec<String> = titles
        .iter()
        .zip(cells)
        .map(|(title, cell)| format!("{:<width$} {cell}\n", sentence_case(title) + ":"))
        .collect();
    let mut text = lines.concat();
    let conditions = object.conditions();
    if !conditions.is_empty() {
        let mut table = Table::new(&["CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE"]);
        for condition in conditions {
            table.row(vec![
                condition.type_.clone(),
                condition.status.clone(),
                condition.reason.clone(),
                age(condition.last_transition_time.0, now),
                condition.message.clone(),
            ]);
        }
        text.push('\n');
        text.push_str(&table.render());
    }
    if !events.is_empty() {
        let mut table = Table::new(&["EVENT", "OBJECT", "LAST", "MESSAGE"]);
        for event in events {
            let about = &event.involved_object;
            table.row(vec![
                event.reason.clone().unwrap_or_default(),
                format!(
                    "{}/{}",
                    about.kind.as_deref().unwrap_or_default().to_lowercase(),
                    about.name.as_deref().unwrap_or_default()
                ),
                last_seen(event).map_or_else(String::new, |time| age(time, now)),
                event.message.clone().unwrap_or_default(),
            ]);
        }
        text.push('\n');
        text.push_str(&table.render());
    }
    text
}

fn sentence_case(title: &str) -> String {
    let mut letters = title.chars();
    let first = letters.next().map(String::from).unwrap_or_default();
    first + &letters.as_str().to_lowercase().replace("ips", "IPs")
}

/// The newest events about an object and about those that are named like it or like its sandbox.
async fn events_about<Kind: Shown>(client: &Client, object: &Kind) -> Vec<Event> {
    let namespace = object.namespace().unwrap_or_default();
    let mut names = vec![object.name_any()];
    names.extend(
        object
            .labels()
            .get(api::labels::ASSIGNED_SANDBOX_NAME)
            .cloned(),
    );
    names.dedup();
    let mut events = Vec::new();
    for name in names {
        let about = ListParams::default().fields(&format!("involvedObject.name={name}"));
        // Without the permission to read events, the rest is still shown.
        let found = scoped::<Decoded<Event>>(client, Some(&namespace));
        if let Ok(found) = found.list(&about).await {
            let found = found.items.into_iter();
            events.extend(found.filter_map(|event| event.into_result().ok()));
        }
    }
    events.sort_by_key(last_seen);
    let old = events.len().saturating_sub(MOST_EVENTS);
    events.split_off(old)
}

fn last_seen(event: &Event) -> Option<Timestamp> {
    let series = event.series.as_ref();
    series
        .and_then(|series| series.last_observed_time.as_ref())
        .map(|time| time.0)
        .or_else(|| event.last_timestamp.as_ref().map(|time| time.0))
        .or_else(|| event.event_time.as_ref().map(|time| time.0))
        .or_else(|| {
            event
                .metadata
                .creation_timestamp
                .as_ref()
                .map(|time| time.0)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_say_its_kind() {
        assert_eq!(parse("mine").unwrap(), (Kind::Claim, "mine"));
        assert_eq!(parse("pool/p").unwrap(), (Kind::Pool, "p"));
        assert_eq!(parse("sandboxwarmpool/p").unwrap(), (Kind::Pool, "p"));
        assert!(parse("pod/p").unwrap_err().to_string().contains("claim/"));
    }
}

//! `agent-sandbox claim`: ask for a sandbox and keep it.

use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use super::{connect, explain};
use crate::connection::{self, Connected};
use crate::output::{ObjectFormat, parse_duration};
use crate::signals::{Received, Signals};
use crate::terminal::Progress;

/// Claim a sandbox and print the claim's name once it is ready
#[derive(Debug, Args)]
pub struct ClaimArguments {
    #[command(flatten)]
    source: Source,

    #[command(flatten)]
    wait: Wait,

    /// Release the sandbox after this time, such as 30m or 2h
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    shutdown_after: Option<Duration>,

    /// Print the claim itself instead of its name
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    output: Option<ObjectFormat>,

    /// Name of the claim [default: a new one]
    name: Option<String>,

    #[command(flatten)]
    connection: connection::Arguments,
}

/// Where a sandbox comes from
#[derive(Clone, Debug, Args)]
pub struct Source {
    /// Template to make the sandbox from, or to choose a warm one by [default: python-runtime-template]
    #[arg(long, conflicts_with = "pool")]
    template: Option<String>,

    /// Warm pool to take the sandbox from
    #[arg(long)]
    pool: Option<String>,

    /// Environment variable of the sandbox; may be repeated. Such a sandbox is never a warm one
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = parse_variable)]
    env: Vec<(String, String)>,
}

/// How long to wait for a sandbox, and what to do when it does not come up
#[derive(Clone, Debug, Args)]
pub struct Wait {
    /// How long to wait until the sandbox is ready
    #[arg(long, value_name = "DURATION", default_value = "3m", value_parser = parse_duration)]
    timeout: Duration,

    /// Keep the claim if its sandbox does not become ready, for inspection, instead of deleting it
    #[arg(long)]
    pub keep_on_failure: bool,
}

impl Wait {
    fn apply_to(&self, wanted: sdk::CreateOptions) -> sdk::CreateOptions {
        let wanted = wanted.ready_timeout(self.timeout);
        if self.keep_on_failure {
            wanted.keep_on_failure()
        } else {
            wanted
        }
    }
}

impl Source {
    /// What to create; from the quickstart's template when nothing is named.
    pub fn wanted(&self) -> sdk::CreateOptions {
        let template = self.template.as_deref();
        let template = template.unwrap_or(crate::up::QUICKSTART_TEMPLATE);
        let wanted = self.pool.as_ref().map_or_else(
            || sdk::CreateOptions::from_template(template),
            sdk::CreateOptions::from_pool,
        );
        // The API refuses variables for a sandbox that runs already.
        let cold = self.pool.is_none() && !self.env.is_empty();
        let wanted = if cold {
            wanted.warm_pool(sdk::WarmPool::None)
        } else {
            wanted
        };
        let variables = self.env.iter();
        variables.fold(wanted, |wanted, (name, value)| wanted.env(name, value))
    }
}

pub async fn claim(arguments: ClaimArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    let mut signals = Signals::listen()?;
    let mut wanted = arguments.source.wanted();
    if let Some(name) = arguments.name {
        wanted = wanted.name(name);
    }
    if let Some(lifetime) = arguments.shutdown_after {
        wanted = wanted.shutdown_after(lifetime);
    }
    let progress = Progress::begin();
    progress.say("claiming a sandbox");
    let created = create(&connected, wanted, &arguments.wait, progress, &mut signals).await;
    progress.finish();
    let sandbox = match created? {
        Created::Ready(sandbox) => sandbox,
        Created::Interrupted(received) => return Ok(received.exit_code()),
    };
    match arguments.output {
        None => println!("{}", sandbox.id()),
        Some(format) => {
            let claims =
                super::scoped::<api::SandboxClaim>(&connected.client, Some(sandbox.namespace()));
            format.print(&claims.get(sandbox.id()).await?)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The result of claiming a sandbox.
pub enum Created {
    Ready(sdk::Sandbox),
    /// A signal came before the sandbox was ready; the claim is deleted.
    Interrupted(Received),
}

/// Claims a sandbox, and prints on stderr what delays it. The error for a missing object lists the existing ones.
pub async fn create(
    connected: &Connected,
    wanted: sdk::CreateOptions,
    wait: &Wait,
    progress: Progress,
    signals: &mut Signals,
) -> anyhow::Result<Created> {
    let sandbox = connected.sandboxes()?.sandbox(wait.apply_to(wanted))?;
    let mut waiting = sandbox.waiting();
    let mut printed = None;
    let handle = sandbox.clone();
    let mut opening = pin!(handle.open());
    let opened = loop {
        tokio::select! {
            opened = &mut opening => break opened,
            received = signals.next() => {
                // Terminating the sandbox cancels `open`, which deletes the claim.
                let (ended, _) = tokio::join!(sandbox.terminate(), opening);
                ended?;
                return Ok(Created::Interrupted(received));
            }
            Ok(()) = waiting.changed() => {
                let seen = waiting.borrow_and_update().clone();
                let problem = seen.and_then(|waiting| waiting.problem);
                if let Some(problem) = problem.filter(|problem| printed.as_ref() != Some(problem)) {
                    progress.note(&format!("waiting: {problem}"));
                    printed = Some(problem);
                }
            }
        }
    };
    match opened {
        Ok(()) => Ok(Created::Ready(sandbox)),
        Err(error) => Err(explain::creation(connected, error).await),
    }
}

fn parse_variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected NAME=VALUE".to_owned()),
    }
}

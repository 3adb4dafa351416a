//! How fast batch claims are met: `agent-sandbox bench kruise`.
//!
//! Like the benchmark of single claims it runs the controllers with a node that marks every pod Ready at once, so that what it
//! measures is the controllers and the API server. It checks that every claim got exactly what it asked for, and reports figures.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::time::{Duration, Instant};

use api::Sandbox;
use api::kruise::{ClaimPhase, SandboxClaim, SandboxClaimSpec, SandboxSet, SandboxSetSpec};
use api::sandbox::PodTemplate;
use futures::future::try_join_all;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Container;
use kube::api::{ListParams, PostParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client, ResourceExt};
use planner::owner::controller_of;
use tokio_util::sync::CancellationToken;

use crate::bench::{Latencies, mark_pods_ready};
use crate::runtime::Parts;
use crate::{Config, assemble};

const NAMESPACE: &str = "default";
const SET: &str = "bench";
/// How long the set may take to fill, and the claims to be met.
const DEADLINE: Duration = Duration::from_secs(600);

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How many sandboxes can be claimed before the first claim.
    pub set: usize,
    /// How many claims are made at once.
    pub claims: usize,
    /// How many sandboxes each asks for.
    pub replicas: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            set: 5_000,
            claims: 100,
            replicas: 50,
        }
    }
}

/// Why nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {what}")]
    Request {
        what: &'static str,
        #[source]
        source: kube::Error,
    },
    #[error("cannot watch {what}")]
    Watch {
        what: &'static str,
        #[source]
        source: watcher::Error,
    },
    #[error("{what} took longer than {} s", DEADLINE.as_secs())]
    TooSlow { what: &'static str },
    #[error("claim {claim} asked for {wanted} sandboxes, says {said} and holds {held}")]
    Inexact {
        claim: String,
        wanted: usize,
        said: i32,
        held: usize,
    },
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct Report {
    options: Options,
    pub filled_in: Duration,
    /// From a claim's creation until it was seen to be Completed.
    pub latencies: Latencies,
    /// From the first claim until the last was Completed.
    pub took: Duration,
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options {
            set,
            claims,
            replicas,
        } = self.options;
        let seconds = self.took.as_secs_f64();
        let total = u32::try_from(claims * replicas).unwrap_or(u32::MAX);
        writeln!(
            formatter,
            "set     {set} sandboxes ready after {:.1} s",
            self.filled_in.as_secs_f64()
        )?;
        writeln!(
            formatter,
            "claims  {claims} of {replicas} sandboxes each, all met exactly after {seconds:.2} s: {:.0} sandboxes/s",
            f64::from(total) / seconds.max(f64::EPSILON)
        )?;
        write!(formatter, "        claim to Completed: {}", self.latencies)
    }
}

/// Measures how fast batch claims are met.
pub async fn run(client: Client, options: Options) -> Result<Report, Error> {
    let shutdown = CancellationToken::new();
    let config = Config {
        kruise: true,
        ..Config::default()
    };
    let runtime = assemble(Parts::new(client.clone(), config));
    let (never, lead) = (CancellationToken::new(), std::future::ready(()));
    let controllers = tokio::spawn(runtime.run(shutdown.clone(), never, || {}, lead));
    let node = tokio::spawn(mark_pods_ready(client.clone()));
    let report = measure(&client, options).await;
    shutdown.cancel();
    // Whether they ended well is no part of what is measured.
    let _ = controllers.await;
    node.abort();
    report
}

async fn measure(client: &Client, options: Options) -> Result<Report, Error> {
    let started = Instant::now();
    within("filling the set", fill_set(client, options.set)).await?;
    let filled_in = started.elapsed();
    let started = Instant::now();
    let claims = (0..options.claims).map(|index| create_claim(client, index, options.replicas));
    let created: HashMap<String, Instant> = try_join_all(claims).await?.into_iter().collect();
    let completed = within("meeting the claims", completions(client, options.claims)).await?;
    let mut latencies = Latencies::default();
    latencies.extend(
        completed
            .iter()
            .filter_map(|(name, at)| Some(*at - *created.get(name)?)),
    );
    let took = started.elapsed();
    check(client, options).await?;
    Ok(Report {
        options,
        filled_in,
        latencies,
        took,
    })
}

async fn within<T>(
    what: &'static str,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    tokio::time::timeout(DEADLINE, work)
        .await
        .unwrap_or(Err(Error::TooSlow { what }))
}

async fn fill_set(client: &Client, replicas: usize) -> Result<(), Error> {
    let sets = Api::<SandboxSet>::namespaced(client.clone(), NAMESPACE);
    let mut template = PodTemplate::default();
    template.spec_mut().containers = vec![Container {
        name: "main".to_owned(),
        image: Some("bench".to_owned()),
        ..Container::default()
    }];
    let set = SandboxSet::new(
        SET,
        SandboxSetSpec {
            replicas: i32::try_from(replicas).unwrap_or(i32::MAX),
            template: Some(template),
            ..SandboxSetSpec::default()
        },
    );
    sets.create(&PostParams::default(), &set)
        .await
        .map_err(|source| request("create the set", source))?;
    let mut states = watcher(sets, watcher::Config::default())
        .applied_objects()
        .boxed();
    while let Some(set) = states.try_next().await.map_err(|source| Error::Watch {
        what: "the set",
        source,
    })? {
        let available = set.status.map_or(0, |status| status.available_replicas);
        if usize::try_from(available).is_ok_and(|available| available >= replicas) {
            break;
        }
    }
    Ok(())
}

async fn create_claim(
    client: &Client,
    index: usize,
    replicas: usize,
) -> Result<(String, Instant), Error> {
    let name = format!("batch-{index}");
    let claim = SandboxClaim::new(
        &name,
        SandboxClaimSpec {
            template_name: SET.to_owned(),
            replicas: i32::try_from(replicas).ok(),
            ..SandboxClaimSpec::default()
        },
    );
    let asked = Instant::now();
    Api::namespaced(client.clone(), NAMESPACE)
        .create(&PostParams::default(), &claim)
        .await
        .map_err(|source| request("create a claim", source))?;
    Ok((name, asked))
}

/// When each claim was seen to be Completed, once all are.
async fn completions(client: &Client, count: usize) -> Result<HashMap<String, Instant>, Error> {
    let claims = Api::<SandboxClaim>::namespaced(client.clone(), NAMESPACE);
    let mut states = watcher(claims, watcher::Config::default())
        .applied_objects()
        .boxed();
    let mut completed = HashMap::new();
    while completed.len() < count
        && let Some(claim) = states.try_next().await.map_err(|source| Error::Watch {
            what: "the claims",
            source,
        })?
    {
        let phase = claim.status.as_ref().and_then(|status| status.phase);
        if phase == Some(ClaimPhase::Completed) {
            completed
                .entry(claim.name_any())
                .or_insert_with(Instant::now);
        }
    }
    Ok(completed)
}

/// Checks that every claim holds exactly what it asked for.
async fn check(client: &Client, options: Options) -> Result<(), Error> {
    let everything = ListParams::default();
    let sandboxes = Api::<Sandbox>::namespaced(client.clone(), NAMESPACE)
        .list(&everything)
        .await
        .map_err(|source| request("list the sandboxes", source))?;
    let claims = Api::<SandboxClaim>::namespaced(client.clone(), NAMESPACE)
        .list(&everything)
        .await
        .map_err(|source| request("list the claims", source))?;
    let mut held: HashMap<&str, HashSet<&str>> = HashMap::new();
    for sandbox in &sandboxes.items {
        if let Some(owner) = controller_of(&sandbox.metadata) {
            let name = sandbox.metadata.name.as_deref().unwrap_or_default();
            held.entry(&owner.uid).or_default().insert(name);
        }
    }
    for claim in &claims.items {
        let uid = claim.metadata.uid.as_deref().unwrap_or_default();
        let held = held.get(uid).map_or(0, HashSet::len);
        let said = claim
            .status
            .as_ref()
            .map_or(0, |status| status.claimed_replicas);
        if held != options.replicas || usize::try_from(said) != Ok(held) {
            return Err(Error::Inexact {
                claim: claim.name_any(),
                wanted: options.replicas,
                said,
                held,
            });
        }
    }
    Ok(())
}

fn request(what: &'static str, source: kube::Error) -> Error {
    Error::Request { what, source }
}

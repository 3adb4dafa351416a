//! `bench kruise`: how fast batch claims of the OpenKruise dialect complete, with a fake node. It checks that every claim got exactly the
//! sandboxes that it asked for.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use api::Sandbox;
use api::kruise::{ClaimPhase, SandboxClaim, SandboxClaimSpec, SandboxSet, SandboxSetSpec};
use api::sandbox::PodTemplate;
use controllers::{Config, Parts};
use futures::TryStreamExt;
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Container;
use kube::api::{ListParams, PostParams};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt};
use planner::owner::controller_of;

use crate::claims::Latencies;
use crate::fake_cluster::FakeCluster;
use crate::kinds;

const NAMESPACE: &str = "default";
const SET: &str = "bench";
/// The timeout for filling the set, and for the claims to complete.
const DEADLINE: Duration = Duration::from_secs(600);

/// The size of the measurement.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Sandboxes that can be claimed before the first claim.
    pub set: usize,
    /// Claims created at once.
    pub claims: usize,
    /// Sandboxes in each claim.
    pub replicas: usize,
}

/// All figures.
#[derive(Clone, Debug)]
struct Report {
    options: Options,
    filled_in: Duration,
    /// From a claim's creation until it was seen Completed.
    latencies: Latencies,
    /// From the first claim until the last was Completed.
    took: Duration,
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

/// Measures with an API server in `directory`, and prints.
pub async fn execute(directory: &Path, options: Options) -> anyhow::Result<()> {
    let server = apiserver::Server::open(apiserver::Config::new(directory)).await?;
    let client = server.client();
    kinds::install(&client).await?;
    let config = Config {
        kruise: true,
        ..Config::default()
    };
    let cluster = FakeCluster::start(Parts::new(client.clone(), config));
    let report = measure(&client, options).await;
    cluster.stop().await?;
    println!("{}", report?);
    server.shutdown().await;
    Ok(())
}

async fn measure(client: &Client, options: Options) -> anyhow::Result<Report> {
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
    work: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let in_time = tokio::time::timeout(DEADLINE, work).await;
    in_time.with_context(|| format!("{what} took longer than {} s", DEADLINE.as_secs()))?
}

async fn fill_set(client: &Client, replicas: usize) -> anyhow::Result<()> {
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
        .context("cannot create the set")?;
    let mut events = object_watch::watch(sets, watcher::Config::default());
    while let Some(event) = events.try_next().await.context("cannot watch the set")? {
        let (Event::Apply(set) | Event::InitApply(set)) = event else {
            continue;
        };
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
) -> anyhow::Result<(String, Instant)> {
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
        .context("cannot create a claim")?;
    Ok((name, asked))
}

/// Waits until all claims are Completed. Returns when each was seen Completed.
async fn completions(client: &Client, count: usize) -> anyhow::Result<HashMap<String, Instant>> {
    let claims = Api::<SandboxClaim>::namespaced(client.clone(), NAMESPACE);
    let mut events = object_watch::watch(claims, watcher::Config::default());
    let mut completed = HashMap::new();
    while completed.len() < count
        && let Some(event) = events.try_next().await.context("cannot watch the claims")?
    {
        let (Event::Apply(claim) | Event::InitApply(claim)) = event else {
            continue;
        };
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
async fn check(client: &Client, options: Options) -> anyhow::Result<()> {
    let everything = ListParams::default();
    let sandboxes = Api::<Sandbox>::namespaced(client.clone(), NAMESPACE)
        .list(&everything)
        .await
        .context("cannot list the sandboxes")?;
    let claims = Api::<SandboxClaim>::namespaced(client.clone(), NAMESPACE)
        .list(&everything)
        .await
        .context("cannot list the claims")?;
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
        let reported = claim
            .status
            .as_ref()
            .map_or(0, |status| status.claimed_replicas);
        ensure!(
            held == options.replicas && usize::try_from(reported) == Ok(held),
            "claim {} asked for {} sandboxes, reports {reported} and holds {held}",
            claim.name_any(),
            options.replicas
        );
    }
    Ok(())
}

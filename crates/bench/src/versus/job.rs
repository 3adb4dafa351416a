//! The job of each controller: fill a pool, then serve a burst of claims, then claims at a steady rate.
//!
//! Figures are recorded during the job, so that a controller that does not finish still has those that it reached.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use api::{SandboxClaim, SandboxTemplate, SandboxWarmPool};
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::json;
use tokio::task::JoinSet;

use super::costs::writes;
use super::report::{Claims, Figures};
use super::{Arguments, ClaimsBy, LOOK_AGAIN};
use crate::process::{cpu_time, resident};
use crate::ready_times::ReadyTimes;

const TEMPLATE: &str = "bench";
const POOL: &str = "bench";

/// The job in its namespace.
#[derive(Clone)]
pub struct Job {
    pub client: Client,
    pub namespace: String,
    pub ready_times: Arc<ReadyTimes>,
    /// The timeout for filling a pool and for claims to become Ready.
    pub deadline: Duration,
    pub who: &'static str,
    pub claims_by: ClaimsBy,
}

impl Job {
    /// Prints the progress: the job takes minutes.
    pub fn say(&self, what: &str) {
        eprintln!("{}: {what}", self.who);
    }

    pub async fn run(
        &self,
        arguments: &Arguments,
        pid: u32,
        figures: &mut Figures,
    ) -> anyhow::Result<()> {
        self.say(&format!("filling a pool of {}", arguments.pool));
        let begin = Instant::now();
        self.create_pool(arguments.pool).await?;
        self.await_full(arguments.pool).await?;
        figures.filled = Some(begin.elapsed());
        figures.filled_cpu = Some(cpu_time(pid)?);
        figures.filled_resident = Some(resident(pid)?);

        self.say(&format!("{} claims at once", arguments.burst));
        let (writes_before, cpu) = (writes(&self.client).await?, cpu_time(pid)?);
        let asked = self.claim_at_once(arguments.burst).await?;
        figures.burst = Some(self.await_claims(asked).await?);
        figures.burst_cpu = Some(cpu_time(pid)?.saturating_sub(cpu));
        self.say("filling the pool again");
        self.await_full(arguments.pool).await?;
        let writes = writes(&self.client).await? - writes_before;
        figures.burst_writes = Some(writes - super::report::number(arguments.burst));

        self.say(&format!(
            "{} claims a second for {} s",
            arguments.rate, arguments.seconds
        ));
        let cpu = cpu_time(pid)?;
        let asked = self
            .claim_steadily(arguments.rate, arguments.seconds)
            .await?;
        figures.sustained = Some(self.await_claims(asked).await?);
        figures.sustained_cpu = Some(cpu_time(pid)?.saturating_sub(cpu));
        figures.resident = Some(resident(pid)?);
        Ok(())
    }

    async fn create_pool(&self, replicas: usize) -> anyhow::Result<()> {
        // A scheduler that does not exist leaves the pods to the fake node.
        let pod = json!({"schedulerName": "none", "automountServiceAccountToken": false, "containers": [{"name": "main", "image": "bench"}]});
        let template: SandboxTemplate = serde_json::from_value(
            json!({"metadata": {"name": TEMPLATE}, "spec": {"podTemplate": {"spec": pod}}}),
        )?;
        let pool: SandboxWarmPool = serde_json::from_value(
            json!({"metadata": {"name": POOL}, "spec": {"replicas": replicas, "sandboxTemplateRef": {"name": TEMPLATE}}}),
        )?;
        Api::namespaced(self.client.clone(), &self.namespace)
            .create(&PostParams::default(), &template)
            .await?;
        Api::namespaced(self.client.clone(), &self.namespace)
            .create(&PostParams::default(), &pool)
            .await?;
        Ok(())
    }

    async fn await_full(&self, wanted: usize) -> anyhow::Result<()> {
        let pools = Api::<SandboxWarmPool>::namespaced(self.client.clone(), &self.namespace);
        let begin = Instant::now();
        loop {
            let ready = pools
                .get(POOL)
                .await?
                .status
                .map_or(0, |status| status.ready_replicas);
            if usize::try_from(ready).is_ok_and(|ready| ready >= wanted) {
                return Ok(());
            }
            ensure!(
                begin.elapsed() < self.deadline,
                "the pool has {ready} of {wanted} sandboxes after {:?}",
                self.deadline
            );
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    async fn claim_at_once(&self, claims: usize) -> anyhow::Result<HashMap<String, Instant>> {
        let mut making = JoinSet::new();
        for number in 0..claims {
            making.spawn(
                self.clone()
                    .claim(format!("burst-{number}"), Instant::now()),
            );
        }
        all_made(making).await
    }

    async fn claim_steadily(
        &self,
        rate: usize,
        seconds: usize,
    ) -> anyhow::Result<HashMap<String, Instant>> {
        let mut making = JoinSet::new();
        let mut ticks = tokio::time::interval(Duration::from_secs(1) / u32::try_from(rate.max(1))?);
        for number in 0..rate * seconds {
            let due = ticks.tick().await.into_std();
            making.spawn(self.clone().claim(format!("steady-{number}"), due));
        }
        all_made(making).await
    }

    /// Creates a claim, whose time counts from when it was due.
    async fn claim(self, name: String, due: Instant) -> anyhow::Result<(String, Instant)> {
        let spec = match self.claims_by {
            ClaimsBy::Template => json!({"sandboxTemplateRef": {"name": TEMPLATE}}),
            ClaimsBy::Pool => json!({"warmPoolRef": {"name": POOL}}),
        };
        let claim: SandboxClaim =
            serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec}))?;
        Api::namespaced(self.client, &self.namespace)
            .create(&PostParams::default(), &claim)
            .await?;
        Ok((name, due))
    }

    async fn await_claims(&self, asked: HashMap<String, Instant>) -> anyhow::Result<Claims> {
        let begin = Instant::now();
        loop {
            let met: Vec<(Instant, Instant)> = asked
                .iter()
                .filter_map(|(name, due)| Some((*due, self.ready_times.of(name)?)))
                .collect();
            if met.len() == asked.len() {
                return Ok(Claims::of(&met));
            }
            ensure!(
                begin.elapsed() < self.deadline,
                "{} of {} claims are met after {:?}",
                met.len(),
                asked.len(),
                self.deadline
            );
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}

async fn all_made(
    mut making: JoinSet<anyhow::Result<(String, Instant)>>,
) -> anyhow::Result<HashMap<String, Instant>> {
    let mut made = HashMap::new();
    while let Some(claim) = making.join_next().await {
        let (name, due) = claim??;
        made.insert(name, due);
    }
    Ok(made)
}

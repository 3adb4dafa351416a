//! Works off a claim's batch: each sandbox of it is taken or made, told its environment, and given up if it does not answer.

use std::sync::Arc;

use api::Sandbox;
use api::kruise::{SandboxClaim, SandboxSet};
use futures::future::join_all;
use planner::kruise_claim::{Entry, Initialisation, Next, Origin, Outcome, Pick, batch, next};
use planner::sandbox_set::Mould;
use planner::version::Version;

use super::{CONTROLLER, Error, FIELD_MANAGER};
use crate::context::Context;
use crate::events::{Occurrence, Severity};
use crate::initialise::Settings;
use crate::key::ObjectKey;
use crate::objects::NamespacedObjects;
use crate::writes::{Deletion, Failure, WriteError, Writer};

/// How many steps one sandbox may take in one pass. Only somebody who keeps changing it makes it take more than six.
const STEPS: usize = 8;

/// What came of a batch.
#[derive(Debug, Default)]
pub(super) struct Worked {
    pub outcomes: Vec<(Pick, Outcome)>,
    /// How many sandboxes failed in this pass.
    pub failed: usize,
    /// A failure that is worth a retry, if there was one.
    pub failure: Option<WriteError>,
}

/// Works off the batch that the claim's status names.
pub(super) async fn work_off(
    context: &Context,
    key: &ObjectKey,
    claim: &SandboxClaim,
    set: Option<&SandboxSet>,
) -> Result<Worked, Error> {
    let picks = batch(claim);
    let mut worked = Worked::default();
    if picks.is_empty() {
        return Ok(worked);
    }
    let makes_some = picks.iter().any(|pick| pick.origin == Origin::Made);
    let mould = match set.filter(|_| makes_some) {
        Some(set) => {
            let templates = &context.caches.templates;
            let templates = NamespacedObjects::new(context, templates, FIELD_MANAGER, key);
            let template = planner::pool::template(&templates, set).await;
            let template = template.map_err(Error::Observe)?;
            Mould::new(set, template.as_deref()).ok()
        }
        None => None,
    };
    let errand = Errand {
        context,
        key,
        claim,
        mould: set.zip(mould.as_ref()),
    };
    let outcomes = join_all(picks.iter().map(|pick| errand.settle(pick))).await;
    for (pick, outcome) in picks.into_iter().zip(outcomes) {
        let outcome = outcome.unwrap_or_else(|error| {
            if let Failure::Invalid(message) = &error.failure {
                return Outcome::Refused(message.clone());
            }
            worked.failure = Some(error);
            Outcome::Unsettled
        });
        worked.failed += usize::from(outcome == Outcome::Failed);
        worked.outcomes.push((pick, outcome));
    }
    Ok(worked)
}

/// Getting a claim the sandboxes of its batch.
struct Errand<'a> {
    context: &'a Context,
    key: &'a ObjectKey,
    claim: &'a SandboxClaim,
    mould: Option<(&'a SandboxSet, &'a Mould)>,
}

impl Errand<'_> {
    /// Takes one sandbox as far as it goes now.
    async fn settle(&self, pick: &Pick) -> Result<Outcome, WriteError> {
        let target = self.key.sibling(&pick.name);
        let token = self.token();
        let mut initialisation = Initialisation::Untried;
        let mut sandbox = match self.context.caches.sandboxes.get(&target) {
            Some(sandbox) => Some(sandbox),
            None => self.sandboxes().get(&target).await?,
        };
        for _ in 0..STEPS {
            let entry = Entry {
                name: &pick.name,
                origin: pick.origin,
                sandbox: sandbox.as_deref(),
                initialisation: &initialisation,
                mould: self.mould,
                token: &token,
            };
            let written = match next(self.claim, &entry, self.context.clock.now()) {
                Next::Settled(outcome) => return Ok(outcome),
                Next::Initialise { address, token } => {
                    initialisation = self.initialise(address, &token).await;
                    continue;
                }
                Next::Take { sandbox, patch } => self.patch(&target, &sandbox, patch).await,
                Next::Make { sandbox } => self.sandboxes().create(&target, &sandbox).await,
                Next::SetAside {
                    sandbox,
                    patch,
                    why,
                } => {
                    let written = self.patch(&target, &sandbox, patch).await;
                    if written.is_ok() {
                        self.tell_failure(&pick.name, &why, "set aside");
                    }
                    written
                }
                Next::Release { sandbox, why } => match self.release(&target, &sandbox).await {
                    Ok(()) => {
                        self.tell_failure(&pick.name, &why, "released");
                        return Ok(Outcome::Failed);
                    }
                    Err(error) => Err(error),
                },
            };
            sandbox = self.learn(&target, written).await?;
        }
        Ok(Outcome::Unsettled)
    }

    /// The sandbox after a write, or as the server has it if the write was made upon what is no longer true.
    async fn learn(
        &self,
        target: &ObjectKey,
        written: Result<Arc<Sandbox>, WriteError>,
    ) -> Result<Option<Arc<Sandbox>>, WriteError> {
        match written {
            Ok(sandbox) => Ok(Some(sandbox)),
            Err(error) => match error.failure {
                Failure::Conflict | Failure::NotFound | Failure::AlreadyExists => {
                    self.sandboxes().get(target).await
                }
                _ => Err(error),
            },
        }
    }

    async fn initialise(&self, address: std::net::IpAddr, token: &str) -> Initialisation {
        let Some(env_vars) = self.claim.spec.variables() else {
            return Initialisation::Done;
        };
        let settings = Settings {
            env_vars,
            access_token: token,
        };
        self.context.initialise.initialise(address, &settings).await
    }

    async fn patch(
        &self,
        target: &ObjectKey,
        version: &Version,
        patch: serde_json::Value,
    ) -> Result<Arc<Sandbox>, WriteError> {
        self.sandboxes().patch(target, &version.into(), patch).await
    }

    async fn release(&self, target: &ObjectKey, version: &Version) -> Result<(), WriteError> {
        self.sandboxes()
            .delete(target, Deletion::given(version))
            .await
    }

    fn tell_failure(&self, sandbox: &str, why: &str, fate: &str) {
        let occurrence = Occurrence {
            severity: Severity::Warning,
            reason: "InitialisationFailed",
            action: "Initialise",
            note: format!("Sandbox {sandbox:?} could not be initialised and was {fate}: {why}"),
        };
        self.context
            .events
            .record(CONTROLLER, self.claim, occurrence);
    }

    fn sandboxes(&self) -> Writer<'_, Sandbox> {
        Writer::new(self.context, &self.context.caches.sandboxes, FIELD_MANAGER)
    }

    /// A new lock.
    fn token(&self) -> String {
        let random = &self.context.random;
        let bits = u128::from(random.number()) << 64 | u128::from(random.number());
        uuid::Builder::from_random_bytes(bits.to_be_bytes())
            .into_uuid()
            .to_string()
    }
}

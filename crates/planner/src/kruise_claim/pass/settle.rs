//! Settles the batch of a claim: each sandbox is taken or created, initialised, and given up if it does not answer.

use std::net::IpAddr;
use std::sync::Arc;

use api::Sandbox;
use api::kruise::{SandboxClaim, SandboxSet};
use futures::future::join_all;

use super::super::{Entry, Initialisation, Next, Origin, Outcome, Pick, batch, next};
use super::Environment;
use crate::pass::{Error, Event, Failure, Objects, Propagation, RequestError};
use crate::pool;
use crate::sandbox_set::SetBlueprint;

/// How many steps one sandbox may take in one pass. More than six are only taken if others keep changing it.
const STEPS: usize = 8;

/// The outcome of a batch.
#[derive(Debug)]
pub(super) struct Settled<E> {
    pub outcomes: Vec<(Pick, Outcome)>,
    /// How many sandboxes failed in this pass.
    pub failed: usize,
    /// A failure that is worth a retry, if there was one.
    pub failure: Option<E>,
}

/// Settles the batch that the claim's status names.
pub(super) async fn settle_batch<E: Environment>(
    env: &E,
    claim: &SandboxClaim,
    set: Option<&SandboxSet>,
) -> Result<Settled<E::Error>, Error<E::Error>> {
    let picks = batch(claim);
    let mut settled = Settled {
        outcomes: Vec::new(),
        failed: 0,
        failure: None,
    };
    if picks.is_empty() {
        return Ok(settled);
    }
    let creates_some = picks.iter().any(|pick| pick.origin == Origin::Made);
    let blueprint = match set.filter(|_| creates_some) {
        Some(set) => {
            let template = pool::template(&env.templates(), set).await;
            let template = template.map_err(Error::Observe)?;
            SetBlueprint::new(set, template.as_deref()).ok()
        }
        None => None,
    };
    let batch = Batch {
        env,
        claim,
        blueprint: set.zip(blueprint.as_ref()),
    };
    let outcomes = join_all(picks.iter().map(|pick| batch.settle(pick))).await;
    for (pick, outcome) in picks.into_iter().zip(outcomes) {
        let outcome = outcome.unwrap_or_else(|error| {
            if let Failure::Invalid(message) = error.failure() {
                return Outcome::Refused(message.clone());
            }
            settled.failure = Some(error);
            Outcome::Unsettled
        });
        settled.failed += usize::from(outcome == Outcome::Failed);
        settled.outcomes.push((pick, outcome));
    }
    Ok(settled)
}

/// The batch of one claim.
struct Batch<'a, E> {
    env: &'a E,
    claim: &'a SandboxClaim,
    blueprint: Option<(&'a SandboxSet, &'a SetBlueprint)>,
}

impl<E: Environment> Batch<'_, E> {
    /// Takes one sandbox as far as possible now.
    async fn settle(&self, pick: &Pick) -> Result<Outcome, E::Error> {
        let (sandboxes, name) = (self.env.sandboxes(), &pick.name);
        let token = self.env.random_token();
        let mut initialisation = Initialisation::Untried;
        let mut sandbox = match sandboxes.cached(name) {
            Some(sandbox) => Some(sandbox),
            None => sandboxes.get(name).await?,
        };
        for _ in 0..STEPS {
            let entry = Entry {
                name,
                origin: pick.origin,
                sandbox: sandbox.as_deref(),
                initialisation: &initialisation,
                blueprint: self.blueprint,
                token: &token,
            };
            let written = match next(self.claim, &entry, self.env.now()) {
                Next::Settled(outcome) => return Ok(outcome),
                Next::Initialise { address, token } => {
                    initialisation = self.initialise(address, &token).await;
                    continue;
                }
                Next::Take { sandbox, patch } => {
                    sandboxes.patch(name, &(&sandbox).into(), patch).await
                }
                Next::Make { sandbox } => sandboxes.create(name, &sandbox).await,
                Next::SetAside {
                    sandbox,
                    patch,
                    why,
                } => {
                    let written = sandboxes.patch(name, &(&sandbox).into(), patch).await;
                    if written.is_ok() {
                        self.report_failure(name, &why, "set aside");
                    }
                    written
                }
                Next::Release { sandbox, why } => {
                    let precondition = (&sandbox).into();
                    let deleted = sandboxes.delete(name, precondition, Propagation::Default);
                    match deleted.await {
                        Ok(()) => {
                            self.report_failure(name, &why, "released");
                            return Ok(Outcome::Failed);
                        }
                        Err(error) => Err(error),
                    }
                }
            };
            sandbox = self.after(name, written).await?;
        }
        Ok(Outcome::Unsettled)
    }

    /// The sandbox after a write, or as the API server has it if the write was decided from an outdated one.
    async fn after(
        &self,
        name: &str,
        written: Result<Arc<Sandbox>, E::Error>,
    ) -> Result<Option<Arc<Sandbox>>, E::Error> {
        match written {
            Ok(sandbox) => Ok(Some(sandbox)),
            Err(error) if error.failure().is_outdated() => self.env.sandboxes().get(name).await,
            Err(error) => Err(error),
        }
    }

    async fn initialise(&self, address: IpAddr, token: &str) -> Initialisation {
        match self.claim.spec.variables() {
            Some(env_vars) => self.env.initialise(address, env_vars, token).await,
            None => Initialisation::Done,
        }
    }

    fn report_failure(&self, sandbox: &str, why: &str, fate: &str) {
        let note = format!("Sandbox {sandbox:?} could not be initialised and was {fate}: {why}");
        let event = Event::warning("InitialisationFailed", "Initialise", note);
        self.env.emit(self.claim, event);
    }
}

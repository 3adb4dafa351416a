//! Passes over a claim.

use std::collections::BTreeMap;
use std::sync::Arc;

use agent_sandbox_planner::claim::{
    self, Effect, Holding, Lookup, Obstacle, Report, Verdict, decide, holding, names_to_look_up,
    template_name, warm_request,
};
use agent_sandbox_planner::owner::is_controlled_by;
use api::claim::ClaimSource;
use api::conditions::Reason;
use api::{Sandbox, SandboxClaim};
use kube::ResourceExt;

use super::process::Process;
use super::server::Server;
use super::writes::{Crash, Refused, spend};

/// What came of one effect after the other.
struct Progress {
    claim: SandboxClaim,
    sandbox: Option<Sandbox>,
    outdated: bool,
    transferred: bool,
    /// The answer to a write was lost.
    failed: bool,
}

/// What goes wrong in a pass.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// The process ends after so many writes.
    pub crash_after: usize,
    /// The answer to the write that gives the claim its sandbox is lost.
    pub loses_answer: bool,
}

impl Faults {
    pub const NONE: Self = Self {
        crash_after: usize::MAX,
        loses_answer: false,
    };
}

impl Process {
    /// One pass over a claim, as the controller makes it, while this goes wrong.
    pub fn reconcile_claim(
        &mut self,
        server: &mut Server,
        name: &str,
        faults: Faults,
    ) -> Result<(), Crash> {
        let mut writes_left = faults.crash_after;
        for _ in 0..3 {
            let Some(claim) = self.claims.get(name).cloned() else {
                return Ok(());
            };
            if self.attempt(server, &claim, &mut writes_left, faults.loses_answer)? {
                return Ok(());
            }
            self.see_claim(server, name);
        }
        Ok(())
    }

    /// False if what was decided upon had changed.
    fn attempt(
        &mut self,
        server: &mut Server,
        claim: &SandboxClaim,
        writes_left: &mut usize,
        loses_answer: bool,
    ) -> Result<bool, Crash> {
        let found = self.look_up(server, claim);
        let held = holding(claim, &found);
        let (pools, templates) = (server.pools.clone(), server.templates.clone());
        let pool = match (held, claim.spec.source()) {
            (Holding::Owned(_), _) => Lookup::NotAsked,
            (_, Ok(ClaimSource::Pool { pool })) => look_up_in(&pools, pool),
            _ => Lookup::NotAsked,
        };
        let template = template_name(claim, held, pool)
            .map_or(Lookup::NotAsked, |name| look_up_in(&templates, name));
        let reserved = warm_request(claim, pool, held)
            .and_then(|request| self.queue.take(&request))
            .map(|taken| taken.key);
        let candidate = reserved
            .as_ref()
            .and_then(|key| self.sandboxes.get(&key.name))
            .cloned();
        let uid = claim.uid().unwrap();
        let namesake = self
            .sandboxes
            .get(&claim.name_any())
            .filter(|sandbox| !is_controlled_by(&sandbox.metadata, &uid))
            .cloned();
        let plan = decide(
            &claim::Observed {
                claim,
                pool,
                template,
                holding: held,
                unreadable: None,
                namesake: namesake.as_ref(),
                candidate: candidate.as_ref(),
                legacy_policy: None,
                first_observed: server.now(),
            },
            server.now(),
        );
        let owned = match held {
            Holding::Owned(sandbox) => Some(sandbox.clone()),
            _ => None,
        };
        let mut progress = Progress {
            claim: claim.clone(),
            sandbox: owned,
            outdated: false,
            transferred: false,
            failed: false,
        };
        for effect in &plan.effects {
            spend(writes_left)?;
            if loses_answer && let Some(sandbox) = acquired_by(effect) {
                carry_out_unanswered(server, effect, &mut progress);
                self.acquired.insert(uid.clone(), sandbox);
            } else {
                self.carry_out(server, effect, &mut progress);
            }
            server.check();
            if progress.outdated || progress.failed {
                break;
            }
        }
        if let Some(key) = reserved.filter(|_| !progress.transferred) {
            self.queue.release(&key);
        }
        if progress.outdated {
            return Ok(false);
        }
        spend(writes_left)?;
        if progress.failed {
            let obstacle = Obstacle::new(Reason::ReconcilerError, "the answer was lost");
            publish(server, &Verdict::Blocked(obstacle), &progress);
        } else {
            publish(server, &plan.verdict, &progress);
        }
        Ok(true)
    }

    fn look_up(
        &mut self,
        server: &Server,
        claim: &SandboxClaim,
    ) -> Vec<(String, Option<Arc<Sandbox>>)> {
        let mut found: Vec<(String, Option<Arc<Sandbox>>)> = names_to_look_up(claim)
            .into_iter()
            .map(|name| {
                let cached = self.sandboxes.get(name).cloned().map(Arc::new);
                (name.to_owned(), cached)
            })
            .collect();
        let uid = claim.uid().unwrap();
        let controlled = self
            .sandboxes
            .values()
            .filter(|sandbox| is_controlled_by(&sandbox.metadata, &uid));
        found.extend(
            controlled.map(|sandbox| (sandbox.name_any(), Some(Arc::new(sandbox.clone())))),
        );
        if let Some(name) = self.acquired.remove(&uid)
            && !matches!(holding(claim, &found), Holding::Owned(_))
        {
            self.confirm(server, &name, &mut found);
        }
        if let Holding::Broken { name } = holding(claim, &found) {
            let name = name.to_owned();
            self.confirm(server, &name, &mut found);
        }
        found
    }

    /// Asks the server for a sandbox.
    fn confirm(
        &mut self,
        server: &Server,
        name: &str,
        found: &mut Vec<(String, Option<Arc<Sandbox>>)>,
    ) {
        self.see_sandbox(server, name);
        found.retain(|(looked_up, _)| looked_up != name);
        let live = server.sandboxes.get(name).cloned().map(Arc::new);
        found.push((name.to_owned(), live));
    }

    fn carry_out(&mut self, server: &mut Server, effect: &Effect, progress: &mut Progress) {
        let answer = match effect {
            Effect::Bind { patch, .. } | Effect::Unbind { patch } => server
                .patch_claim(&progress.claim, patch)
                .map(|bound| progress.claim = bound),
            Effect::Transfer {
                sandbox: version,
                patch,
            }
            | Effect::SyncMetadata {
                sandbox: version,
                patch,
            } => {
                let answer = server.patch_sandbox(version, patch);
                self.see_sandbox(server, &version.name);
                progress.transferred |= answer.is_ok();
                answer.map(|changed| progress.sandbox = Some(changed))
            }
            Effect::Create { sandbox } => {
                let answer = server.create_sandbox((**sandbox).clone());
                self.see_sandbox(server, &sandbox.name_any());
                answer.map(|made| progress.sandbox = Some(made))
            }
            Effect::DeleteSandbox { sandbox: version } => {
                let current = server.sandboxes.get(&version.name);
                let is_same =
                    current.is_some_and(|current| current.uid().as_ref() == Some(&version.uid));
                if is_same {
                    server.sandboxes.remove(&version.name);
                }
                self.see_sandbox(server, &version.name);
                progress.sandbox = None;
                if is_same {
                    Ok(())
                } else {
                    Err(Refused::NotFound)
                }
            }
            Effect::DeleteClaim { .. } => {
                let name = progress.claim.name_any();
                let current = server.claims.get(&name);
                if current.is_some_and(|current| current.uid() == progress.claim.uid()) {
                    server.delete_claim(&name);
                }
                Ok(())
            }
            Effect::DeleteLegacyPolicy { policy } => panic!("nobody made {policy:?}"),
        };
        progress.outdated = answer.is_err();
    }
}

/// Carries out an effect that gives the claim its sandbox, and does not learn what came of it.
fn carry_out_unanswered(server: &mut Server, effect: &Effect, progress: &mut Progress) {
    match effect {
        Effect::Transfer { sandbox, patch } => {
            let _ = server.patch_sandbox(sandbox, patch);
        }
        Effect::Create { sandbox } => {
            let _ = server.create_sandbox((**sandbox).clone());
        }
        other => panic!("{other:?} gives no sandbox to a claim"),
    }
    progress.failed = true;
}

/// The sandbox that becomes the claim's by an effect.
fn acquired_by(effect: &Effect) -> Option<String> {
    match effect {
        Effect::Transfer { sandbox, .. } => Some(sandbox.name.clone()),
        Effect::Create { sandbox } => Some(sandbox.name_any()),
        _ => None,
    }
}

fn look_up_in<'a, K>(objects: &'a BTreeMap<String, K>, name: &str) -> Lookup<'a, K> {
    objects.get(name).map_or(Lookup::Missing, Lookup::Found)
}

fn publish(server: &mut Server, verdict: &Verdict, progress: &Progress) {
    let sandbox = progress.sandbox.as_ref();
    let report = match verdict {
        Verdict::Silent => return,
        Verdict::Blocked(obstacle) => Report::Blocked { obstacle, sandbox },
        Verdict::Expired => Report::Expired { sandbox },
        Verdict::Reflect => Report::Reflects { sandbox },
    };
    let status = claim::status(&progress.claim, &report, server.now());
    let revision = server.next_revision();
    if let Some(stored) = server.claims.get_mut(&progress.claim.name_any())
        && stored.uid() == progress.claim.uid()
        && stored.status.as_ref() != Some(&status)
    {
        stored.status = Some(status);
        stored.metadata.resource_version = Some(revision);
    }
}

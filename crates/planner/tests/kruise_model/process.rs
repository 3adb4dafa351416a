//! What a process knows, and the passes that it makes over claims.

use std::collections::BTreeMap;

use agent_sandbox_planner::kruise_claim::{
    Entry, Initialisation, Life, Next, NextBatch, Outcome, Pick, Surroundings, Verdict,
    agrees_with_status, batch, decide, held_besides, life, next, progress, status,
};
use agent_sandbox_planner::sandbox_set::candidate;
use agent_sandbox_planner::warm_queue::{Request, WarmQueue};
use api::Sandbox;
use api::kruise::SandboxClaim;
use kube::ResourceExt;

use super::server::{SET_UID, Server};
use super::writes::{Crash, NAMESPACE, key_of};

/// What a process knows, and loses when it ends.
#[derive(Default)]
pub struct Process {
    claims: BTreeMap<String, SandboxClaim>,
    sandboxes: BTreeMap<String, Sandbox>,
    queue: WarmQueue,
    names_made: u32,
}

impl Process {
    pub fn started(server: &Server) -> Self {
        let mut process = Self::default();
        process.catch_up(server);
        process
    }

    pub fn catch_up(&mut self, server: &Server) {
        self.claims = server.claims.clone();
        let known = self.sandboxes.keys().chain(server.sandboxes.keys());
        let names: Vec<String> = known.cloned().collect();
        for name in names {
            self.see(server, &name);
        }
    }

    /// An event of the watch, or an answer of the server, about one sandbox.
    pub fn see(&mut self, server: &Server, name: &str) {
        let sandbox = server.sandboxes.get(name);
        match sandbox.and_then(candidate) {
            Some(candidate) => self.queue.observe(candidate),
            None => self.queue.withdraw(&key_of(name)),
        }
        match sandbox {
            Some(sandbox) => self.sandboxes.insert(name.to_owned(), sandbox.clone()),
            None => self.sandboxes.remove(name),
        };
    }

    pub fn see_claim(&mut self, server: &Server, name: &str) {
        match server.claims.get(name) {
            Some(claim) => self.claims.insert(name.to_owned(), claim.clone()),
            None => self.claims.remove(name),
        };
    }

    /// One reconcile, as the controller makes it, in a process that ends after so many writes.
    pub fn reconcile(
        &mut self,
        server: &mut Server,
        name: &str,
        mut writes: usize,
    ) -> Result<(), Crash> {
        for _ in 0..4 {
            let Some(claim) = self.claims.get(name).cloned() else {
                return Ok(());
            };
            if life(&claim, server.now()) != Life::Active {
                return Ok(());
            }
            let mut outcomes = Vec::new();
            for pick in batch(&claim) {
                let outcome = self.settle(server, &claim, &pick, &mut writes)?;
                outcomes.push((pick, outcome));
            }
            let seen = self.sandboxes.values().map(|sandbox| &sandbox.metadata);
            let mut held = held_besides(&claim, seen);
            if !agrees_with_status(&claim, held) {
                let listed = server.sandboxes.values().map(|sandbox| &sandbox.metadata);
                held = held_besides(&claim, listed);
            }
            let progress = progress(&claim, held, outcomes);
            if progress.unsettled.is_empty() {
                for pick in batch(&claim) {
                    self.queue.release(&key_of(&pick.name));
                }
            }
            let surroundings = Surroundings {
                set_exists: server.set.is_some(),
                paused_until: None,
                max_batch: 2,
                now: server.now(),
            };
            let verdict = decide(&claim, &progress, &surroundings);
            let next = match verdict {
                Verdict::Claim(count) => self.pick(&claim, count),
                _ => NextBatch::default(),
            };
            let status = status(&claim, &progress, &verdict, &next, server.now());
            let is_new = claim.status.as_ref() != Some(&status);
            if is_new {
                spend(&mut writes)?;
                let written = server.write_status(&claim, status);
                server.check();
                if written.is_err() {
                    for name in &next.claiming {
                        self.queue.release(&key_of(name));
                    }
                    self.see_claim(server, name);
                    continue;
                }
                self.see_claim(server, name);
            }
            if next.is_empty() {
                return Ok(());
            }
        }
        Ok(())
    }

    fn pick(&mut self, claim: &SandboxClaim, count: usize) -> NextBatch {
        let request = Request {
            namespace: NAMESPACE.into(),
            template_hash: SET_UID.into(),
            pool_hash: None,
        };
        let taken = std::iter::from_fn(|| self.queue.take(&request).map(|taken| taken.key.name));
        let claiming: Vec<String> = taken.take(count).collect();
        let mut creating = Vec::new();
        if claim.spec.create_on_no_stock == Some(true) {
            for _ in claiming.len()..count {
                self.names_made += 1;
                creating.push(format!("made-{}-{}", claim.uid().unwrap(), self.names_made));
            }
        }
        NextBatch { claiming, creating }
    }

    fn settle(
        &mut self,
        server: &mut Server,
        claim: &SandboxClaim,
        pick: &Pick,
        writes: &mut usize,
    ) -> Result<Outcome, Crash> {
        let mut initialisation = Initialisation::Untried;
        if !self.sandboxes.contains_key(&pick.name) {
            self.see(server, &pick.name);
        }
        let mould = (server.set.clone(), server.mould.clone());
        for _ in 0..8 {
            let sandbox = self.sandboxes.get(&pick.name).cloned();
            let entry = Entry {
                name: &pick.name,
                origin: pick.origin,
                sandbox: sandbox.as_ref(),
                initialisation: &initialisation,
                mould: mould.0.as_ref().map(|set| (set, &mould.1)),
                token: "token",
            };
            match next(claim, &entry, server.now()) {
                Next::Settled(outcome) => return Ok(outcome),
                Next::Initialise { .. } => {
                    initialisation = if server.broken.contains(&pick.name) {
                        Initialisation::Refused("broken".into())
                    } else {
                        Initialisation::Done
                    };
                }
                Next::Take { sandbox, patch } | Next::SetAside { sandbox, patch, .. } => {
                    spend(writes)?;
                    let _ = server.patch(&sandbox, &patch);
                }
                Next::Make { sandbox } => {
                    spend(writes)?;
                    let _ = server.create(*sandbox);
                }
                Next::Release { sandbox, .. } => {
                    spend(writes)?;
                    let released = server.delete(&sandbox).is_ok();
                    if released {
                        self.see(server, &pick.name);
                        return Ok(Outcome::Failed);
                    }
                }
            }
            server.check();
            self.see(server, &pick.name);
        }
        Ok(Outcome::Unsettled)
    }
}

/// Counts a write of a process that ends after so many.
fn spend(writes_left: &mut usize) -> Result<(), Crash> {
    *writes_left = writes_left.checked_sub(1).ok_or(Crash)?;
    Ok(())
}

//! Finds a sandbox's current address: in the registry, with a short wait for a lagging watch, or by DNS if there is no watch.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use api::addresses::is_a_pods;
use saturating_time::SaturatingTime;
use tokio::time::Instant;

use crate::failure::Failure;
use crate::identify::SandboxKey;
use crate::registry::{Lookup, Registry};
use crate::upstream::Upstream;

/// How long a sandbox that looks suspended is waited for: it may have been resumed, with the watch lagging briefly.
const SUSPENDED_WAIT: Duration = Duration::from_millis(250);
/// How long a DNS response is cached.
const DNS_LIFETIME: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct Resolver {
    pub registry: Arc<Registry>,
    cluster_domain: String,
    wait: Duration,
    /// Set while sandboxes cannot be watched.
    by_name: AtomicBool,
    named: papaya::HashMap<String, (Arc<Upstream>, Instant)>,
}

impl Resolver {
    pub fn new(registry: Arc<Registry>, cluster_domain: String, wait: Duration) -> Self {
        Self {
            registry,
            cluster_domain,
            wait,
            by_name: AtomicBool::new(false),
            named: papaya::HashMap::new(),
        }
    }

    /// Whether sandboxes that the registry does not know are resolved by DNS.
    pub fn set_by_name(&self, by_name: bool) {
        self.by_name.store(by_name, Ordering::Release);
    }

    pub fn is_by_name(&self) -> bool {
        self.by_name.load(Ordering::Acquire)
    }

    pub async fn resolve(&self, key: &SandboxKey) -> Result<Arc<Upstream>, Failure> {
        match self.registry.lookup(key) {
            Lookup::Routable(upstream) => Ok(upstream),
            Lookup::Unknown if self.is_by_name() => self.resolve_by_dns(key).await,
            _ => self.wait_for(key).await,
        }
    }

    /// The sandbox behind a name that no sandbox has: a claim of that name may be about to be bound.
    pub async fn wait_for_name(&self, key: &SandboxKey) -> Result<SandboxKey, Failure> {
        let deadline = Instant::now().later_by(self.wait);
        let ticket = self.registry.wait_for(key);
        loop {
            let changed = ticket.changed();
            if let Some(sandbox) = self.registry.named(key) {
                return Ok(sandbox);
            }
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                return Err(describe(key, Lookup::Unknown, self.wait).0);
            }
        }
    }

    async fn wait_for(&self, key: &SandboxKey) -> Result<Arc<Upstream>, Failure> {
        let started = Instant::now();
        let ticket = self.registry.wait_for(key);
        loop {
            let changed = ticket.changed();
            let (failure, timeout) = match self.registry.lookup(key) {
                Lookup::Routable(upstream) => return Ok(upstream),
                lookup => describe(key, lookup, self.wait),
            };
            let remaining = started
                .later_by(timeout)
                .saturating_duration_since(Instant::now());
            if remaining.is_zero() || tokio::time::timeout(remaining, changed).await.is_err() {
                return Err(failure);
            }
        }
    }

    /// The DNS name of a sandbox's Service.
    fn service_name(&self, key: &SandboxKey) -> String {
        let (name, namespace) = (key.name(), key.namespace());
        format!("{name}.{namespace}.svc.{}", self.cluster_domain)
    }

    async fn resolve_by_dns(&self, key: &SandboxKey) -> Result<Arc<Upstream>, Failure> {
        let now = Instant::now();
        if let Some((upstream, until)) = self.named.pin().get(key.as_str())
            && now < *until
        {
            return Ok(Arc::clone(upstream));
        }
        let host = self.service_name(key);
        let cannot_connect = || Failure::CannotConnect {
            name: key.name().to_owned(),
        };
        let found = tokio::net::lookup_host((host, 0))
            .await
            .map_err(|_| cannot_connect())?;
        let mut addresses: Vec<IpAddr> = found
            .map(|address| address.ip())
            .filter(|&ip| is_a_pods(ip))
            .collect();
        addresses.dedup();
        if addresses.is_empty() {
            return Err(cannot_connect());
        }
        let named = self.named.pin();
        let previous = named.get(key.as_str()).map(|(upstream, _)| upstream);
        let upstream = match previous {
            Some(previous) if previous.addresses() == addresses => Arc::clone(previous),
            previous => {
                if let Some(previous) = previous {
                    previous.retire();
                }
                Arc::new(Upstream::new(addresses))
            }
        };
        named.insert(
            key.as_str().to_owned(),
            (Arc::clone(&upstream), now.later_by(DNS_LIFETIME)),
        );
        Ok(upstream)
    }

    /// Closes idle connections and removes unused DNS entries.
    pub fn close_idle(&self, now: Instant) {
        self.registry.close_idle(now);
        let named = self.named.pin();
        named.retain(|_, (_, until)| until.later_by(Duration::from_secs(60)) > now);
        for (upstream, _) in named.values() {
            upstream.close_idle(now);
        }
    }
}

/// The failure to report for a sandbox in this state, and how long to wait for the state to change.
fn describe(key: &SandboxKey, lookup: Lookup, wait: Duration) -> (Failure, Duration) {
    let (namespace, name) = (key.namespace().to_owned(), key.name().to_owned());
    match lookup {
        Lookup::Suspended(how) => (
            Failure::Suspended {
                namespace,
                name,
                how,
            },
            wait.min(SUSPENDED_WAIT),
        ),
        Lookup::Finished(reason) => (
            Failure::Finished {
                namespace,
                name,
                reason,
            },
            Duration::ZERO,
        ),
        Lookup::NotReady(reason) => (
            Failure::NotReady {
                namespace,
                name,
                reason,
            },
            wait,
        ),
        // Clients must not learn whether a sandbox of this name waits in a pool.
        Lookup::Unknown | Lookup::Unclaimed | Lookup::Routable(_) => {
            (Failure::NotFound { namespace, name }, wait)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_names_end_with_the_cluster_domain() {
        let resolver = Resolver::new(Arc::default(), "corp.example".into(), Duration::ZERO);
        assert_eq!(
            resolver.service_name(&SandboxKey::new("team", "abc")),
            "abc.team.svc.corp.example"
        );
    }
}

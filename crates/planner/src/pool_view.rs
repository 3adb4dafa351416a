//! The sandboxes of a pool and the demand for them, as a pass over any kind of pool sees them; and the plan that it makes.
//!
//! [`warm_pool`](crate::warm_pool) and [`sandbox_set`](crate::sandbox_set) decide which sandboxes are members and of what revision;
//! [`pool`](crate::pool) decides how many there should be.

use std::sync::Arc;
use std::time::Duration;

use api::Sandbox;
use api::conditions::{self, ConditionType};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::jiff::Timestamp;
use kube::Resource;

use crate::owner::{controller_reference, with_controller};
use crate::pacing::Demand;
use crate::pool::{Deletion, Member, Readiness, Revision};
use crate::version::Version;

/// How long a member may be not Ready before it is replaced.
pub const READINESS_GRACE: Duration = Duration::from_secs(5 * 60);

/// A pool's sandboxes, and the demand for them, as one pass sees them.
#[derive(Clone, Copy, Debug)]
pub struct PoolView<'a> {
    /// Every sandbox that carries the pool's label.
    pub sandboxes: &'a [Arc<Sandbox>],
    /// Those of them that a claim has reserved.
    pub is_reserved: &'a dyn Sandboxes,
    /// Those of them that were deleted although the cache does not show it.
    pub going: &'a dyn Sandboxes,
    /// How many sandboxes were made that the cache does not show.
    pub unseen: usize,
    pub demand: Demand,
    /// Since when the pool holds back refills, if it does.
    pub held_back_since: Option<Timestamp>,
    pub max_batch: usize,
}

impl<'a> PoolView<'a> {
    /// The sandboxes that are not going.
    pub(crate) fn staying(&self) -> impl Iterator<Item = &'a Sandbox> {
        let (sandboxes, going) = (self.sandboxes, self.going);
        let sandboxes = sandboxes.iter().map(Arc::as_ref);
        sandboxes.filter(|sandbox| {
            sandbox.metadata.deletion_timestamp.is_none() && !going.holds(sandbox)
        })
    }
}

/// A set of sandboxes.
pub trait Sandboxes {
    fn holds(&self, sandbox: &Sandbox) -> bool;
}

impl std::fmt::Debug for dyn Sandboxes + '_ {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Sandboxes")
    }
}

/// An unowned sandbox with the pool's label that the pool takes in.
#[derive(Clone, Debug, PartialEq)]
pub struct Adoption {
    pub sandbox: Version,
    pub owner_references: Vec<OwnerReference>,
}

/// What to do about a pool whose status is an `S`.
#[derive(Clone, Debug, Default)]
pub struct PoolPlan<S> {
    pub adoptions: Vec<Adoption>,
    pub deletions: Vec<Deletion>,
    /// How many sandboxes to make, and of what.
    pub creations: Option<(usize, Box<Sandbox>)>,
    pub status: S,
    /// Whether the pool pauses refills because claims wait.
    pub holds_back: bool,
    /// When to reconcile again without a change.
    pub recheck_after: Option<Duration>,
}

/// A sandbox as the pool's arithmetic sees it.
pub(crate) fn member(sandbox: &Sandbox, revision: Revision, is_reserved: bool) -> Member {
    let created = sandbox
        .metadata
        .creation_timestamp
        .as_ref()
        .map_or(Timestamp::UNIX_EPOCH, |time| time.0);
    let conditions = sandbox
        .status
        .as_ref()
        .map_or(&[][..], |status| &status.conditions);
    let readiness = if conditions::is_true(conditions, ConditionType::Ready) {
        Readiness::Ready
    } else {
        // A member that was Ready before gets a new grace period: a restart of a node must not empty a pool.
        let lost = conditions::find(conditions, ConditionType::Ready)
            .map(|ready| ready.last_transition_time.0);
        Readiness::Since(lost.map_or(created, |lost| lost.max(created)))
    };
    Member {
        version: Version::of(sandbox),
        created,
        readiness,
        revision,
        is_reserved,
    }
}

/// Makes an unowned sandbox the pool's.
pub(crate) fn adoption<K: Resource<DynamicType = ()>>(pool: &K, sandbox: &Sandbox) -> Adoption {
    Adoption {
        sandbox: Version::of(sandbox),
        owner_references: with_controller(&sandbox.metadata, controller_reference(pool)),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

    use super::*;

    pub(crate) fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    pub(crate) fn ready(holds: bool, since: i64) -> Condition {
        Condition {
            type_: "Ready".into(),
            status: if holds { "True" } else { "False" }.into(),
            reason: "X".into(),
            message: String::new(),
            observed_generation: None,
            last_transition_time: Time(at(since)),
        }
    }

    /// A sandbox that was made, and has become Ready.
    pub(crate) fn made(mut sandbox: Sandbox, name: &str) -> Sandbox {
        sandbox.metadata.name = Some(name.into());
        sandbox.metadata.uid = Some(format!("uid-{name}"));
        sandbox.metadata.resource_version = Some("1".into());
        sandbox.metadata.creation_timestamp = Some(Time(at(1_000)));
        sandbox.status = Some(api::SandboxStatus {
            conditions: vec![ready(true, 1_001)],
            ..api::SandboxStatus::default()
        });
        sandbox
    }

    /// No sandboxes at all.
    #[derive(Debug)]
    struct Nothing;

    impl Sandboxes for Nothing {
        fn holds(&self, _: &Sandbox) -> bool {
            false
        }
    }

    /// Sandboxes that are neither reserved nor being deleted, without waiting claims.
    pub(crate) fn undisturbed(sandboxes: &[Arc<Sandbox>]) -> PoolView<'_> {
        PoolView {
            sandboxes,
            is_reserved: &Nothing,
            going: &Nothing,
            unseen: 0,
            demand: Demand::default(),
            held_back_since: None,
            max_batch: 300,
        }
    }
}

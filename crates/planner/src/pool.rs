//! How a pool of interchangeable sandboxes is kept at its size and revision.
//!
//! Only the arithmetic: [`warm_pool`](crate::warm_pool) and [`sandbox_set`](crate::sandbox_set) decide which sandboxes are members, and
//! which revision is current.
//!
//! # Guarantees
//! - Members and sandboxes asked for never exceed the desired number, unless they already did: a sandbox that is to be deleted is
//!   only replaced once it is seen to go.
//! - A member that a claim has reserved is never deleted, and counts until it is gone.
//! - A rolling update never makes a Ready member unavailable while more than the allowed number are missing.

mod pass;

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use k8s_openapi::jiff::Timestamp;

pub(crate) use pass::template;
pub use pass::{Environment, Memory, Pool, reconcile};

use crate::pacing::{Allowance, Demand, Pacing, elapsed};
use crate::version::Version;

/// Whether a member is of the current revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Revision {
    /// The same.
    Current,
    /// An older revision of the same template: still of use to a claim.
    Outdated,
    /// Another template: of no use to claims of this pool.
    Foreign,
}

/// Whether a member can be handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    Ready,
    /// Not Ready since this time.
    Since(Timestamp),
}

/// An unclaimed sandbox of the pool that is not being deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub version: Version,
    pub created: Timestamp,
    pub readiness: Readiness,
    pub revision: Revision,
    /// A claim has reserved it.
    pub is_reserved: bool,
}

/// The update strategy for members that are not current.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// They stay until they are claimed.
    OnReplenish,
    /// They are deleted at once.
    Recreate,
    /// They are replaced, with at most so many members missing at a time.
    RollingUpdate { max_unavailable: usize },
}

/// The desired state of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Goal {
    pub desired: usize,
    pub strategy: Strategy,
    /// How many sandboxes one pass makes, and how many it deletes.
    pub max_batch: usize,
    /// How long a member may be not Ready.
    pub readiness_grace: Duration,
}

/// Why a member is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// It did not become Ready in time.
    Stuck,
    /// It is not of the current revision.
    Outdated,
    /// There are more members than asked for.
    Excess,
}

/// A member to delete, as of the state it was seen in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deletion {
    pub version: Version,
    pub cause: Cause,
}

/// The counts of a pool's members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub replicas: usize,
    pub ready: usize,
    pub updated: usize,
    /// Of the current revision, and Ready.
    pub updated_ready: usize,
}

/// What to do about the pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScalePlan {
    pub deletions: Vec<Deletion>,
    /// How many sandboxes to make.
    pub creations: usize,
    /// What is left once the stuck and the outdated are deleted.
    pub counts: Counts,
    /// More is to be done than one batch holds.
    pub unfinished: bool,
    /// When a member's grace ends.
    pub recheck_after: Option<Duration>,
}

/// Decides what to do about a pool, given its members and how many more were made but are not seen yet.
pub fn plan(members: &[Member], unseen: usize, goal: &Goal, now: Timestamp) -> ScalePlan {
    let (stuck, rest): (Vec<&Member>, Vec<&Member>) = members
        .iter()
        .partition(|member| is_stuck(member, goal, now));
    let (outdated, remaining) = split_outdated(rest, goal);
    let counts = count(&remaining);
    let excess = (remaining.len() + unseen).saturating_sub(goal.desired);
    let surplus = surplus(remaining, excess);
    let mut deletions: Vec<Deletion> = [
        (stuck, Cause::Stuck),
        (outdated, Cause::Outdated),
        (surplus, Cause::Excess),
    ]
    .into_iter()
    .flat_map(|(members, cause)| {
        members
            .into_iter()
            .map(move |member| deletion(member, cause))
    })
    .collect();

    // Those to be deleted still count: the deletion may fail, and asking for N must never make more than N.
    let missing = goal.desired.saturating_sub(members.len() + unseen);
    let unfinished = missing > goal.max_batch || deletions.len() > goal.max_batch;
    deletions.truncate(goal.max_batch);
    ScalePlan {
        deletions,
        creations: missing.min(goal.max_batch),
        counts,
        unfinished,
        recheck_after: next_grace_end(members, goal, now),
    }
}

/// What limits the creation of missing sandboxes.
#[derive(Clone, Copy, Debug)]
pub struct Restraint<'a> {
    pub pacing: &'a Pacing,
    pub demand: Demand,
    /// Since when the pool holds back refills, if it does.
    pub held_back_since: Option<Timestamp>,
    /// How many sandboxes can be made at all.
    pub at_most: usize,
}

/// How many of the missing sandboxes are created now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refill {
    pub count: usize,
    /// Whether the pool holds back for the sake of claims.
    pub holds_back: bool,
    /// When to reconcile again without a change.
    pub recheck_after: Option<Duration>,
}

/// Decides how much of a plan's creations are made now.
pub fn refill(plan: &ScalePlan, goal: &Goal, restraint: &Restraint<'_>, now: Timestamp) -> Refill {
    let mut refill = Refill {
        recheck_after: plan.recheck_after,
        ..Refill::default()
    };
    let wanted = plan.creations.min(restraint.at_most);
    if wanted > 0 {
        let allowance = restraint.pacing.allow(
            restraint.demand,
            goal.max_batch,
            restraint.held_back_since,
            now,
        );
        match allowance {
            Allowance::Make(allowed) => {
                refill.count = wanted.min(allowed);
                if refill.count < wanted {
                    refill.look_again_after(restraint.pacing.recheck);
                }
            }
            Allowance::HoldBack(delay) => {
                refill.holds_back = true;
                refill.look_again_after(delay);
            }
        }
    }
    // If nothing can be done now, reconciling at once would change nothing.
    let makes_headway = refill.count > 0 || !plan.deletions.is_empty();
    if plan.unfinished && makes_headway && !refill.holds_back {
        refill.look_again_after(Duration::ZERO);
    }
    refill
}

impl Refill {
    fn look_again_after(&mut self, delay: Duration) {
        self.recheck_after = Some(self.recheck_after.map_or(delay, |known| known.min(delay)));
    }
}

/// The sizes of the batches that `count` requests are sent in: one, then twice as many each time, so that an error that
/// affects all requests (slow start) fails few of them.
pub fn slow_start(count: usize) -> impl Iterator<Item = usize> {
    let mut left = count;
    let mut next = 1;
    std::iter::from_fn(move || {
        let batch = next.min(left);
        left -= batch;
        next *= 2;
        (batch > 0).then_some(batch)
    })
}

/// A number or a percentage of `desired`, rounded down, but at least one: a rollout must make progress.
pub fn max_unavailable(field: Option<&IntOrString>, desired: usize) -> usize {
    const DEFAULT_PERCENT: usize = 20;
    let percentage = |percent: usize| desired.saturating_mul(percent) / 100;
    let number = match field {
        None => percentage(DEFAULT_PERCENT),
        Some(IntOrString::Int(number)) => usize::try_from(*number).unwrap_or(0),
        Some(IntOrString::String(text)) => match text.strip_suffix('%') {
            Some(digits) => digits.parse().map(percentage),
            None => text.parse(),
        }
        // The schema admits nothing else, but an older one did.
        .unwrap_or_else(|_| percentage(DEFAULT_PERCENT)),
    };
    number.max(1)
}

fn is_stuck(member: &Member, goal: &Goal, now: Timestamp) -> bool {
    match member.readiness {
        Readiness::Ready => false,
        Readiness::Since(since) => {
            !member.is_reserved && elapsed(since, now) >= goal.readiness_grace
        }
    }
}

/// Splits off the members to delete because of their revision.
fn split_outdated<'a>(members: Vec<&'a Member>, goal: &Goal) -> (Vec<&'a Member>, Vec<&'a Member>) {
    let ready = members.iter().filter(|member| is_ready(member)).count();
    let (obsolete, mut staying): (Vec<&Member>, Vec<&Member>) =
        members.into_iter().partition(|member| {
            let obsolete = match goal.strategy {
                Strategy::OnReplenish => member.revision == Revision::Foreign,
                Strategy::Recreate | Strategy::RollingUpdate { .. } => {
                    member.revision != Revision::Current
                }
            };
            obsolete && !member.is_reserved
        });
    let Strategy::RollingUpdate { max_unavailable } = goal.strategy else {
        return (obsolete, staying);
    };
    // Unavailable members are deleted without limit; of the Ready ones as many as may be missing, the oldest first.
    let (mut ready_ones, mut going): (Vec<&Member>, Vec<&Member>) =
        obsolete.into_iter().partition(|member| is_ready(member));
    let must_stay = goal.desired.saturating_sub(max_unavailable);
    let dispensable = ready.saturating_sub(must_stay).min(ready_ones.len());
    ready_ones.sort_by_key(|member| member.created);
    staying.extend(ready_ones.split_off(dispensable));
    going.extend(ready_ones);
    (going, staying)
}

/// Deletes members that are not Ready first, then the newest: the oldest Ready members stay.
fn surplus(mut members: Vec<&Member>, excess: usize) -> Vec<&Member> {
    members.retain(|member| !member.is_reserved);
    members.sort_by(|one, other| {
        is_ready(one)
            .cmp(&is_ready(other))
            .then(other.created.cmp(&one.created))
            .then_with(|| one.version.name.cmp(&other.version.name))
    });
    members.truncate(excess);
    members
}

fn count(members: &[&Member]) -> Counts {
    let having =
        |condition: fn(&Member) -> bool| members.iter().filter(|member| condition(member)).count();
    Counts {
        replicas: members.len(),
        ready: having(|member| member.readiness == Readiness::Ready),
        updated: having(|member| member.revision == Revision::Current),
        updated_ready: having(|member| {
            member.revision == Revision::Current && member.readiness == Readiness::Ready
        }),
    }
}

fn next_grace_end(members: &[Member], goal: &Goal, now: Timestamp) -> Option<Duration> {
    members
        .iter()
        .filter_map(|member| match member.readiness {
            Readiness::Ready => None,
            Readiness::Since(since) => goal
                .readiness_grace
                .checked_sub(elapsed(since, now))
                .filter(|left| !left.is_zero()),
        })
        .min()
}

fn deletion(member: &Member, cause: Cause) -> Deletion {
    Deletion {
        version: member.version.clone(),
        cause,
    }
}

fn is_ready(member: &Member) -> bool {
    member.readiness == Readiness::Ready
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::strategy::Strategy as _;

    use super::Strategy;
    use super::*;

    const GRACE: Duration = Duration::from_secs(300);

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn now() -> Timestamp {
        at(1_000)
    }

    fn member(name: &str) -> Member {
        Member {
            version: Version {
                name: name.into(),
                uid: format!("uid-{name}"),
                resource_version: "1".into(),
            },
            created: at(900),
            readiness: Readiness::Ready,
            revision: Revision::Current,
            is_reserved: false,
        }
    }

    fn unready(name: &str) -> Member {
        Member {
            readiness: Readiness::Since(at(900)),
            ..member(name)
        }
    }

    fn outdated_member(name: &str) -> Member {
        Member {
            revision: Revision::Outdated,
            ..member(name)
        }
    }

    fn goal(desired: usize) -> Goal {
        Goal {
            desired,
            strategy: Strategy::OnReplenish,
            max_batch: 300,
            readiness_grace: GRACE,
        }
    }

    fn with_strategy(desired: usize, strategy: Strategy) -> Goal {
        Goal {
            strategy,
            ..goal(desired)
        }
    }

    fn deleted(plan: &ScalePlan) -> Vec<&str> {
        plan.deletions
            .iter()
            .map(|deletion| deletion.version.name.as_str())
            .collect()
    }

    #[test]
    fn a_pool_makes_what_is_missing_and_counts_what_it_has_not_seen_yet() {
        let members = [member("a")];
        assert_eq!(plan(&members, 0, &goal(4), now()).creations, 3);
        assert_eq!(plan(&members, 2, &goal(4), now()).creations, 1);
        assert_eq!(plan(&members, 3, &goal(4), now()).creations, 0);
        assert_eq!(plan(&members, 9, &goal(4), now()).creations, 0);
    }

    #[test]
    fn a_batch_is_bounded_and_says_that_more_is_to_come() {
        let bounded = Goal {
            max_batch: 2,
            ..goal(5)
        };
        let more = plan(&[], 0, &bounded, now());
        assert_eq!((more.creations, more.unfinished), (2, true));
        let members = ["a", "b", "c", "d"].map(member);
        let less = plan(
            &members,
            0,
            &Goal {
                desired: 0,
                ..bounded
            },
            now(),
        );
        assert_eq!((less.deletions.len(), less.unfinished), (2, true));
    }

    #[test]
    fn the_surplus_goes_unready_first_and_newest_first() {
        let aged = |name: &str, created| Member {
            created: at(created),
            ..member(name)
        };
        let members = [
            aged("ready-old", 800),
            aged("ready-new", 950),
            Member {
                created: at(850),
                ..unready("unready-old")
            },
            Member {
                created: at(960),
                ..unready("unready-new")
            },
        ];
        let order = plan(&members, 0, &goal(0), now());
        assert_eq!(
            deleted(&order),
            ["unready-new", "unready-old", "ready-new", "ready-old"]
        );
        assert!(
            order
                .deletions
                .iter()
                .all(|deletion| deletion.cause == Cause::Excess)
        );
        assert_eq!(
            deleted(&plan(&members, 0, &goal(3), now())),
            ["unready-new"]
        );
    }

    #[test]
    fn a_member_that_is_being_claimed_counts_but_is_not_deleted() {
        let claimed = Member {
            is_reserved: true,
            revision: Revision::Foreign,
            readiness: Readiness::Since(at(0)),
            ..member("claimed")
        };
        let emptied = plan(std::slice::from_ref(&claimed), 0, &goal(0), now());
        assert_eq!(deleted(&emptied), [""; 0]);
        assert_eq!(plan(&[claimed], 0, &goal(1), now()).creations, 0);
    }

    #[test]
    fn a_member_that_never_becomes_ready_goes_after_its_grace() {
        let since = |second| Member {
            readiness: Readiness::Since(at(second)),
            ..member("a")
        };
        let stuck = plan(&[since(700)], 0, &goal(1), now());
        assert_eq!(stuck.deletions[0].cause, Cause::Stuck);
        assert_eq!(stuck.counts.replicas, 0);
        assert_eq!(stuck.creations, 0, "it is replaced once it is seen to go");

        let starting = plan(&[since(701)], 0, &goal(1), now());
        assert_eq!(deleted(&starting), [""; 0]);
        assert_eq!(starting.recheck_after, Some(Duration::from_secs(1)));
    }

    #[test]
    fn each_strategy_deletes_what_it_says() {
        let members = [
            outdated_member("old-1"),
            outdated_member("old-2"),
            member("new"),
            Member {
                revision: Revision::Foreign,
                ..member("foreign")
            },
        ];
        let table = [
            (Strategy::OnReplenish, vec!["foreign"]),
            (Strategy::Recreate, vec!["old-1", "old-2", "foreign"]),
            (
                Strategy::RollingUpdate { max_unavailable: 1 },
                vec!["old-1"],
            ),
            (
                Strategy::RollingUpdate { max_unavailable: 2 },
                vec!["old-1", "old-2"],
            ),
        ];
        for (strategy, expected) in table {
            let plan = plan(&members, 0, &with_strategy(4, strategy), now());
            assert_eq!(deleted(&plan), expected, "{strategy:?}");
            assert_eq!(plan.counts.updated, 1);
        }
    }

    #[test]
    fn a_rolling_update_waits_for_its_replacements() {
        let rolling = with_strategy(4, Strategy::RollingUpdate { max_unavailable: 1 });
        let mut members = vec![
            outdated_member("old-1"),
            outdated_member("old-2"),
            outdated_member("old-3"),
            unready("new-1"),
        ];
        assert_eq!(deleted(&plan(&members, 0, &rolling, now())), [""; 0]);
        members[3] = member("new-1");
        assert_eq!(deleted(&plan(&members, 0, &rolling, now())), ["old-1"]);
        members[1].readiness = Readiness::Since(at(990));
        assert_eq!(
            deleted(&plan(&members, 0, &rolling, now())),
            ["old-2"],
            "what is unavailable anyway goes first, and is all that may be missing"
        );
    }

    #[test]
    fn the_allowed_unavailability_is_a_number_or_a_percentage() {
        let percent = |text: &str| Some(IntOrString::String(text.to_owned()));
        let table = [
            (None, 10, 2),
            (None, 3, 1),
            (Some(IntOrString::Int(4)), 10, 4),
            (Some(IntOrString::Int(0)), 10, 1),
            (percent("50%"), 5, 2),
            (percent("5"), 10, 5),
            (percent("nonsense"), 10, 2),
            (percent("99999999999999999999%"), 10, 2),
        ];
        for (field, desired, expected) in table {
            assert_eq!(
                max_unavailable(field.as_ref(), desired),
                expected,
                "{field:?}"
            );
        }
    }

    #[test]
    fn batches_double() {
        assert_eq!(slow_start(14).collect::<Vec<_>>(), [1, 2, 4, 7]);
        assert_eq!(slow_start(1).collect::<Vec<_>>(), [1]);
        assert_eq!(slow_start(0).count(), 0);
    }

    fn any_member(index: usize) -> impl proptest::strategy::Strategy<Value = Member> {
        let revision = prop_oneof![
            Just(Revision::Current),
            Just(Revision::Outdated),
            Just(Revision::Foreign)
        ];
        let readiness = prop_oneof![
            Just(Readiness::Ready),
            (600..1_000_i64).prop_map(|second| Readiness::Since(at(second)))
        ];
        (0..1_000_i64, readiness, revision, any::<bool>()).prop_map(
            move |(created, readiness, revision, is_reserved)| Member {
                created: at(created),
                readiness,
                revision,
                is_reserved,
                ..member(&index.to_string())
            },
        )
    }

    fn any_members() -> impl proptest::strategy::Strategy<Value = Vec<Member>> {
        (0..12_usize).prop_flat_map(|count| (0..count).map(any_member).collect::<Vec<_>>())
    }

    fn any_goal() -> impl proptest::strategy::Strategy<Value = Goal> {
        let strategy = prop_oneof![
            Just(Strategy::OnReplenish),
            Just(Strategy::Recreate),
            (1..4_usize).prop_map(|max_unavailable| Strategy::RollingUpdate { max_unavailable })
        ];
        (0..12_usize, 1..8_usize, strategy).prop_map(|(desired, max_batch, strategy)| Goal {
            desired,
            max_batch,
            ..with_strategy(desired, strategy)
        })
    }

    proptest! {
        #[test]
        fn asking_for_some_never_makes_more(members in any_members(), unseen in 0..5_usize, goal in any_goal()) {
            let plan = plan(&members, unseen, &goal, now());
            prop_assert!(plan.creations <= goal.max_batch && plan.deletions.len() <= goal.max_batch);
            prop_assert!(plan.creations == 0 || members.len() + unseen + plan.creations <= goal.desired);
            for deletion in &plan.deletions {
                let member = members.iter().find(|member| member.version == deletion.version).unwrap();
                prop_assert!(!member.is_reserved);
            }
            let mut unique: Vec<_> = plan.deletions.iter().map(|deletion| &deletion.version.uid).collect();
            unique.sort();
            unique.dedup();
            prop_assert_eq!(unique.len(), plan.deletions.len());
        }

        #[test]
        fn a_rolling_update_keeps_enough_members_ready(members in any_members(), desired in 0..12_usize, max_unavailable in 1..4_usize) {
            let rolling = with_strategy(desired, Strategy::RollingUpdate { max_unavailable });
            let ready = members.iter().filter(|member| member.readiness == Readiness::Ready).count();
            let plan = plan(&members, 0, &rolling, now());
            let lost = plan.deletions.iter().filter(|deletion| deletion.cause == Cause::Outdated).filter(|deletion| {
                members.iter().any(|member| member.version == deletion.version && member.readiness == Readiness::Ready)
            }).count();
            prop_assert!(lost == 0 || ready - lost >= desired.saturating_sub(max_unavailable));
        }

        #[test]
        fn a_pool_settles_at_its_size_and_revision(members in any_members(), goal in any_goal()) {
            let mut members: Vec<Member> = members.into_iter().map(|member| Member { is_reserved: false, ..member }).collect();
            let mut made = 0;
            for _ in 0..100 {
                let plan = plan(&members, 0, &goal, now());
                let all_ready = members.iter().all(is_ready);
                if plan.creations == 0 && plan.deletions.is_empty() && all_ready {
                    break;
                }
                members.retain(|member| plan.deletions.iter().all(|deletion| deletion.version != member.version));
                members.extend((0..plan.creations).map(|index| member(&format!("new-{}", made + index))));
                made += plan.creations;
                for member in &mut members {
                    member.readiness = Readiness::Ready;
                }
            }
            prop_assert_eq!(members.len(), goal.desired);
            if goal.strategy != Strategy::OnReplenish {
                prop_assert!(members.iter().all(|member| member.revision == Revision::Current));
            }
        }
    }
}

//! Decisions about a claim that has its sandbox: changes, leftovers, expiry.

use api::claim::Lifecycle;
use api::sandbox::PodMetadata;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::super::*;
use super::world::{NOW, World, at, bound_to, claim, owned, pairs, ready_condition, warm};
use crate::owner::controller_reference;

#[test]
fn later_metadata_changes_of_claim_and_template_reach_the_pod() {
    let mut world = World {
        sandboxes: vec![owned("w")],
        ..World::of(bound_to("w"))
    };
    world.claim.spec.additional_pod_metadata = Some(PodMetadata {
        labels: Some(pairs(&[("team", "ml")])),
        annotations: None,
    });
    world
        .template
        .as_mut()
        .unwrap()
        .spec
        .pod_template
        .metadata
        .labels = Some(pairs(&[("tier", "web")]));
    let plan = world.decide();
    let [Effect::SyncMetadata { sandbox, patch }] = plan.effects.as_slice() else {
        panic!("{:?}", plan.effects);
    };
    assert_eq!(sandbox.resource_version, "5");
    assert_eq!(
        patch["spec"]["podTemplate"]["metadata"]["labels"],
        serde_json::json!({"team": "ml", "tier": "web", "app": null})
    );
}

#[test]
fn without_its_template_a_claim_adds_metadata_and_says_what_it_cannot_change() {
    let mut world = World {
        sandboxes: vec![owned("w")],
        template: None,
        ..World::of(bound_to("w"))
    };
    assert_eq!(world.decide().effects, []);
    world.claim.spec.additional_pod_metadata = Some(PodMetadata {
        labels: Some(pairs(&[("team", "ml"), ("app", "mine")])),
        annotations: Some(pairs(&[("cost", "7")])),
    });
    let plan = world.decide();
    let [Effect::SyncMetadata { patch, .. }] = plan.effects.as_slice() else {
        panic!("{:?}", plan.effects);
    };
    assert_eq!(
        patch["spec"]["podTemplate"]["metadata"],
        serde_json::json!({ "labels": { "team": "ml" }, "annotations": { "cost": "7" } })
    );
    assert_eq!(plan.planned_status, PlannedStatus::Reflect);
    let why = plan.unapplied.unwrap();
    assert!(why.contains("app") && why.contains("\"py\""), "{why}");
    world.template = Some(super::world::template());
    assert_eq!(world.decide().unapplied, None);
}

#[test]
fn a_policy_of_older_controllers_goes_and_a_users_stays() {
    let mut policy = NetworkPolicy::default();
    policy.metadata.name = Some("mine-network-policy".into());
    let mut world = World {
        sandboxes: vec![owned("w")],
        legacy_policy: Some(policy.clone()),
        ..World::of(bound_to("w"))
    };
    assert_eq!(world.decide().effects, Vec::new());
    policy.metadata.owner_references = Some(vec![controller_reference(&claim())]);
    world.legacy_policy = Some(policy);
    assert!(matches!(
        world.decide().effects.as_slice(),
        [Effect::DeleteLegacyPolicy { .. }]
    ));
}

fn expiring(policy: ClaimShutdownPolicy, marked: bool) -> World {
    let mut claim = bound_to("w");
    claim.spec.lifecycle = Some(Lifecycle {
        shutdown_time: Some(Time(at(NOW))),
        shutdown_policy: Some(policy),
        ..Lifecycle::default()
    });
    let reason = if marked {
        "ClaimExpired"
    } else {
        "DependenciesReady"
    };
    claim.status = Some(api::SandboxClaimStatus {
        conditions: vec![ready_condition("False", reason, 900)],
        sandbox: None,
    });
    World {
        sandboxes: vec![owned("w")],
        ..World::of(claim)
    }
}

#[test]
fn an_expired_claim_says_so_before_it_cleans_up() {
    use ClaimShutdownPolicy::{Delete, DeleteForeground, Retain};
    for policy in [Delete, DeleteForeground, Retain] {
        let plan = expiring(policy, false).decide();
        assert_eq!(
            (plan.effects, plan.planned_status),
            (Vec::new(), PlannedStatus::Expired)
        );
        assert!(plan.announces_expiry);
        assert_eq!(plan.recheck_after, Some(Duration::ZERO));
    }
    let delete = expiring(Delete, true).decide();
    assert_eq!(delete.effects, [Effect::DeleteClaim { foreground: false }]);
    assert_eq!(delete.planned_status, PlannedStatus::Silent);
    let foreground = expiring(DeleteForeground, true).decide();
    assert_eq!(
        foreground.effects,
        [Effect::DeleteClaim { foreground: true }]
    );
    let retain = expiring(Retain, true).decide();
    assert!(
        matches!(retain.effects.as_slice(), [Effect::DeleteSandbox { sandbox }] if sandbox.uid == "uid-w")
    );
    assert_eq!(retain.planned_status, PlannedStatus::Expired);
    assert!(!retain.announces_expiry);
}

#[test]
fn expiry_never_deletes_a_sandbox_that_is_not_the_claims() {
    let mut world = expiring(ClaimShutdownPolicy::Retain, true);
    world.sandboxes = vec![warm("w")];
    let plan = world.decide();
    assert_eq!(
        (plan.effects, plan.planned_status),
        (Vec::new(), PlannedStatus::Expired)
    );
}

#[test]
fn a_claim_that_is_going_is_left_alone() {
    let mut world = expiring(ClaimShutdownPolicy::Delete, true);
    world.claim.metadata.deletion_timestamp = Some(Time(at(1)));
    let plan = world.decide();
    assert_eq!(
        (plan.effects, plan.planned_status),
        (Vec::new(), PlannedStatus::Silent)
    );
}

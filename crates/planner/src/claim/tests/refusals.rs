//! Invalid claims, and the messages in their status.

use api::claim::EnvVar;
use api::sandbox::{PersistentVolumeClaimTemplate, PodMetadata};

use super::super::*;
use super::world::{World, bound_to, claim, claim_by_pool, owned, pairs, pool, warm};

#[test]
fn what_is_missing_is_named_and_looked_for_again() {
    let no_template = World {
        template: None,
        candidate: Some(warm("w")),
        ..World::of(claim())
    };
    let plan = no_template.decide();
    assert_eq!(plan.recheck_after, Some(Duration::from_secs(60)));
    assert_eq!(
        no_template.blocked(),
        Obstacle::new(Reason::TemplateNotFound, "SandboxTemplate \"py\" not found")
    );
    let no_pool = World {
        template: None,
        ..World::of(claim_by_pool())
    };
    assert_eq!(
        no_pool.blocked(),
        Obstacle::new(
            Reason::WarmPoolNotFound,
            "SandboxWarmPool \"pool\" not found"
        )
    );
    let pool_without_template = World {
        pool: Some(pool()),
        ..no_pool
    };
    assert_eq!(
        pool_without_template.blocked().reason,
        Reason::TemplateNotFound
    );
}

#[test]
fn a_claim_that_has_its_sandbox_needs_no_template() {
    let world = World {
        template: None,
        sandboxes: vec![owned("w")],
        ..World::of(bound_to("w"))
    };
    assert_eq!(world.decide().planned_status, PlannedStatus::Reflect);
}

#[test]
fn invalid_fields_are_refused_by_name() {
    let metadata = |labels: &[(&str, &str)]| PodMetadata {
        labels: Some(pairs(labels)),
        annotations: None,
    };
    let mut restricted = claim();
    restricted.spec.additional_pod_metadata = Some(metadata(&[("kubernetes.io/x", "y")]));
    let mut router = claim();
    router.spec.additional_pod_metadata = Some(metadata(&[("app", "sandbox-router")]));
    let mut conflicting = claim();
    conflicting.spec.additional_pod_metadata = Some(metadata(&[("app", "other")]));
    let mut sourceless = claim();
    sourceless.spec.sandbox_template_ref = None;
    let mut with_env = claim();
    with_env.spec.env = Some(vec![EnvVar {
        name: "A".into(),
        ..EnvVar::default()
    }]);
    let mut cold_env = with_env.clone();
    cold_env.spec.warmpool = Some("none".into());
    let mut with_volumes = claim();
    with_volumes.spec.volume_claim_templates = Some(vec![PersistentVolumeClaimTemplate::default()]);
    let table = [
        (restricted, Reason::InvalidMetadata, "kubernetes.io/x"),
        (router, Reason::InvalidMetadata, "the router's"),
        (conflicting, Reason::InvalidMetadata, "\"app\""),
        (
            sourceless,
            Reason::InvalidConfiguration,
            "sandboxTemplateRef",
        ),
        (with_env, Reason::EnvVarsInjectionRejected, "spec.warmpool"),
        (
            cold_env,
            Reason::EnvVarsInjectionRejected,
            "envVarsInjectionPolicy",
        ),
        (
            with_volumes,
            Reason::VolumeClaimTemplatesError,
            "volumeClaimTemplatesPolicy",
        ),
    ];
    for (claim, reason, part) in table {
        for candidate in [None, Some(warm("w"))] {
            let world = World {
                candidate,
                ..World::of(claim.clone())
            };
            let obstacle = world.blocked();
            assert_eq!(obstacle.reason, reason);
            assert!(reason.is_final());
            assert!(obstacle.message.contains(part), "{}", obstacle.message);
        }
    }
}

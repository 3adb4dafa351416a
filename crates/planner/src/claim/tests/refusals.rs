//! Invalid claims, and the messages in their status.

use api::claim::EnvVar;
use api::sandbox::{
    PersistentVolumeClaimTemplate, PodMetadata, SuspensionStrategy, SuspensionType,
};
use api::template::TemplateSuspensionStrategy;

use super::super::*;
use super::world::{World, bound_to, claim, claim_by_pool, owned, pairs, pool, template, warm};

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
    let mut frozen = claim();
    frozen.spec.suspension_strategy = Some(SuspensionStrategy {
        kind: SuspensionType::Freeze,
    });
    let table = [
        (
            frozen,
            Reason::InvalidConfiguration,
            "spec.suspensionStrategy.type",
        ),
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

#[test]
fn a_claim_gets_the_strategy_it_chooses_warm_or_cold() {
    use SuspensionType::{Freeze, Stop};
    let strategy = |kind| SuspensionStrategy { kind };
    let mut freezing = template();
    freezing.spec.suspension_strategy = Some(TemplateSuspensionStrategy {
        kind: Freeze,
        allowed: Some(vec![Stop]),
    });
    let mut chosen = claim();
    chosen.spec.suspension_strategy = Some(strategy(Stop));
    for (claim, expected) in [(claim(), Freeze), (chosen, Stop)] {
        let cold = World {
            template: Some(freezing.clone()),
            ..World::of(claim)
        };
        let created = cold.created().spec.suspension_strategy;
        assert_eq!(created, Some(strategy(expected)));
        // Made before the template had a strategy, and before the template had this one.
        for had in [None, Some(strategy(Stop))] {
            let mut candidate = warm("w");
            candidate.spec.suspension_strategy = had;
            let warm = World {
                candidate: Some(candidate.clone()),
                template: cold.template.clone(),
                ..World::of(cold.claim.clone())
            };
            let effects = warm.decide().effects;
            let [.., Effect::Transfer { patch, .. }] = &effects[..] else {
                panic!("{effects:?}");
            };
            let changed = patch["spec"].get("suspensionStrategy");
            let expected = Some(strategy(expected)).filter(|wanted| Some(*wanted) != had);
            assert_eq!(
                changed.map(|changed| changed["type"].clone()),
                expected.map(|expected| serde_json::json!(expected.kind.to_string()))
            );
        }
    }
}

use std::sync::Arc;

use api::SandboxWarmPoolSpec;
use api::warm_pool::UpdateStrategy;
use k8s_openapi::api::core::v1::Container;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::*;
use crate::pacing::Demand;
use crate::pool_view::tests::{at, ready, undisturbed};

fn template(name: &str, image: &str) -> SandboxTemplate {
    let mut template = SandboxTemplate::default();
    template.metadata.name = Some(name.into());
    template.metadata.namespace = Some("ns".into());
    template.spec.pod_template.spec_mut().containers = vec![Container {
        name: "main".into(),
        image: Some(image.into()),
        ..Container::default()
    }];
    template
}

fn pool(replicas: i32, strategy: Option<UpdateStrategyKind>) -> SandboxWarmPool {
    let mut pool = SandboxWarmPool::new(
        "pool",
        SandboxWarmPoolSpec {
            replicas: Some(replicas),
            update_strategy: strategy.map(|kind| UpdateStrategy {
                kind: Some(kind),
                max_unavailable: None,
            }),
            ..SandboxWarmPoolSpec::default()
        },
    );
    pool.metadata.namespace = Some("ns".into());
    pool.metadata.uid = Some("pool-uid".into());
    pool.metadata.generation = Some(3);
    pool
}

/// A sandbox as the pool makes it from this template.
fn made(pool: &SandboxWarmPool, template: &SandboxTemplate, name: &str) -> Sandbox {
    crate::pool_view::tests::made(new_member(pool, &Blueprint::new(template)), name)
}

fn decide_for(
    pool: &SandboxWarmPool,
    template: Option<&SandboxTemplate>,
    sandboxes: Vec<Sandbox>,
) -> WarmPoolPlan {
    let sandboxes: Vec<Arc<Sandbox>> = sandboxes.into_iter().map(Arc::new).collect();
    let observed = WarmPoolFacts {
        pool,
        template,
        view: undisturbed(&sandboxes),
    };
    decide(&observed, &Pacing::default(), at(1_010))
}

fn deleted(plan: &WarmPoolPlan) -> Vec<&str> {
    plan.deletions
        .iter()
        .map(|deletion| deletion.version.name.as_str())
        .collect()
}

#[test]
fn a_new_member_carries_its_identity_and_secure_defaults() {
    let pool = pool(2, None);
    let mut template = template("py", "v1");
    template.spec.service = Some(true);
    template.spec.volume_claim_templates =
        Some(vec![api::sandbox::PersistentVolumeClaimTemplate::default()]);
    let (count, member) = decide_for(&pool, Some(&template), Vec::new())
        .creations
        .unwrap();
    assert_eq!(count, 2);
    assert_eq!(member.metadata.generate_name.as_deref(), Some("pool-"));
    assert_eq!(member.metadata.name, None);
    let owner = &member.owner_references()[0];
    assert_eq!(
        (owner.kind.as_str(), owner.controller),
        ("SandboxWarmPool", Some(true))
    );
    assert_eq!(member.annotations()[labels::SANDBOX_TEMPLATE_REF], "py");
    let pod = &member.spec.pod_template;
    assert_eq!(member.labels()[labels::LAUNCH_TYPE], "warm");
    for labels in [member.labels(), pod.metadata.labels.as_ref().unwrap()] {
        assert_eq!(labels[labels::WARM_POOL_SANDBOX], name_hash("pool"));
        assert_eq!(labels[labels::SANDBOX_TEMPLATE_REF_HASH], name_hash("py"));
        assert!(labels.contains_key(labels::SANDBOX_POD_TEMPLATE_HASH));
    }
    assert_eq!(pod.spec.automount_service_account_token, Some(false));
    assert_eq!(member.spec.service, Some(true));
    assert_eq!(
        member.spec.volume_claim_templates.as_ref().unwrap().len(),
        1
    );
    assert_eq!(member.spec.replicas, Some(1));
}

#[test]
fn a_missing_template_stops_creation_but_not_the_rest() {
    let template = template("py", "v1");
    let pool = pool(1, Some(UpdateStrategyKind::Recreate));
    let members = vec![made(&pool, &template, "a"), made(&pool, &template, "b")];
    let plan = decide_for(&pool, None, members);
    assert!(plan.creations.is_none());
    assert_eq!(deleted(&plan).len(), 1, "one too many");
    assert_eq!(plan.status.replicas, 2);
    assert!(decide_for(&pool, None, Vec::new()).creations.is_none());
}

#[test]
fn template_changes_roll_out_as_the_strategy_says() {
    use UpdateStrategyKind::{OnReplenish, Recreate, RollingUpdate};
    let (old, new) = (template("py", "v1"), template("py", "v2"));
    let other = template("other", "v1");
    let table = [
        (None, &new, vec![]),
        (Some(OnReplenish), &new, vec![]),
        (Some(Recreate), &new, vec!["a", "b"]),
        (Some(RollingUpdate), &new, vec!["a"]),
        (Some(Recreate), &old, vec![]),
        (Some(OnReplenish), &other, vec!["a", "b"]),
    ];
    for (strategy, template, expected) in table {
        let pool = pool(2, strategy);
        let members = vec![made(&pool, &old, "a"), made(&pool, &old, "b")];
        let plan = decide_for(&pool, Some(template), members);
        assert_eq!(deleted(&plan), expected, "{strategy:?}");
    }
}

#[test]
fn an_edit_of_the_templates_metadata_rolls_nothing() {
    let old = template("py", "v1");
    let mut new = old.clone();
    new.spec.pod_template.metadata.labels =
        Some(BTreeMap::from([("team".to_owned(), "ml".to_owned())]));
    let pool = pool(1, Some(UpdateStrategyKind::Recreate));
    let plan = decide_for(&pool, Some(&new), vec![made(&pool, &old, "a")]);
    assert_eq!(deleted(&plan), [""; 0]);
    assert_eq!(plan.status.updated_replicas, 1);
}

#[test]
fn orphans_are_vetted_by_what_they_would_run() {
    let template = template("py", "v1");
    let pool = pool(5, None);
    let orphan = |name: &str| {
        let mut sandbox = made(&pool, &template, name);
        sandbox.metadata.owner_references = None;
        sandbox
    };
    let mut spoofed = orphan("spoofed");
    spoofed.spec.pod_template.spec_mut().containers[0].image = Some("evil".into());
    let mut foreign = orphan("foreign");
    foreign.metadata.owner_references = Some(vec![OwnerReference {
        uid: "another".into(),
        controller: Some(true),
        ..OwnerReference::default()
    }]);
    let plan = decide_for(
        &pool,
        Some(&template),
        vec![orphan("good"), spoofed, foreign],
    );
    assert_eq!(plan.adoptions.len(), 1);
    assert_eq!(plan.adoptions[0].sandbox.name, "good");
    assert_eq!(plan.adoptions[0].owner_references[0].uid, "pool-uid");
    assert_eq!(deleted(&plan), ["spoofed"]);
    assert_eq!(plan.status.replicas, 1);
    assert_eq!(plan.creations.unwrap().0, 4);
}

#[test]
fn a_member_without_readiness_goes_after_five_minutes() {
    let template = template("py", "v1");
    let pool = pool(1, None);
    let mut starting = made(&pool, &template, "a");
    starting.status = None;
    let is_deleted = |created: i64, lost: Option<i64>| {
        let mut sandbox = starting.clone();
        sandbox.metadata.creation_timestamp = Some(Time(at(created)));
        sandbox.status = lost.map(|second| api::SandboxStatus {
            conditions: vec![ready(false, second)],
            ..api::SandboxStatus::default()
        });
        !decide_for(&pool, Some(&template), vec![sandbox])
            .deletions
            .is_empty()
    };
    assert!(is_deleted(710, None));
    assert!(!is_deleted(711, None));
    assert!(!is_deleted(0, Some(900)), "it was Ready until recently");
    assert!(is_deleted(0, Some(100)));
}

#[test]
fn the_status_counts_members_and_tells_how_far_a_rollout_is() {
    let (old, new) = (template("py", "v1"), template("py", "v2"));
    let pool = pool(3, Some(UpdateStrategyKind::OnReplenish));
    let mut unready = made(&pool, &new, "c");
    unready.status = None;
    let members = vec![made(&pool, &old, "a"), made(&pool, &new, "b"), unready];
    let status = decide_for(&pool, Some(&new), members).status;
    assert_eq!(
        (
            status.replicas,
            status.ready_replicas,
            status.updated_replicas
        ),
        (3, 2, 2)
    );
    assert_eq!(status.observed_generation, Some(3));
    let selector = format!("{}={}", labels::WARM_POOL_SANDBOX, name_hash("pool"));
    assert_eq!(status.selector.as_deref(), Some(selector.as_str()));
    let updated = conditions::find(&status.conditions, ConditionType::Updated).unwrap();
    assert_eq!(
        (updated.status.as_str(), updated.reason.as_str()),
        ("False", "RolloutInProgress")
    );
}

#[test]
fn a_pool_without_its_template_says_so_and_keeps_what_it_has() {
    let template = template("py", "v1");
    let mut pool = pool(3, Some(UpdateStrategyKind::Recreate));
    pool.spec.sandbox_template_ref.name = "py".into();
    let members = vec![made(&pool, &template, "a")];
    let missing = decide_for(&pool, None, members.clone());
    assert!(missing.creations.is_none() && missing.deletions.is_empty());
    assert_eq!(missing.status.replicas, 1);
    let updated = |plan: &WarmPoolPlan| {
        let updated = conditions::find(&plan.status.conditions, ConditionType::Updated).unwrap();
        (
            updated.status.clone(),
            updated.reason.clone(),
            updated.message.clone(),
        )
    };
    assert_eq!(
        updated(&missing),
        (
            "False".into(),
            "TemplateNotFound".into(),
            "SandboxTemplate \"py\" not found".into()
        )
    );
    pool.status = Some(missing.status);
    let found = decide_for(&pool, Some(&template), members);
    assert_eq!(updated(&found).1, "RolloutComplete");
}

#[test]
fn refills_wait_while_claims_do() {
    let template = template("py", "v1");
    let pool = pool(10, None);
    let mut observed = WarmPoolFacts {
        pool: &pool,
        template: Some(&template),
        view: PoolView {
            demand: Demand {
                waiting: 3,
                served_at: None,
            },
            max_batch: 500,
            ..undisturbed(&[])
        },
    };
    let pacing = Pacing::default();
    let waiting = decide(&observed, &pacing, at(10));
    assert!(waiting.holds_back && waiting.creations.is_none());
    assert_eq!(waiting.recheck_after, Some(pacing.recheck));
    observed.view.held_back_since = Some(at(10));
    let (count, _) = decide(&observed, &pacing, at(11)).creations.unwrap();
    assert_eq!(
        count, 5,
        "a part of a batch, so that the pool never starves"
    );
    observed.view.demand = Demand::default();
    assert_eq!(decide(&observed, &pacing, at(11)).creations.unwrap().0, 10);
}

#[test]
fn a_pool_that_is_going_does_nothing() {
    let mut going = pool(3, None);
    going.metadata.deletion_timestamp = Some(Time(at(1)));
    let plan = decide_for(&going, Some(&template("py", "v1")), Vec::new());
    assert!(plan.creations.is_none() && plan.deletions.is_empty());
}

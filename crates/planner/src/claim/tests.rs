use std::collections::BTreeMap;
use std::sync::Arc;

use api::claim::{EnvVar, Lifecycle, WarmPoolRef};
use api::names::name_hash;
use api::sandbox::{PersistentVolumeClaimTemplate, PodMetadata};
use api::template::{EnvVarsInjectionPolicy, SandboxTemplateRef, VolumeClaimTemplatesPolicy};
use api::{SandboxStatus, labels};
use k8s_openapi::api::core::v1::Container;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::*;
use crate::owner::{controller_of, controller_reference};
use crate::warm_pool::{self, NoSandboxes};

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

const NOW: i64 = 1_000;

fn pairs(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
    entries
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

fn claim() -> SandboxClaim {
    let mut claim = SandboxClaim::default();
    claim.metadata.name = Some("mine".into());
    claim.metadata.namespace = Some("ns".into());
    claim.metadata.uid = Some("claim-uid".into());
    claim.metadata.resource_version = Some("1".into());
    claim.metadata.generation = Some(4);
    claim.spec.sandbox_template_ref = Some(SandboxTemplateRef { name: "py".into() });
    claim
}

fn claim_by_pool() -> SandboxClaim {
    let mut claim = claim();
    claim.spec.sandbox_template_ref = None;
    claim.spec.warm_pool_ref = Some(WarmPoolRef {
        name: "pool".into(),
    });
    claim
}

fn bound_to(name: &str) -> SandboxClaim {
    let mut claim = claim();
    claim.metadata.annotations = Some(pairs(&[(labels::ASSIGNED_SANDBOX_NAME, name)]));
    claim
}

fn template() -> SandboxTemplate {
    let mut template = SandboxTemplate::default();
    template.metadata.name = Some("py".into());
    template.metadata.namespace = Some("ns".into());
    template.spec.pod_template.metadata.labels = Some(pairs(&[("app", "demo")]));
    template.spec.pod_template.spec_mut().containers = vec![Container {
        name: "main".into(),
        ..Container::default()
    }];
    template
}

fn pool() -> SandboxWarmPool {
    let mut pool = SandboxWarmPool::default();
    pool.metadata.name = Some("pool".into());
    pool.metadata.namespace = Some("ns".into());
    pool.metadata.uid = Some("pool-uid".into());
    pool.spec.sandbox_template_ref = SandboxTemplateRef { name: "py".into() };
    pool
}

fn ready_condition(status: &str, reason: &str, second: i64) -> Condition {
    Condition {
        type_: "Ready".into(),
        status: status.into(),
        reason: reason.into(),
        message: "said by the sandbox".into(),
        observed_generation: Some(9),
        last_transition_time: Time(at(second)),
    }
}

fn finished_condition(second: i64) -> Condition {
    Condition {
        type_: "Finished".into(),
        reason: "PodSucceeded".into(),
        ..ready_condition("True", "", second)
    }
}

fn with_conditions(mut sandbox: Sandbox, conditions: Vec<Condition>) -> Sandbox {
    sandbox.status = Some(SandboxStatus {
        conditions,
        pod_ips: vec!["10.0.0.9".into()],
        ..SandboxStatus::default()
    });
    sandbox
}

/// A Ready sandbox as the pool makes it.
fn warm(name: &str) -> Sandbox {
    let (pool, template) = (pool(), template());
    let observed = warm_pool::Observed {
        pool: &pool,
        template: Some(&template),
        sandboxes: &[],
        spoken_for: &NoSandboxes,
        going: &NoSandboxes,
        unseen: 0,
        waiting_claims: 0,
        held_back_since: None,
        max_batch: 1,
    };
    let plan = warm_pool::decide(&observed, &crate::pacing::Pacing::default(), at(NOW));
    let (_, mut sandbox) = plan.creations.unwrap();
    sandbox.metadata.name = Some(name.into());
    sandbox.metadata.uid = Some(format!("uid-{name}"));
    sandbox.metadata.resource_version = Some("5".into());
    with_conditions(
        *sandbox,
        vec![ready_condition("True", "DependenciesReady", 900)],
    )
}

/// A sandbox that the claim controls.
fn owned(name: &str) -> Sandbox {
    let claim = claim();
    let mut sandbox = warm(name);
    sandbox.metadata.owner_references = Some(vec![controller_reference(&claim)]);
    sandbox.metadata.labels = Some(pairs(&[(labels::CLAIM_UID, "claim-uid")]));
    sandbox.spec.pod_template.metadata.labels = Some(pairs(&[
        ("app", "demo"),
        (labels::CLAIM_UID, "claim-uid"),
        (labels::SANDBOX_TEMPLATE_REF_HASH, &name_hash("py")),
    ]));
    sandbox
}

struct World {
    claim: SandboxClaim,
    pool: Option<SandboxWarmPool>,
    template: Option<SandboxTemplate>,
    sandboxes: Vec<Sandbox>,
    candidate: Option<Sandbox>,
    legacy_policy: Option<NetworkPolicy>,
}

impl World {
    fn of(claim: SandboxClaim) -> Self {
        Self {
            claim,
            pool: None,
            template: Some(template()),
            sandboxes: Vec::new(),
            candidate: None,
            legacy_policy: None,
        }
    }

    fn decide(&self) -> Plan {
        let found: Vec<(String, Option<Arc<Sandbox>>)> = names_to_look_up(&self.claim)
            .into_iter()
            .map(|name| {
                let found = self
                    .sandboxes
                    .iter()
                    .find(|sandbox| sandbox.name_any() == name);
                (name.to_owned(), found.cloned().map(Arc::new))
            })
            .collect();
        let holding = holding(&self.claim, &found);
        let namesake = self
            .sandboxes
            .iter()
            .find(|sandbox| sandbox.name_any() == self.claim.name_any())
            .filter(|sandbox| !is_controlled_by(&sandbox.metadata, "claim-uid"));
        let asks_pool = self.claim.spec.warm_pool_ref.is_some();
        let observed = Observed {
            claim: &self.claim,
            pool: match &self.pool {
                Some(pool) => Lookup::Found(pool),
                None if asks_pool => Lookup::Missing,
                None => Lookup::NotAsked,
            },
            template: self
                .template
                .as_ref()
                .map_or(Lookup::Missing, Lookup::Found),
            holding,
            namesake,
            candidate: self.candidate.as_ref(),
            legacy_policy: self.legacy_policy.as_ref(),
            first_observed: at(990),
        };
        decide(&observed, at(NOW))
    }

    fn blocked(&self) -> Obstacle {
        match self.decide().verdict {
            Verdict::Blocked(obstacle) => obstacle,
            other => panic!("expected an obstacle, got {other:?}"),
        }
    }

    fn created(&self) -> Sandbox {
        let plan = self.decide();
        match plan.effects.as_slice() {
            [.., Effect::Create { sandbox }] => (**sandbox).clone(),
            other => panic!(
                "expected a cold start, got {other:?} and {:?}",
                plan.verdict
            ),
        }
    }
}

#[test]
fn a_warm_claim_is_bound_first_and_transferred_second() {
    let world = World {
        candidate: Some(warm("w")),
        ..World::of(claim())
    };
    let plan = world.decide();
    let [
        Effect::Bind { sandbox, patch },
        Effect::Transfer {
            sandbox: version,
            patch: transfer,
        },
    ] = plan.effects.as_slice()
    else {
        panic!("{:?}", plan.effects);
    };
    assert_eq!(sandbox, "w");
    let metadata = &patch["metadata"];
    assert_eq!(metadata["labels"][labels::ASSIGNED_SANDBOX_NAME], "w");
    assert_eq!(metadata["annotations"][labels::ASSIGNED_SANDBOX_NAME], "w");
    assert_eq!(
        metadata["annotations"][labels::CONTROLLER_FIRST_OBSERVED_AT],
        "1970-01-01T00:16:30Z"
    );
    assert_eq!(
        (version.uid.as_str(), version.resource_version.as_str()),
        ("uid-w", "5")
    );

    let metadata = &transfer["metadata"];
    assert_eq!(metadata["ownerReferences"][0]["uid"], "claim-uid");
    assert_eq!(metadata["ownerReferences"].as_array().unwrap().len(), 1);
    assert_eq!(metadata["annotations"][labels::POD_NAME], "w");
    assert_eq!(metadata["labels"][labels::CLAIM_UID], "claim-uid");
    for pool_label in [
        labels::WARM_POOL_SANDBOX,
        labels::SANDBOX_TEMPLATE_REF_HASH,
        labels::SANDBOX_POD_TEMPLATE_HASH,
    ] {
        assert!(metadata["labels"][pool_label].is_null(), "{pool_label}");
        assert!(
            metadata["labels"]
                .as_object()
                .unwrap()
                .contains_key(pool_label)
        );
    }
    let pod_labels = transfer["spec"]["podTemplate"]["metadata"]["labels"]
        .as_object()
        .unwrap();
    assert_eq!(pod_labels[labels::CLAIM_UID], "claim-uid");
    assert!(pod_labels[labels::WARM_POOL_SANDBOX].is_null());
    assert!(
        !pod_labels.contains_key(labels::SANDBOX_TEMPLATE_REF_HASH),
        "the label of the network policy stays as it is"
    );
    assert_eq!(plan.verdict, Verdict::Reflect);
}

#[test]
fn a_promise_is_kept_and_a_broken_one_replaced() {
    let promised = World {
        sandboxes: vec![warm("w")],
        candidate: Some(warm("another")),
        ..World::of(bound_to("w"))
    };
    assert!(matches!(
        promised.decide().effects.as_slice(),
        [Effect::Transfer { sandbox, .. }] if sandbox.name == "w"
    ));

    let mut anothers = owned("w");
    anothers.metadata.owner_references.as_mut().unwrap()[0].uid = "another-claim".into();
    for sandboxes in [Vec::new(), vec![anothers]] {
        let world = World {
            sandboxes,
            candidate: Some(warm("x")),
            ..World::of(bound_to("w"))
        };
        assert!(matches!(
            world.decide().effects.as_slice(),
            [Effect::Bind { sandbox, .. }, Effect::Transfer { .. }] if sandbox == "x"
        ));
    }

    let without_template = World {
        template: None,
        ..World::of(bound_to("w"))
    };
    let plan = without_template.decide();
    assert!(matches!(plan.effects.as_slice(), [Effect::Unbind { .. }]));
}

#[test]
fn a_claim_that_planned_a_cold_start_never_takes_a_warm_sandbox_instead() {
    let world = World {
        candidate: Some(warm("w")),
        ..World::of(bound_to("mine"))
    };
    assert!(matches!(
        world.decide().effects.as_slice(),
        [Effect::Create { .. }]
    ));
}

#[test]
fn a_cold_sandbox_has_the_claims_name_and_identity() {
    let mut world = World::of(claim());
    world.claim.spec.additional_pod_metadata = Some(PodMetadata {
        labels: Some(pairs(&[("team", "ml")])),
        annotations: Some(pairs(&[("cost", "7")])),
    });
    world
        .claim
        .annotations_mut()
        .insert(labels::TRACE_CONTEXT.into(), "{}".into());
    let plan = world.decide();
    assert!(matches!(&plan.effects[0], Effect::Bind { sandbox, .. } if sandbox == "mine"));
    let sandbox = world.created();
    assert_eq!(sandbox.name_any(), "mine");
    assert_eq!(controller_of(&sandbox.metadata).unwrap().uid, "claim-uid");
    assert_eq!(
        controller_of(&sandbox.metadata)
            .unwrap()
            .block_owner_deletion,
        Some(true)
    );
    assert_eq!(sandbox.annotations()[labels::SANDBOX_TEMPLATE_REF], "py");
    assert_eq!(sandbox.annotations()[labels::TRACE_CONTEXT], "{}");
    assert!(
        !sandbox.annotations().contains_key(labels::POD_NAME),
        "that marks a warm start"
    );
    let pod = &sandbox.spec.pod_template;
    let pod_labels = pod.metadata.labels.as_ref().unwrap();
    for labels in [sandbox.labels(), pod_labels] {
        assert_eq!(labels[labels::CLAIM_UID], "claim-uid");
        assert_eq!(labels[labels::SANDBOX_TEMPLATE_REF_HASH], name_hash("py"));
    }
    assert_eq!(
        (pod_labels["app"].as_str(), pod_labels["team"].as_str()),
        ("demo", "ml")
    );
    assert_eq!(pod.metadata.annotations.as_ref().unwrap()["cost"], "7");
    assert_eq!(pod.spec.automount_service_account_token, Some(false));
    assert_eq!(sandbox.spec.replicas, Some(1));
}

#[test]
fn a_sandbox_found_by_status_binding_or_name_is_recognised_if_it_is_the_claims() {
    let mut by_status = claim();
    by_status.status = Some(api::SandboxClaimStatus {
        sandbox: Some(api::claim::ClaimedSandbox {
            name: "w".into(),
            pod_ips: Vec::new(),
        }),
        ..api::SandboxClaimStatus::default()
    });
    let mut by_label = claim();
    by_label.metadata.labels = Some(pairs(&[(labels::ASSIGNED_SANDBOX_NAME, "w")]));
    for (claim, name) in [
        (by_status, "w"),
        (bound_to("w"), "w"),
        (by_label, "w"),
        (claim(), "mine"),
    ] {
        let world = World {
            sandboxes: vec![owned(name)],
            candidate: Some(warm("x")),
            ..World::of(claim)
        };
        let plan = world.decide();
        assert_eq!((plan.effects, plan.verdict), (Vec::new(), Verdict::Reflect));
    }
}

#[test]
fn a_foreign_sandbox_of_the_claims_name_is_left_alone() {
    let mut foreign = owned("mine");
    foreign.metadata.owner_references = None;
    foreign.metadata.labels = None;
    let mut world = World {
        sandboxes: vec![foreign],
        ..World::of(claim())
    };
    let obstacle = world.blocked();
    assert_eq!(obstacle.reason, Reason::ReconcilerError);
    assert!(
        obstacle.message.contains("\"mine\" already exists"),
        "{}",
        obstacle.message
    );
    world.candidate = Some(warm("w"));
    assert!(matches!(
        world.decide().effects.as_slice(),
        [Effect::Bind { .. }, Effect::Transfer { .. }]
    ));
}

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
    assert_eq!(world.decide().verdict, Verdict::Reflect);
}

#[test]
fn invalid_fields_are_refused_by_name() {
    let metadata = |labels: &[(&str, &str)]| PodMetadata {
        labels: Some(pairs(labels)),
        annotations: None,
    };
    let mut restricted = claim();
    restricted.spec.additional_pod_metadata = Some(metadata(&[("kubernetes.io/x", "y")]));
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
fn env_and_volumes_of_its_own_mean_a_cold_start_from_the_pools_template() {
    let mut world = World {
        pool: Some(pool()),
        ..World::of(claim_by_pool())
    };
    let template = world.template.as_mut().unwrap();
    template.spec.env_vars_injection_policy = Some(EnvVarsInjectionPolicy::Allowed);
    template.spec.volume_claim_templates_policy = Some(VolumeClaimTemplatesPolicy::Allowed);
    world.claim.spec.env = Some(vec![EnvVar {
        name: "A".into(),
        value: "1".into(),
        container_name: None,
    }]);
    let mut volume = PersistentVolumeClaimTemplate::default();
    volume.metadata.name = Some("data".into());
    world.claim.spec.volume_claim_templates = Some(vec![volume]);
    let asked = warm_request(
        &world.claim,
        Lookup::Found(world.pool.as_ref().unwrap()),
        Holding::Free,
    );
    assert_eq!(asked, None);
    let sandbox = world.created();
    let env = sandbox.spec.pod_template.spec.containers[0]
        .env
        .as_ref()
        .unwrap();
    assert_eq!(env[0].name, "A");
    assert_eq!(sandbox.spec.volume_claim_templates.unwrap().len(), 1);
}

#[test]
fn a_claim_asks_the_queue_for_what_its_source_allows() {
    let with_policy = |warmpool: Option<&str>| {
        let mut claim = claim();
        claim.spec.warmpool = warmpool.map(Into::into);
        claim
    };
    let pool = pool();
    let found = Lookup::Found(&pool);
    let asked = |claim: &SandboxClaim, pool| {
        warm_request(claim, pool, Holding::Free).map(|request| request.pool_hash)
    };
    assert_eq!(asked(&with_policy(None), Lookup::NotAsked), Some(None));
    assert_eq!(asked(&with_policy(Some("none")), Lookup::NotAsked), None);
    assert_eq!(
        asked(&with_policy(Some("fast")), Lookup::NotAsked),
        Some(Some(name_hash("fast")))
    );
    assert_eq!(
        asked(&claim_by_pool(), found),
        Some(Some(name_hash("pool")))
    );
    assert_eq!(asked(&claim_by_pool(), Lookup::Missing), None);
    let sandbox = owned("w");
    assert_eq!(
        warm_request(&claim(), found, Holding::Owned(&sandbox)),
        None
    );
    assert_eq!(warm_request(&claim(), found, Holding::Planned), None);
}

#[test]
fn only_what_a_pool_made_and_nobody_has_is_adoptable() {
    assert!(is_adoptable(&warm("w")));
    let change = |edit: fn(&mut Sandbox)| {
        let mut sandbox = warm("w");
        edit(&mut sandbox);
        is_adoptable(&sandbox)
    };
    assert!(change(|sandbox| sandbox.metadata.owner_references = None));
    assert!(!change(
        |sandbox| sandbox.metadata.deletion_timestamp = Some(Time(at(1)))
    ));
    assert!(!change(|sandbox| {
        sandbox.labels_mut().remove(labels::WARM_POOL_SANDBOX);
    }));
    assert!(!change(|sandbox| {
        sandbox
            .labels_mut()
            .remove(labels::SANDBOX_TEMPLATE_REF_HASH);
    }));
    assert!(!change(|sandbox| {
        sandbox.metadata.owner_references.as_mut().unwrap()[0].kind = "SandboxClaim".into();
    }));
    assert!(!change(|sandbox| sandbox.spec.replicas = Some(0)));
    assert!(!change(|sandbox| {
        let status = sandbox.status.as_mut().unwrap();
        status.conditions.push(finished_condition(1));
    }));
}

#[test]
fn an_orphan_is_only_taken_if_it_runs_what_the_template_says() {
    let mut orphan = warm("w");
    orphan.metadata.owner_references = None;
    let mut world = World {
        candidate: Some(orphan.clone()),
        ..World::of(claim())
    };
    assert!(matches!(world.decide().effects[1], Effect::Transfer { .. }));
    orphan.spec.pod_template.spec_mut().containers[0].image = Some("evil".into());
    world.candidate = Some(orphan);
    assert!(matches!(world.decide().effects[1], Effect::Create { .. }));
}

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
        assert_eq!((plan.effects, plan.verdict), (Vec::new(), Verdict::Expired));
        assert!(plan.announces_expiry);
        assert_eq!(plan.recheck_after, Some(Duration::ZERO));
    }
    let delete = expiring(Delete, true).decide();
    assert_eq!(delete.effects, [Effect::DeleteClaim { foreground: false }]);
    assert_eq!(delete.verdict, Verdict::Silent);
    let foreground = expiring(DeleteForeground, true).decide();
    assert_eq!(
        foreground.effects,
        [Effect::DeleteClaim { foreground: true }]
    );
    let retain = expiring(Retain, true).decide();
    assert!(
        matches!(retain.effects.as_slice(), [Effect::DeleteSandbox { sandbox }] if sandbox.uid == "uid-w")
    );
    assert_eq!(retain.verdict, Verdict::Expired);
    assert!(!retain.announces_expiry);
}

#[test]
fn expiry_never_deletes_a_sandbox_that_is_not_the_claims() {
    let mut world = expiring(ClaimShutdownPolicy::Retain, true);
    world.sandboxes = vec![warm("w")];
    let plan = world.decide();
    assert_eq!((plan.effects, plan.verdict), (Vec::new(), Verdict::Expired));
}

#[test]
fn a_claim_that_is_going_is_left_alone() {
    let mut world = expiring(ClaimShutdownPolicy::Delete, true);
    world.claim.metadata.deletion_timestamp = Some(Time(at(1)));
    let plan = world.decide();
    assert_eq!((plan.effects, plan.verdict), (Vec::new(), Verdict::Silent));
}

fn reported(report: &Report<'_>, claim: &SandboxClaim) -> (String, String) {
    let status = status(claim, report, at(NOW));
    let ready = conditions::find(&status.conditions, ConditionType::Ready).unwrap();
    (ready.status.clone(), ready.reason.clone())
}

#[test]
fn conditions_hide_one_another_in_a_fixed_order() {
    let claim = claim();
    let obstacle = Obstacle::new(Reason::TemplateNotFound, "x");
    let sandbox = owned("w");
    let expired = with_conditions(
        owned("w"),
        vec![ready_condition("False", "SandboxExpired", 900)],
    );
    let bare = with_conditions(owned("w"), Vec::new());
    let mut going = owned("w");
    going.metadata.deletion_timestamp = Some(Time(at(1)));
    let some = Some(&sandbox);
    let table = [
        (
            Report::Blocked {
                obstacle: &obstacle,
                sandbox: some,
            },
            "False",
            "TemplateNotFound",
        ),
        (Report::Expired { sandbox: some }, "False", "ClaimExpired"),
        (
            Report::Reflects { sandbox: None },
            "False",
            "SandboxMissing",
        ),
        (
            Report::Reflects {
                sandbox: Some(&expired),
            },
            "False",
            "SandboxExpired",
        ),
        (
            Report::Reflects {
                sandbox: Some(&bare),
            },
            "False",
            "SandboxNotReady",
        ),
        (
            Report::Reflects {
                sandbox: Some(&going),
            },
            "False",
            "SandboxNotReady",
        ),
        (
            Report::Reflects { sandbox: some },
            "True",
            "DependenciesReady",
        ),
    ];
    for (report, expected_status, expected_reason) in table {
        let (status, reason) = reported(&report, &claim);
        assert_eq!(
            (status.as_str(), reason.as_str()),
            (expected_status, expected_reason)
        );
    }
}

#[test]
fn a_forwarded_condition_is_the_sandboxes_under_the_claims_generation() {
    let sandbox = owned("w");
    let report = Report::Reflects {
        sandbox: Some(&sandbox),
    };
    let status = status(&claim(), &report, at(NOW));
    let ready = conditions::find(&status.conditions, ConditionType::Ready).unwrap();
    assert_eq!(ready.last_transition_time, Time(at(900)));
    assert_eq!(ready.message, "said by the sandbox");
    assert_eq!(ready.observed_generation, Some(4));
    let held = status.sandbox.unwrap();
    assert_eq!(
        (held.name.as_str(), held.pod_ips.as_slice()),
        ("w", ["10.0.0.9".to_owned()].as_slice())
    );
}

#[test]
fn finished_is_mirrored_and_outlives_the_sandbox_only_on_an_expired_claim() {
    let finished = with_conditions(
        owned("w"),
        vec![
            ready_condition("False", "PodSucceeded", 900),
            finished_condition(900),
        ],
    );
    let mut claim = claim();
    let mirrored = status(
        &claim,
        &Report::Reflects {
            sandbox: Some(&finished),
        },
        at(NOW),
    );
    assert!(conditions::is_true(
        &mirrored.conditions,
        ConditionType::Finished
    ));
    claim.status = Some(mirrored);
    let has_finished = |report: &Report<'_>| {
        conditions::is_true(
            &status(&claim, report, at(NOW)).conditions,
            ConditionType::Finished,
        )
    };
    assert!(has_finished(&Report::Expired { sandbox: None }));
    assert!(!has_finished(&Report::Reflects { sandbox: None }));
}

#[test]
fn a_finish_that_is_seen_now_starts_the_countdown_now() {
    let finished = with_conditions(owned("w"), vec![finished_condition(NOW - 30)]);
    let mut claim = claim();
    let ttl = |seconds| {
        Some(Lifecycle {
            ttl_seconds_after_finished: Some(seconds),
            ..Lifecycle::default()
        })
    };
    claim.spec.lifecycle = ttl(120);
    let mirrored = status(
        &claim,
        &Report::Reflects {
            sandbox: Some(&finished),
        },
        at(NOW),
    );
    assert_eq!(
        next_look(&claim, &mirrored, at(NOW)),
        Some(Duration::from_secs(90))
    );
    claim.spec.lifecycle = ttl(10);
    assert_eq!(next_look(&claim, &mirrored, at(NOW)), Some(Duration::ZERO));
    let expired = status(&claim, &Report::Expired { sandbox: None }, at(NOW));
    assert_eq!(next_look(&claim, &expired, at(NOW)), None);
}

use std::sync::Arc;
use std::time::Duration;

use api::kruise::{ScaleStrategy, SetUpdateStrategy, TemplateRef};
use api::sandbox::PodTemplate;
use k8s_openapi::api::core::v1::Container;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::*;
use crate::pool_view::tests::{at, ready, undisturbed};

fn pod_template(image: &str) -> PodTemplate {
    let mut template = PodTemplate::default();
    template.spec_mut().containers = vec![Container {
        name: "main".into(),
        image: Some(image.into()),
        ..Container::default()
    }];
    template
}

fn set(replicas: i32, image: &str) -> SandboxSet {
    let mut set = SandboxSet::new(
        "python",
        SandboxSetSpec {
            replicas,
            template: Some(pod_template(image)),
            ..SandboxSetSpec::default()
        },
    );
    set.metadata.namespace = Some("ns".into());
    set.metadata.uid = Some("set-uid".into());
    set.metadata.generation = Some(3);
    set
}

fn template(image: &str) -> SandboxTemplate {
    let mut template = SandboxTemplate::default();
    template.metadata.name = Some("py".into());
    template.metadata.namespace = Some("ns".into());
    template.spec.pod_template = pod_template(image);
    template
}

/// A Ready sandbox as the set makes it.
fn made(set: &SandboxSet, name: &str) -> Sandbox {
    let blueprint = SetBlueprint::new(set, None).unwrap();
    crate::pool_view::tests::made(new_member(set, &blueprint), name)
}

fn unready(mut sandbox: Sandbox) -> Sandbox {
    sandbox.status.as_mut().unwrap().conditions = vec![ready(false, 1_000)];
    sandbox
}

fn locked(mut sandbox: Sandbox) -> Sandbox {
    sandbox
        .annotations_mut()
        .insert(keys::LOCK.into(), "token".into());
    sandbox
}

fn plan_of(
    set: &SandboxSet,
    blueprint: &Result<SetBlueprint, Problem>,
    sandboxes: Vec<Sandbox>,
) -> SandboxSetPlan {
    let sandboxes: Vec<Arc<Sandbox>> = sandboxes.into_iter().map(Arc::new).collect();
    let observed = SandboxSetFacts {
        set,
        blueprint,
        view: undisturbed(&sandboxes),
    };
    decide(&observed, &Pacing::default(), at(1_010))
}

fn plan(set: &SandboxSet, sandboxes: Vec<Sandbox>) -> SandboxSetPlan {
    plan_of(set, &SetBlueprint::new(set, None), sandboxes)
}

fn creations(plan: &SandboxSetPlan) -> usize {
    plan.creations.as_ref().map_or(0, |(count, _)| *count)
}

fn condition(plan: &SandboxSetPlan, kind: ConditionType) -> (&str, &str) {
    let condition = conditions::find(&plan.status.conditions, kind).unwrap();
    (&condition.status, &condition.reason)
}

#[test]
fn a_new_member_says_whose_it_is_and_that_it_is_free() {
    let set = set(2, "v1");
    let plan = plan(&set, Vec::new());
    let (count, sandbox) = plan.creations.unwrap();
    assert_eq!(count, 2);
    let blueprint = SetBlueprint::new(&set, None).unwrap();
    let labels = sandbox.labels();
    assert_eq!(labels[keys::SANDBOX_POOL], "python");
    assert_eq!(labels[keys::SANDBOX_TEMPLATE], "python");
    assert_eq!(labels[keys::SANDBOX_CLAIMED], "false");
    assert_eq!(labels[keys::TEMPLATE_HASH], blueprint.revision);
    assert_eq!(sandbox.metadata.generate_name.as_deref(), Some("python-"));
    assert_eq!(sandbox.owner_references()[0].uid, "set-uid");
    let pod = &sandbox.spec.pod_template;
    assert_eq!(pod.spec.automount_service_account_token, Some(false));
    assert_eq!(pod.spec.dns_policy, None, "it has no network policy");
    let pod_labels = pod.metadata.labels.as_ref().unwrap();
    assert!(!pod_labels.contains_key(labels::SANDBOX_TEMPLATE_REF_HASH));
    assert!(
        !pod_labels.contains_key(keys::SANDBOX_POOL),
        "claiming must not change the pod"
    );
}

#[test]
fn a_template_that_is_referred_to_brings_its_network_policy() {
    let mut set = set(1, "unused");
    set.spec.template = None;
    set.spec.template_ref = Some(TemplateRef {
        name: "py".into(),
        ..TemplateRef::default()
    });
    let template = template("v1");
    let blueprint = SetBlueprint::new(&set, Some(&template));
    let plan = plan_of(&set, &blueprint, Vec::new());
    let (_, sandbox) = plan.creations.unwrap();
    let pod = &sandbox.spec.pod_template;
    assert_eq!(pod.spec.containers[0].image.as_deref(), Some("v1"));
    let pod_labels = pod.metadata.labels.as_ref().unwrap();
    assert_eq!(
        pod_labels[labels::SANDBOX_TEMPLATE_REF_HASH],
        name_hash("py")
    );
    assert_eq!(sandbox.annotations()[labels::SANDBOX_TEMPLATE_REF], "py");
}

#[test]
fn a_set_without_anything_to_make_sandboxes_from_says_why_and_keeps_what_it_has() {
    let mut broken = set(2, "unused");
    broken.spec.template = None;
    let reference = |name: &str, kind: Option<&str>, version: Option<&str>| TemplateRef {
        name: name.into(),
        kind: kind.map(Into::into),
        api_version: version.map(Into::into),
    };
    for (reference, reason) in [
        (Some(reference("py", None, None)), "TemplateNotFound"),
        (
            Some(reference(
                "py",
                Some("SandboxTemplate"),
                Some("extensions.agents.x-k8s.io/v1beta1"),
            )),
            "TemplateNotFound",
        ),
        (
            Some(reference("py", Some("PodTemplate"), Some("v1"))),
            "InvalidConfiguration",
        ),
        (
            Some(reference("py", None, Some("example.com/v1"))),
            "InvalidConfiguration",
        ),
        (None, "InvalidConfiguration"),
    ] {
        broken.spec.template_ref = reference;
        let member = made(&set(2, "v1"), "a");
        let plan = plan_of(&broken, &SetBlueprint::new(&broken, None), vec![member]);
        assert_eq!(condition(&plan, ConditionType::Ready), ("False", reason));
        assert_eq!((creations(&plan), plan.deletions.len()), (0, 0));
        assert_eq!(plan.status.replicas, 1);
        assert_eq!(plan.recheck_after, None, "nothing changes by looking again");
    }
}

#[test]
fn a_locked_sandbox_is_no_member_and_is_left_alone() {
    let set = set(2, "v1");
    let mut claimed = made(&set, "claimed");
    claimed
        .labels_mut()
        .insert(keys::SANDBOX_CLAIMED.into(), "true".into());
    let plan = plan(
        &set,
        vec![made(&set, "a"), locked(made(&set, "b")), claimed],
    );
    assert_eq!((creations(&plan), plan.deletions.len()), (1, 0));
    assert_eq!(plan.status.replicas, 1);
}

#[test]
fn only_a_free_and_ready_member_can_be_claimed() {
    let set = set(2, "v1");
    let free = made(&set, "a");
    let offered = candidate(&free).unwrap();
    assert_eq!(
        (offered.pool_hash.as_str(), offered.ready),
        ("set-uid", true)
    );
    let mut suspended = free.clone();
    suspended.spec.replicas = Some(0);
    let mut going = free.clone();
    going.metadata.deletion_timestamp = Some(Time(at(1)));
    let mut orphan = free.clone();
    orphan.metadata.owner_references = None;
    for sandbox in [
        unready(free.clone()),
        locked(free),
        suspended,
        going,
        orphan,
    ] {
        assert_eq!(candidate(&sandbox), None);
    }
}

#[test]
fn a_new_revision_replaces_members_no_faster_than_the_strategy_allows() {
    let old = set(10, "v1");
    let members: Vec<Sandbox> = (0..10).map(|i| made(&old, &format!("m{i}"))).collect();
    let mut new = set(10, "v2");
    assert_eq!(
        plan(&new, members.clone()).deletions.len(),
        2,
        "20% by default"
    );
    new.spec.update_strategy = Some(SetUpdateStrategy {
        max_unavailable: Some(IntOrString::Int(5)),
    });
    let rolling = plan(&new, members);
    assert_eq!(rolling.deletions.len(), 5);
    assert_eq!(
        condition(&rolling, ConditionType::Updated),
        ("False", "RolloutInProgress")
    );
    assert_eq!(
        (rolling.status.updated_replicas, rolling.status.replicas),
        (0, 5)
    );
}

#[test]
fn the_current_revision_follows_when_all_members_have_the_new_one() {
    let old = set(10, "v1");
    let mut members: Vec<Sandbox> = (0..9).map(|i| made(&old, &format!("m{i}"))).collect();
    let first = plan(&old, members.clone()).status;
    assert_eq!(first.current_revision, first.update_revision);
    let mut new = set(10, "v2");
    new.status = Some(first.clone());
    members.push(made(&new, "new"));
    let during = plan(&new, members).status;
    assert_eq!(during.current_revision, first.current_revision);
    assert_ne!(during.update_revision, first.update_revision);
    let updated = (during.updated_replicas, during.updated_available_replicas);
    assert_eq!(updated, (1, 1));
    let after = plan(&new, vec![made(&new, "new")]).status;
    assert_eq!(after.current_revision, after.update_revision);
}

#[test]
fn a_set_grows_no_faster_than_its_scale_strategy_allows() {
    let mut set = set(10, "v1");
    set.spec.scale_strategy = Some(ScaleStrategy {
        max_unavailable: Some(IntOrString::String("30%".into())),
    });
    assert_eq!(creations(&plan(&set, Vec::new())), 3);
    let starting = vec![
        made(&set, "a"),
        unready(made(&set, "b")),
        unready(made(&set, "c")),
    ];
    assert_eq!(creations(&plan(&set, starting)), 1);
    let full: Vec<Sandbox> = (0..3)
        .map(|i| unready(made(&set, &format!("m{i}"))))
        .collect();
    let waiting = plan(&set, full);
    assert_eq!(creations(&waiting), 0);
    assert_ne!(
        waiting.recheck_after,
        Some(Duration::ZERO),
        "readiness is an event"
    );
}

#[test]
fn an_orphan_is_taken_in_only_if_it_is_what_the_set_makes() {
    let set = set(2, "v1");
    let orphaned = |mut sandbox: Sandbox| {
        sandbox.metadata.owner_references = None;
        sandbox
    };
    let mut forged = orphaned(made(&set, "forged"));
    forged.spec.pod_template.spec_mut().containers[0].image = Some("evil".into());
    let plan = plan(&set, vec![orphaned(made(&set, "a")), forged]);
    let adopted: Vec<&str> = plan
        .adoptions
        .iter()
        .map(|it| it.sandbox.name.as_str())
        .collect();
    assert_eq!(adopted, ["a"]);
    assert_eq!((creations(&plan), plan.deletions.len()), (1, 0));
}

#[test]
fn a_full_set_is_ready_and_its_selector_finds_its_members() {
    let set = set(1, "v1");
    let plan = plan(&set, vec![made(&set, "a")]);
    assert_eq!(
        condition(&plan, ConditionType::Ready),
        ("True", "Replenished")
    );
    assert_eq!(
        plan.status.selector.as_deref(),
        Some("agents.kruise.io/sandbox-pool=python")
    );
    assert_eq!(plan.status.observed_generation, Some(3));
}

#[test]
fn a_name_that_fits_no_label_is_hashed() {
    let long = "x".repeat(64);
    assert_eq!(set_label(&long), name_hash(&long));
    assert_eq!(set_label("python.v1"), "python.v1");
}

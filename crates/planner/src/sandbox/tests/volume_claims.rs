use api::SandboxSpec;
use api::sandbox::{EmbeddedObjectMetadata, PersistentVolumeClaimTemplate};
use k8s_openapi::api::core::v1::{EmptyDirVolumeSource, PersistentVolumeClaim, Volume};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::super::{Adoption, Effect, Problem};
use super::world::{HASH, NAME, World, metadata, other_owner, predecessor, sandbox};

fn template(name: &str) -> PersistentVolumeClaimTemplate {
    PersistentVolumeClaimTemplate {
        metadata: EmbeddedObjectMetadata {
            name: Some(name.to_owned()),
            labels: Some([("tier".to_owned(), "fast".to_owned())].into()),
            annotations: Some([("note".to_owned(), "kept".to_owned())].into()),
        },
        spec: k8s_openapi::api::core::v1::PersistentVolumeClaimSpec {
            access_modes: Some(vec!["ReadWriteOnce".to_owned()]),
            ..Default::default()
        },
    }
}

fn world(templates: Vec<PersistentVolumeClaimTemplate>) -> World {
    World::new(sandbox(SandboxSpec {
        volume_claim_templates: Some(templates),
        ..SandboxSpec::default()
    }))
}

fn claim(name: &str) -> PersistentVolumeClaim {
    PersistentVolumeClaim {
        metadata: metadata(name),
        ..PersistentVolumeClaim::default()
    }
}

#[test]
fn each_template_becomes_a_claim_that_the_pod_can_mount() {
    let mut world = world(vec![template("work"), template("cache")]);
    world.spec_mut().pod_template.spec_mut().volumes = Some(vec![
        Volume {
            name: "work".to_owned(),
            empty_dir: Some(EmptyDirVolumeSource::default()),
            ..Volume::default()
        },
        Volume {
            name: "scratch".to_owned(),
            empty_dir: Some(EmptyDirVolumeSource::default()),
            ..Volume::default()
        },
    ]);
    world.settle();
    let made = &world.volume_claims[0];
    assert_eq!(made.metadata.name.as_deref(), Some("work-box"));
    let labels = made.metadata.labels.as_ref().unwrap();
    assert_eq!(labels["agents.x-k8s.io/sandbox-name-hash"], HASH);
    assert_eq!(labels["tier"], "fast");
    assert_eq!(made.metadata.annotations.as_ref().unwrap()["note"], "kept");
    assert_eq!(made.spec, Some(template("work").spec));
    assert_eq!(
        world.volume_claims[1].metadata.name.as_deref(),
        Some("cache-box")
    );

    let volumes = world.pods[0]
        .spec
        .as_ref()
        .unwrap()
        .volumes
        .as_ref()
        .unwrap();
    let mounted: Vec<_> = volumes
        .iter()
        .map(|volume| {
            let claim = volume.persistent_volume_claim.as_ref();
            (
                volume.name.as_str(),
                claim.map(|claim| claim.claim_name.as_str()),
            )
        })
        .collect();
    assert_eq!(
        mounted,
        [
            ("work", Some("work-box")),
            ("scratch", None),
            ("cache", Some("cache-box"))
        ]
    );
}

#[test]
fn an_existing_claim_is_kept_adopted_or_refused() {
    let mut world = world(vec![template("work")]);
    world.volume_claims = vec![claim("work-box")];
    assert!(matches!(&world.decide().effects[..],
        [Effect::AdoptVolumeClaim { name, .. }, Effect::CreatePod(_)] if name == "work-box"));

    world.adoption = Adoption::Labelled;
    assert_eq!(
        world.problems(),
        [Problem::NotAdoptable {
            kind: "persistent volume claim",
            name: "work-box".to_owned()
        }]
    );
    world.volume_claims[0].metadata.labels =
        Some([("agents.x-k8s.io/adoptable".to_owned(), "true".to_owned())].into());
    world.settle();
    let adopted = &world.volume_claims[0].metadata;
    assert_eq!(adopted.owner_references, Some(vec![world.owner()]));

    // One that lost its label, as those made by older controllers, is labelled again and not made anew.
    world.volume_claims[0].metadata.labels = None;
    assert!(matches!(
        &world.decide().effects[..],
        [Effect::LabelVolumeClaim { .. }]
    ));
    world.settle();
    assert_eq!(world.volume_claims.len(), 1);
}

#[test]
fn no_pod_is_made_on_a_volume_that_is_not_the_sandboxs() {
    let mut world = world(vec![template("work")]);
    let mut foreign = claim("work-box");
    foreign.metadata.owner_references = Some(vec![other_owner()]);
    world.volume_claims = vec![foreign];
    let plan = world.reconcile();
    assert!(plan.effects.is_empty(), "{plan:?}");
    let (status, reason, message) = world.ready();
    assert_eq!(
        (status.as_str(), reason.as_str()),
        ("False", "ReconcilerError")
    );
    assert_eq!(
        message,
        "Error seen: refusing to use persistent volume claim \"work-box\": it is controlled by ReplicaSet \"someone\""
    );
}

#[test]
fn no_pod_is_made_on_a_volume_that_is_going_or_a_predecessors() {
    let mut left_behind = claim("work-box");
    left_behind.metadata.owner_references = Some(vec![predecessor()]);
    let mut going = claim("work-box");
    going.metadata.deletion_timestamp = Some(Time(world(Vec::new()).now));
    for left in [left_behind, going] {
        let mut world = world(vec![template("work")]);
        world.volume_claims = vec![left];
        let plan = world.reconcile();
        assert!(plan.effects.is_empty(), "{plan:?}");
        let (_, reason, message) = world.ready();
        assert_eq!(reason, "DependenciesNotReady");
        assert!(
            message.contains("\"work-box\" is being deleted"),
            "{message}"
        );
        world.volume_claims.clear();
        world.settle();
        assert_eq!(world.pods.len(), 1);

        // A pod that is there keeps its volume, and the sandbox is as ready as the pod.
        let now = Time(world.now);
        world.volume_claims[0].metadata.deletion_timestamp = Some(now);
        assert_eq!(world.problems(), []);
    }
}

#[test]
fn two_volume_claim_templates_of_one_name_are_the_specs_fault() {
    let mut world = world(vec![template("work"), template("cache"), template("work")]);
    let plan = world.reconcile();
    let made = |effect: &Effect| matches!(effect, Effect::CreateVolumeClaim(_));
    assert!(plan.effects.iter().all(made), "no pod: {plan:?}");
    let (_, reason, message) = world.ready();
    assert_eq!(reason, "InvalidConfiguration");
    assert_eq!(
        message,
        "spec.volumeClaimTemplates[2].metadata.name: \"work\" is taken by an earlier entry; give each volume claim template a name of its own"
    );
}

#[test]
fn a_claim_name_that_is_too_long_is_the_specs_fault() {
    let mut world = world(vec![template(&"w".repeat(250))]);
    let plan = world.reconcile();
    assert!(
        plan.effects.is_empty() && plan.requeue.is_none(),
        "{plan:?}"
    );
    let (_, reason, message) = world.ready();
    assert_eq!(reason, "InvalidConfiguration");
    assert!(
        message.contains("has 254 characters and may have at most 253"),
        "{message}"
    );

    world.spec_mut().volume_claim_templates = Some(vec![PersistentVolumeClaimTemplate::default()]);
    world.reconcile();
    assert_eq!(world.ready().2, "volumeClaimTemplates[0] needs a name");
}

#[test]
fn suspension_and_retained_expiry_keep_volumes() {
    let mut world = world(vec![template("work")]);
    world.settle();
    world.spec_mut().replicas = Some(0);
    world.settle();
    assert!(world.pods.is_empty());
    assert_eq!(world.volume_claims.len(), 1);
    world.spec_mut().shutdown_time = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
        world.now,
    ));
    world.settle();
    assert_eq!(world.ready().1, "SandboxExpired");
    assert_eq!(world.volume_claims.len(), 1);
    assert_eq!(world.sandbox().metadata.name.as_deref(), Some(NAME));
}

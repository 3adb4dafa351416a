//! What holds for every sandbox, whatever happens to it from outside.

use api::sandbox::{
    EmbeddedObjectMetadata, OperatingMode, PersistentVolumeClaimTemplate, ShutdownPolicy,
};
use api::{SandboxSpec, labels};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::SignedDuration;
use proptest::prelude::*;

use super::super::{Adoption, Stage};
use super::world::{
    NAME, World, make_ready, metadata, other_owner, pod, ready_pod, sandbox, service,
};

/// Something that a user, a node or another controller does.
#[derive(Clone, Debug)]
enum Happening {
    SetReplicas(Option<i32>),
    SetMode(Option<OperatingMode>),
    SetService(Option<bool>),
    SetLabels(Vec<String>),
    SetShutdown {
        seconds: i64,
        policy: ShutdownPolicy,
    },
    ClearShutdown,
    AnnotatePodName(String),
    PodBecomesReady,
    PodEnds {
        phase: &'static str,
        reason: Option<&'static str>,
    },
    PodVanishes,
    PodStartsTerminating,
    PodLabelTampered,
    ForeignPod,
    UnownedPod,
    ServiceVanishes,
    ServiceTampered,
    ForeignService,
    VolumeClaimVanishes,
    ForeignVolumeClaim,
    AdoptionSet(Adoption),
    TimePasses(i64),
    Reconcile,
}

fn happening() -> impl Strategy<Value = Happening> {
    use Happening as H;
    let shutdown = (-100_i64..100, any::<bool>()).prop_map(|(seconds, delete)| H::SetShutdown {
        seconds,
        policy: if delete {
            ShutdownPolicy::Delete
        } else {
            ShutdownPolicy::Retain
        },
    });
    let ends = prop::sample::select(vec![
        ("Succeeded", None),
        ("Failed", None),
        ("Failed", Some("Evicted")),
        ("Failed", Some("NodeLost")),
    ])
    .prop_map(|(phase, reason)| H::PodEnds { phase, reason });
    let mode = prop::sample::select(vec![
        None,
        Some(OperatingMode::Running),
        Some(OperatingMode::Suspended),
    ]);
    prop_oneof![
        prop::option::of(0..=1).prop_map(H::SetReplicas),
        mode.prop_map(H::SetMode),
        prop::option::of(any::<bool>()).prop_map(H::SetService),
        prop::collection::vec("[abc]", 0..3).prop_map(H::SetLabels),
        shutdown,
        Just(H::ClearShutdown),
        prop::sample::select(vec!["warm", NAME, "missing"])
            .prop_map(|name| H::AnnotatePodName(name.to_owned())),
        Just(H::PodBecomesReady),
        ends,
        Just(H::PodVanishes),
        Just(H::PodStartsTerminating),
        Just(H::PodLabelTampered),
        Just(H::ForeignPod),
        Just(H::UnownedPod),
        Just(H::ServiceVanishes),
        Just(H::ServiceTampered),
        Just(H::ForeignService),
        Just(H::VolumeClaimVanishes),
        Just(H::ForeignVolumeClaim),
        prop::sample::select(vec![Adoption::Any, Adoption::Labelled]).prop_map(H::AdoptionSet),
        (0_i64..400).prop_map(H::TimePasses),
        Just(H::Reconcile),
        Just(H::Reconcile),
    ]
}

fn start() -> World {
    World::new(sandbox(SandboxSpec {
        volume_claim_templates: Some(vec![PersistentVolumeClaimTemplate {
            metadata: EmbeddedObjectMetadata {
                name: Some("work".to_owned()),
                ..EmbeddedObjectMetadata::default()
            },
            ..PersistentVolumeClaimTemplate::default()
        }]),
        ..SandboxSpec::default()
    }))
}

fn foreign(mut metadata: ObjectMeta) -> ObjectMeta {
    metadata.owner_references = Some(vec![other_owner()]);
    metadata
}

fn happen(world: &mut World, happening: &Happening) {
    if world.sandbox.is_none() {
        return;
    }
    happen_to_spec(world, happening);
    match happening {
        Happening::PodBecomesReady => world.pods.iter_mut().take(1).for_each(make_ready),
        Happening::PodEnds { phase, reason } => {
            for own in world.pods.iter_mut().take(1) {
                own.status = pod(NAME, phase).status;
                own.status.as_mut().unwrap().reason = reason.map(str::to_owned);
            }
        }
        Happening::PodVanishes => world.pods.clear(),
        Happening::PodStartsTerminating => {
            let now = Time(world.now);
            for pod in world.pods.iter_mut().take(1) {
                pod.metadata.deletion_timestamp = Some(now.clone());
            }
        }
        Happening::PodLabelTampered => {
            for pod in &mut world.pods {
                pod.metadata.labels = None;
            }
        }
        Happening::ForeignPod => {
            let mut pod = ready_pod(NAME);
            pod.metadata = foreign(pod.metadata);
            world.pods = vec![pod];
        }
        Happening::UnownedPod => world.pods = vec![ready_pod(NAME)],
        Happening::ServiceVanishes => world.service = None,
        Happening::ServiceTampered => {
            if let Some(service) = &mut world.service {
                service.spec.get_or_insert_default().selector = None;
                service.metadata.labels = None;
            }
        }
        Happening::ForeignService => {
            let mut service = service(Some("None"));
            service.metadata = foreign(service.metadata);
            world.service = Some(service);
        }
        Happening::VolumeClaimVanishes => world.volume_claims.clear(),
        Happening::ForeignVolumeClaim => {
            world.volume_claims = vec![PersistentVolumeClaim {
                metadata: foreign(metadata("work-box")),
                ..PersistentVolumeClaim::default()
            }];
        }
        Happening::AdoptionSet(adoption) => world.adoption = *adoption,
        Happening::TimePasses(seconds) => world.advance(*seconds),
        Happening::Reconcile => {
            world.reconcile();
        }
        _ => {}
    }
}

fn happen_to_spec(world: &mut World, happening: &Happening) {
    let now = world.now;
    let spec = world.spec_mut();
    match happening {
        Happening::SetReplicas(replicas) => spec.replicas = *replicas,
        Happening::SetMode(mode) => spec.operating_mode = *mode,
        Happening::SetService(service) => spec.service = *service,
        Happening::SetLabels(keys) => {
            let labels = keys.iter().map(|key| (key.clone(), "v".to_owned()));
            spec.pod_template.metadata.labels = Some(labels.collect());
        }
        Happening::SetShutdown { seconds, policy } => {
            let at = now
                .checked_add(SignedDuration::from_secs(*seconds))
                .unwrap();
            spec.shutdown_time = Some(Time(at));
            spec.shutdown_policy = Some(*policy);
        }
        Happening::ClearShutdown => spec.shutdown_time = None,
        Happening::AnnotatePodName(name) => {
            let annotation = (labels::POD_NAME.to_owned(), name.clone());
            let sandbox = world.sandbox.as_mut().unwrap();
            sandbox.metadata.annotations = Some([annotation].into());
        }
        _ => {}
    }
}

/// Whatever in the world another controller owns.
fn foreign_objects(world: &World) -> Vec<String> {
    let all = world
        .pods
        .iter()
        .map(|pod| serde_json::to_string(pod).unwrap());
    let all = all.chain(
        world
            .service
            .iter()
            .map(|it| serde_json::to_string(it).unwrap()),
    );
    let all = all.chain(
        world
            .volume_claims
            .iter()
            .map(|claim| serde_json::to_string(claim).unwrap()),
    );
    all.filter(|text| text.contains("uid-of-someone")).collect()
}

/// Lets terminating pods end and waits as long as the plan asks, until nothing more is asked for.
fn quiesce(world: &mut World) {
    for _ in 0..40 {
        world
            .pods
            .retain(|pod| pod.metadata.deletion_timestamp.is_none());
        if world.sandbox.is_none() {
            return;
        }
        world.settle();
        if world.sandbox.is_none() {
            return;
        }
        let Some(delay) = world.decide().requeue else {
            return;
        };
        world.advance(i64::try_from(delay.as_secs()).unwrap() + 1);
    }
    panic!("never comes to rest: {:#?}", world.decide());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn after_any_history_the_sandbox_comes_to_rest(history in prop::collection::vec(happening(), 0..25)) {
        let mut world = start();
        for happening in history {
            happen(&mut world, &happening);
        }
        quiesce(&mut world);
        if world.sandbox.is_none() {
            return Ok(());
        }
        let plan = world.decide();
        prop_assert!(plan.effects.is_empty(), "{plan:?}");
        if !plan.problems.is_empty() {
            prop_assert_eq!(world.ready().0, "False");
            return Ok(());
        }
        let suspended = world.sandbox().spec.suspension().is_requested();
        let uid = world.sandbox().metadata.uid.clone();
        let own_pods = world.pods.iter().filter(|pod| {
            crate::owner::controller_of(&pod.metadata).map(|owner| owner.uid.clone()) == uid
        });
        let expected = usize::from(!suspended && plan.stage == Stage::Live);
        prop_assert_eq!(own_pods.count(), expected);
    }

    #[test]
    fn what_another_controller_owns_is_never_touched(history in prop::collection::vec(happening(), 0..25)) {
        let mut world = start();
        for happening in history {
            happen(&mut world, &happening);
            if world.sandbox.is_none() {
                return Ok(());
            }
            let before = foreign_objects(&world);
            world.reconcile();
            prop_assert_eq!(foreign_objects(&world), before);
        }
    }

    #[test]
    fn what_was_done_is_not_done_again(history in prop::collection::vec(happening(), 0..25)) {
        let mut world = start();
        for happening in history {
            happen(&mut world, &happening);
        }
        if world.sandbox.is_some() {
            world.settle();
        }
        if world.sandbox.is_some() {
            let before = world.clone();
            let plan = world.reconcile();
            prop_assert!(plan.effects.is_empty(), "{plan:?}");
            prop_assert_eq!(world.status(), before.status());
        }
    }
}

//! Properties that hold for every sandbox after any sequence of outside events.

use api::freezing::{FROZEN, is_asked_for};
use api::sandbox::{
    EmbeddedObjectMetadata, OperatingMode, PersistentVolumeClaimTemplate, ShutdownPolicy,
    SuspensionStrategy, SuspensionType,
};
use api::{SandboxSpec, labels};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::SignedDuration;
use proptest::prelude::*;

use super::super::{Adoption, Stage};
use super::world::{
    NAME, World, make_ready, metadata, other_owner, pod, ready_pod, sandbox, service,
};

/// A change by a user, a node or another controller.
#[derive(Clone, Debug)]
enum Event {
    SetReplicas(Option<i32>),
    SetMode(Option<OperatingMode>),
    SetStrategy(Option<SuspensionType>),
    /// The node reports that the pod is frozen, or is not.
    PodFreezes(bool),
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

fn event() -> impl Strategy<Value = Event> {
    let shutdown =
        (-100_i64..100, any::<bool>()).prop_map(|(seconds, delete)| Event::SetShutdown {
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
    .prop_map(|(phase, reason)| Event::PodEnds { phase, reason });
    let mode = prop::sample::select(vec![
        None,
        Some(OperatingMode::Running),
        Some(OperatingMode::Suspended),
    ]);
    prop_oneof![
        prop::option::of(0..=1).prop_map(Event::SetReplicas),
        mode.prop_map(Event::SetMode),
        prop::sample::select(vec![
            None,
            Some(SuspensionType::Freeze),
            Some(SuspensionType::Hibernate),
        ])
        .prop_map(Event::SetStrategy),
        any::<bool>().prop_map(Event::PodFreezes),
        prop::option::of(any::<bool>()).prop_map(Event::SetService),
        prop::collection::vec("[abc]", 0..3).prop_map(Event::SetLabels),
        shutdown,
        Just(Event::ClearShutdown),
        prop::sample::select(vec!["warm", NAME, "missing"])
            .prop_map(|name| Event::AnnotatePodName(name.to_owned())),
        Just(Event::PodBecomesReady),
        ends,
        Just(Event::PodVanishes),
        Just(Event::PodStartsTerminating),
        Just(Event::PodLabelTampered),
        Just(Event::ForeignPod),
        Just(Event::UnownedPod),
        Just(Event::ServiceVanishes),
        Just(Event::ServiceTampered),
        Just(Event::ForeignService),
        Just(Event::VolumeClaimVanishes),
        Just(Event::ForeignVolumeClaim),
        prop::sample::select(vec![Adoption::Any, Adoption::Labelled]).prop_map(Event::AdoptionSet),
        (0_i64..400).prop_map(Event::TimePasses),
        Just(Event::Reconcile),
        Just(Event::Reconcile),
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

fn apply_event(world: &mut World, event: &Event) {
    if world.sandbox.is_none() {
        return;
    }
    apply_to_spec(world, event);
    match event {
        Event::PodBecomesReady => world.pods.iter_mut().take(1).for_each(make_ready),
        Event::PodFreezes(frozen) => {
            for own in world.pods.iter_mut().take(1) {
                let status = own.status.get_or_insert_default();
                let conditions = status.conditions.get_or_insert_default();
                conditions.retain(|condition| condition.type_ != FROZEN);
                conditions.push(PodCondition {
                    type_: FROZEN.to_owned(),
                    status: if *frozen { "True" } else { "False" }.to_owned(),
                    ..PodCondition::default()
                });
            }
        }
        Event::PodEnds { phase, reason } => {
            for own in world.pods.iter_mut().take(1) {
                own.status = pod(NAME, phase).status;
                own.status.as_mut().unwrap().reason = reason.map(str::to_owned);
            }
        }
        Event::PodVanishes => world.pods.clear(),
        Event::PodStartsTerminating => {
            let now = Time(world.now);
            for pod in world.pods.iter_mut().take(1) {
                pod.metadata.deletion_timestamp = Some(now.clone());
            }
        }
        Event::PodLabelTampered => {
            for pod in &mut world.pods {
                pod.metadata.labels = None;
            }
        }
        Event::ForeignPod => {
            let mut pod = ready_pod(NAME);
            pod.metadata = foreign(pod.metadata);
            world.pods = vec![pod];
        }
        Event::UnownedPod => world.pods = vec![ready_pod(NAME)],
        Event::ServiceVanishes => world.service = None,
        Event::ServiceTampered => {
            if let Some(service) = &mut world.service {
                service.spec.get_or_insert_default().selector = None;
                service.metadata.labels = None;
            }
        }
        Event::ForeignService => {
            let mut service = service(Some("None"));
            service.metadata = foreign(service.metadata);
            world.service = Some(service);
        }
        Event::VolumeClaimVanishes => world.volume_claims.clear(),
        Event::ForeignVolumeClaim => {
            world.volume_claims = vec![PersistentVolumeClaim {
                metadata: foreign(metadata("work-box")),
                ..PersistentVolumeClaim::default()
            }];
        }
        Event::AdoptionSet(adoption) => world.adoption = *adoption,
        Event::TimePasses(seconds) => world.advance(*seconds),
        Event::Reconcile => {
            world.reconcile();
        }
        _ => {}
    }
}

fn apply_to_spec(world: &mut World, event: &Event) {
    let now = world.now;
    let spec = world.spec_mut();
    match event {
        Event::SetReplicas(replicas) => spec.replicas = *replicas,
        Event::SetMode(mode) => spec.operating_mode = *mode,
        Event::SetStrategy(strategy) => {
            spec.suspension_strategy = strategy.map(|kind| SuspensionStrategy { kind });
        }
        Event::SetService(service) => spec.service = *service,
        Event::SetLabels(keys) => {
            let labels = keys.iter().map(|key| (key.clone(), "v".to_owned()));
            spec.pod_template.metadata.labels = Some(labels.collect());
        }
        Event::SetShutdown { seconds, policy } => {
            let at = now
                .checked_add(SignedDuration::from_secs(*seconds))
                .unwrap();
            spec.shutdown_time = Some(Time(at));
            spec.shutdown_policy = Some(*policy);
        }
        Event::ClearShutdown => spec.shutdown_time = None,
        Event::AnnotatePodName(name) => {
            let annotation = (labels::POD_NAME.to_owned(), name.clone());
            let sandbox = world.sandbox.as_mut().unwrap();
            sandbox.metadata.annotations = Some([annotation].into());
        }
        _ => {}
    }
}

/// The objects that another controller owns.
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

/// Lets terminating pods end, and reconciles after each requeue delay, until the plan requests none.
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
    panic!("never converges: {:#?}", world.decide());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn after_any_events_the_sandbox_converges(events in prop::collection::vec(event(), 0..25)) {
        let mut world = start();
        for event in events {
            apply_event(&mut world, &event);
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
        let own_pods: Vec<_> = own_pods.collect();
        let is_kept = world.sandbox().spec.suspension_type() != SuspensionType::Stop;
        if suspended && is_kept && plan.stage == Stage::Live {
            // It may have been suspended before it had a pod.
            prop_assert!(own_pods.len() <= 1);
        } else {
            let expected = usize::from(!suspended && plan.stage == Stage::Live);
            prop_assert_eq!(own_pods.len(), expected);
        }
        let is_frozen = |pod: &&Pod| is_asked_for(pod.metadata.annotations.as_ref());
        let is_wanted = suspended && world.sandbox().spec.suspension_type() == SuspensionType::Freeze;
        prop_assert!(is_wanted || !own_pods.iter().any(is_frozen), "frozen for no reason");
    }

    #[test]
    fn objects_of_another_controller_are_never_changed(events in prop::collection::vec(event(), 0..25)) {
        let mut world = start();
        for event in events {
            apply_event(&mut world, &event);
            if world.sandbox.is_none() {
                return Ok(());
            }
            let before = foreign_objects(&world);
            world.reconcile();
            prop_assert_eq!(foreign_objects(&world), before);
        }
    }

    #[test]
    fn a_second_pass_changes_nothing(events in prop::collection::vec(event(), 0..25)) {
        let mut world = start();
        for event in events {
            apply_event(&mut world, &event);
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

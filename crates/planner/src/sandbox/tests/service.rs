use api::SandboxSpec;
use k8s_openapi::api::core::v1::Service;
use serde_json::json;

use super::super::{Effect, Problem, Stage};
use super::world::{HASH, NAME, World, other_owner, predecessor, ready_pod, sandbox, service};

/// The objects that exist before, by their names in the table.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Existing {
    Nothing,
    Ours,
    OursDrifted,
    Unowned,
    UnownedWithAddress,
    Others,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Expected {
    Nothing,
    Create,
    Mend,
    Adopt,
    Delete,
    Refuse,
}

fn world(wish: Option<bool>, existing: Existing) -> World {
    let spec = SandboxSpec {
        service: wish,
        ..SandboxSpec::default()
    };
    let mut world = World::new(sandbox(spec)).with_own_pod(ready_pod(NAME));
    let owner = world.owner();
    let ours = |mut service: Service| {
        service.metadata.owner_references = Some(vec![owner.clone()]);
        service
    };
    let existing = match existing {
        Existing::Nothing => None,
        Existing::Ours => Some(ours(identified(service(Some("None"))))),
        Existing::OursDrifted => Some(ours(service(Some("None")))),
        Existing::Unowned => Some(service(None)),
        Existing::UnownedWithAddress => Some(service(Some("10.96.0.9"))),
        Existing::Others => {
            let mut service = service(Some("None"));
            service.metadata.owner_references = Some(vec![other_owner()]);
            Some(service)
        }
    };
    world.service = existing;
    world
}

fn identified(mut service: Service) -> Service {
    let identity = [(
        "agents.x-k8s.io/sandbox-name-hash".to_owned(),
        HASH.to_owned(),
    )];
    service.metadata.labels = Some(identity.clone().into());
    service.spec.as_mut().unwrap().selector = Some(identity.into());
    service
}

fn what_happens(world: &World) -> Expected {
    let plan = world.decide();
    if !plan.problems.is_empty() {
        assert!(plan.effects.is_empty());
        return Expected::Refuse;
    }
    match plan.effects.as_slice() {
        [] => Expected::Nothing,
        [Effect::CreateService(_)] => Expected::Create,
        [Effect::UpdateService { .. }] => Expected::Mend,
        [Effect::AdoptService { .. }] => Expected::Adopt,
        [Effect::DeleteService { .. }] => Expected::Delete,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_service_follows_the_wish_and_its_owner() {
    use Existing as E;
    use Expected as X;
    // wish, what exists, what happens, whether status.service is set afterwards
    let table = [
        (None, E::Nothing, X::Nothing, false),
        (None, E::Ours, X::Nothing, true),
        (None, E::OursDrifted, X::Mend, true),
        (None, E::Unowned, X::Nothing, true),
        (None, E::UnownedWithAddress, X::Nothing, true),
        (None, E::Others, X::Refuse, false),
        (Some(true), E::Nothing, X::Create, true),
        (Some(true), E::Ours, X::Nothing, true),
        (Some(true), E::OursDrifted, X::Mend, true),
        (Some(true), E::Unowned, X::Adopt, true),
        (Some(true), E::UnownedWithAddress, X::Refuse, true),
        (Some(true), E::Others, X::Refuse, false),
        (Some(false), E::Nothing, X::Nothing, false),
        (Some(false), E::Ours, X::Delete, false),
        (Some(false), E::OursDrifted, X::Delete, false),
        (Some(false), E::Unowned, X::Nothing, false),
        (Some(false), E::UnownedWithAddress, X::Nothing, false),
        (Some(false), E::Others, X::Nothing, false),
    ];
    for (wish, existing, expected, in_status) in table {
        let mut world = world(wish, existing);
        let row = format!("{wish:?} {existing:?}");
        assert_eq!(what_happens(&world), expected, "{row}");
        world.reconcile();
        let status = world.status();
        assert_eq!(status.service.is_some(), in_status, "{row}");
        let fqdn = in_status.then(|| "box.team.svc.cluster.local".to_owned());
        assert_eq!(status.service_fqdn, fqdn, "{row}");
        let is_ready = world.ready().0 == "True";
        assert_eq!(
            is_ready,
            expected != X::Refuse,
            "{row}: {:?}",
            world.ready()
        );
    }
}

#[test]
fn a_new_service_is_headless_and_selects_the_pod() {
    let plan = world(Some(true), Existing::Nothing).decide();
    let [Effect::CreateService(service)] = plan.effects.as_slice() else {
        panic!("{plan:?}");
    };
    assert_eq!(service.metadata.name.as_deref(), Some(NAME));
    let spec = service.spec.as_ref().unwrap();
    assert_eq!(spec.cluster_ip.as_deref(), Some("None"));
    let selector = spec.selector.as_ref().unwrap();
    assert_eq!(selector.len(), 1);
    assert_eq!(selector["agents.x-k8s.io/sandbox-name-hash"], HASH);
    let owner = &service.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!(
        (owner.kind.as_str(), owner.controller),
        ("Sandbox", Some(true))
    );
}

#[test]
fn adopting_replaces_a_foreign_selector_and_keeps_foreign_labels() {
    let mut world = world(Some(true), Existing::Unowned);
    let service = world.service.as_mut().unwrap();
    service.metadata.labels = Some([("app".to_owned(), "mine".to_owned())].into());
    service.spec.as_mut().unwrap().selector = Some([("app".to_owned(), "mine".to_owned())].into());
    world.settle();
    let service = world.service.unwrap();
    assert_eq!(service.metadata.labels.unwrap()["app"], "mine");
    let selector = service.spec.unwrap().selector.unwrap();
    assert_eq!(
        json!(selector),
        json!({"agents.x-k8s.io/sandbox-name-hash": HASH})
    );
}

#[test]
fn a_service_with_an_address_is_refused_by_name() {
    let problems = world(Some(true), Existing::UnownedWithAddress).problems();
    assert!(
        matches!(&problems[..], [Problem::NotHeadless { name, cluster_ip }]
        if name == NAME && cluster_ip == "10.96.0.9")
    );
}

#[test]
fn a_service_that_is_on_its_way_out_is_neither_used_nor_mended() {
    let mut world = world(Some(true), Existing::OursDrifted);
    world.service.as_mut().unwrap().metadata.deletion_timestamp = Some(
        k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(world.now),
    );
    assert_eq!(world.decide().stage, Stage::Live);
    assert_eq!(what_happens(&world), Expected::Nothing);
    world.reconcile();
    assert_eq!(world.ready().2, "Pod is Ready; Service does not exist");
    let mut left_behind = service(Some("None"));
    left_behind.metadata.owner_references = Some(vec![predecessor()]);
    world.service = Some(left_behind);
    assert_eq!(what_happens(&world), Expected::Nothing);
    assert_eq!(world.problems(), []);
    world.service = None;
    assert_eq!(what_happens(&world), Expected::Create);
}

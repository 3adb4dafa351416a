use std::collections::BTreeMap;

use api::{Sandbox, SandboxSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;

use super::super::is_handed_over;
use super::world::{NAME, World, other_owner, ready_pod, sandbox};

type Change = fn(&mut Sandbox);

fn owned_by(uid: &str) -> OwnerReference {
    OwnerReference {
        uid: uid.to_owned(),
        ..other_owner()
    }
}

/// A sandbox that is Ready, of the pool.
fn pooled() -> Sandbox {
    let world = World::new(sandbox(SandboxSpec::default())).with_own_pod(ready_pod(NAME));
    let mut pooled = world.sandbox.unwrap();
    pooled.metadata.owner_references = Some(vec![owned_by("pool")]);
    pooled
}

/// The sandbox as the claim's, with the claim's labels on its pod.
fn claimed() -> Sandbox {
    let mut claimed = pooled();
    claimed.metadata.owner_references = Some(vec![owned_by("claim")]);
    let labels = BTreeMap::from([("agents.x-k8s.io/claim-uid".to_owned(), "claim".to_owned())]);
    claimed.spec.pod_template.metadata.labels = Some(labels);
    claimed
}

#[test]
fn only_a_ready_sandbox_without_other_changes_counts_as_handed_over() {
    assert!(is_handed_over(&pooled(), &claimed()));
    assert!(
        !is_handed_over(&claimed(), &claimed()),
        "it is the claim's already"
    );
    let changes: [(&str, Change); 6] = [
        ("it is not Ready", |sandbox| sandbox.status = None),
        ("it is let go", |sandbox| {
            sandbox.metadata.owner_references = None;
        }),
        ("it is suspended", |sandbox| sandbox.spec.replicas = Some(0)),
        ("it is deleted", |sandbox| {
            sandbox.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        }),
        ("it is another", |sandbox| {
            sandbox.metadata.uid = Some("another".to_owned());
        }),
        ("it runs something else", |sandbox| {
            sandbox.spec.pod_template.spec_mut().hostname = Some("other".to_owned());
        }),
    ];
    for (what, change) in changes {
        let mut after = claimed();
        change(&mut after);
        assert!(!is_handed_over(&pooled(), &after), "{what}");
    }
}

//! Properties that hold for any order of requests: optimistic concurrency, and garbage collection.

mod support;

use std::collections::{BTreeMap, BTreeSet};

use apiserver::{Config, Server};
use futures::future::join_all;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, PostParams, PropagationPolicy},
};
use proptest::prelude::*;
use serde_json::json;

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn garbage_collection_yields_the_same_state_as_kubernetes(
        owners in proptest::collection::vec(proptest::collection::vec(any::<prop::sample::Index>(), 0..3), 2..12),
        deletions in proptest::collection::vec((any::<prop::sample::Index>(), 0..3_u8), 1..4),
    ) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime starts");
        let owners: Vec<BTreeSet<usize>> = owners
            .into_iter()
            .enumerate()
            .map(|(index, set)| if index == 0 { BTreeSet::new() } else { set.into_iter().map(|owner| owner.index(index)).collect() })
            .collect();
        let count = owners.len();
        let deletions: Vec<(usize, u8)> = deletions.into_iter().map(|(index, policy)| (index.index(count), policy)).collect();
        runtime.block_on(collect(owners, deletions));
    }
}

/// The objects that Kubernetes would leave, by number, each with its remaining owners.
type Owned = BTreeMap<usize, BTreeSet<usize>>;

fn expected(mut left: Owned, deleted: usize, policy: u8) -> Owned {
    const ORPHAN: u8 = 2;
    if left.remove(&deleted).is_none() {
        return left;
    }
    if policy == ORPHAN {
        for owners in left.values_mut() {
            owners.remove(&deleted);
        }
        return left;
    }
    loop {
        let present: BTreeSet<usize> = left.keys().copied().collect();
        let gone: Vec<usize> = left
            .iter()
            .filter(|(_, owners)| !owners.is_empty() && owners.is_disjoint(&present))
            .map(|(number, _)| *number)
            .collect();
        if gone.is_empty() {
            for owners in left.values_mut() {
                owners.retain(|owner| present.contains(owner));
            }
            return left;
        }
        for number in gone {
            left.remove(&number);
        }
    }
}

async fn collect(owners: Vec<BTreeSet<usize>>, deletions: Vec<(usize, u8)>) {
    let server = Server::open(Config::in_memory())
        .await
        .expect("the server opens");
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    let mut uids: Vec<String> = Vec::new();
    for (number, owners) in owners.iter().enumerate() {
        let references: Vec<_> = owners
            .iter()
            .map(|owner| json!({"apiVersion": "v1", "kind": "ConfigMap", "name": format!("m{owner}"), "uid": uids[*owner], "blockOwnerDeletion": owner % 2 == 0}))
            .collect();
        let map = serde_json::from_value(
            json!({"metadata": {"name": format!("m{number}"), "ownerReferences": references}}),
        )
        .expect("well formed");
        uids.push(
            maps.create(&PostParams::default(), &map)
                .await
                .expect("created")
                .uid()
                .expect("a UID"),
        );
    }
    let mut left: Owned = owners.into_iter().enumerate().collect();
    for (number, policy) in deletions {
        let parameters = match policy {
            0 => DeleteParams::background(),
            1 => DeleteParams::foreground(),
            _ => DeleteParams {
                propagation_policy: Some(PropagationPolicy::Orphan),
                ..DeleteParams::default()
            },
        };
        let deleted = maps.delete(&format!("m{number}"), &parameters).await;
        assert_eq!(deleted.is_ok(), left.contains_key(&number));
        left = expected(left, number, policy);
        testkit::eventually("the collected state", || async {
            (observe(&maps).await == left).then_some(())
        })
        .await;
    }
    server.shutdown().await;
}

async fn observe(maps: &Api<ConfigMap>) -> Owned {
    let number = |name: &str| {
        name.trim_start_matches('m')
            .parse::<usize>()
            .expect("a number")
    };
    let objects = maps.list(&ListParams::default()).await.expect("listed");
    objects
        .iter()
        // Every namespace has this config map by default.
        .filter(|map| map.name_any() != "kube-root-ca.crt")
        .map(|map| {
            (
                number(&map.name_any()),
                map.owner_references()
                    .iter()
                    .map(|owner| number(&owner.name))
                    .collect(),
            )
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn only_one_of_several_updates_of_the_same_version_succeeds() {
    let server = support::server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    let map = serde_json::from_value(json!({"metadata": {"name": "contended"}})).unwrap();
    maps.create(&PostParams::default(), &map).await.unwrap();
    for round in 0..50 {
        let current = maps.get("contended").await.unwrap();
        let attempts = (0..4).map(|attempt| {
            let (maps, mut mine) = (maps.clone(), current.clone());
            mine.data = Some([("winner".to_owned(), format!("{round}-{attempt}"))].into());
            tokio::spawn(async move {
                maps.replace("contended", &PostParams::default(), &mine)
                    .await
            })
        });
        let outcomes: Vec<_> = join_all(attempts)
            .await
            .into_iter()
            .map(Result::unwrap)
            .collect();
        let winners: Vec<_> = outcomes
            .iter()
            .filter_map(|outcome| outcome.as_ref().ok())
            .collect();
        assert_eq!(winners.len(), 1);
        assert_eq!(maps.get("contended").await.unwrap().data, winners[0].data);
        for outcome in outcomes.into_iter().filter(Result::is_err) {
            assert_eq!(support::code(outcome), 409);
        }
    }
    server.shutdown().await;
}

//! What a user sees of warm pools and templates, against the embedded API server.

#![expect(
    clippy::unwrap_used,
    reason = "what a test's helpers cannot do fails the test"
)]

mod support;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use api::template::NetworkPolicyManagement;
use api::warm_pool::UpdateStrategyKind;
use api::{Sandbox, SandboxTemplate, SandboxWarmPool, labels};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::json;
use support::{Cluster, claim, image_of, pool, template, with_strategy};
use testkit::eventually;

fn new_image(image: &str) -> serde_json::Value {
    json!({ "spec": { "podTemplate": { "spec": { "containers": [{ "name": "main", "image": image }] } } } })
}

fn uids(sandboxes: &[Sandbox]) -> BTreeSet<String> {
    sandboxes.iter().filter_map(ResourceExt::uid).collect()
}

/// Waits until a pool has exactly these many ready members, all of this image.
async fn all_of_image(cluster: &Cluster, pool: &str, count: usize, image: &str) {
    eventually(&format!("pool {pool} to be all {image}"), async || {
        let members = cluster.members(pool).await;
        let rolled =
            members.len() == count && members.iter().all(|member| image_of(member) == image);
        rolled.then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_follows_its_size_up_and_down() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.full_pool(3).await;
    for size in [6, 2, 0] {
        cluster
            .patch::<SandboxWarmPool>("warm", json!({ "spec": { "replicas": size } }))
            .await;
        let pool = cluster.pool_ready("warm", size).await;
        assert_eq!(
            cluster.members("warm").await.len(),
            usize::try_from(size).unwrap()
        );
        let selector = pool.status.unwrap().selector.unwrap();
        assert!(
            selector.starts_with(labels::WARM_POOL_SANDBOX),
            "{selector}"
        );
    }
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_is_scaled_by_those_who_only_know_scales() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    cluster.create(&pool("warm", "py", 1)).await;
    cluster.create(&pool("other", "py", 1)).await;
    cluster.pool_ready("warm", 1).await;
    cluster.pool_ready("other", 1).await;
    let pools = cluster.api::<SandboxWarmPool>();
    let more = json!({ "spec": { "replicas": 3 } });
    let scale = pools
        .patch_scale("warm", &PatchParams::default(), &Patch::Merge(more))
        .await
        .unwrap();
    assert_eq!(scale.spec.and_then(|spec| spec.replicas), Some(3));
    cluster.pool_ready("warm", 3).await;
    // The fields that an autoscaler reads: the number of replicas, and the selector of the pods.
    let status = pools.get_scale("warm").await.unwrap().status.unwrap();
    assert_eq!(status.replicas, 3);
    let selected = cluster
        .api::<Pod>()
        .list(&ListParams::default().labels(&status.selector.unwrap()))
        .await
        .unwrap();
    let pods: BTreeSet<String> = selected.iter().map(ResourceExt::name_any).collect();
    let members = cluster.members("warm").await;
    let members: BTreeSet<String> = members.iter().map(ResourceExt::name_any).collect();
    assert_eq!(pods, members);
    let none = json!({ "spec": { "replicas": 0 } });
    pools
        .patch_scale("warm", &PatchParams::default(), &Patch::Merge(none))
        .await
        .unwrap();
    cluster.pool_ready("warm", 0).await;
    assert_eq!(cluster.members("other").await.len(), 1);
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn template_changes_roll_out_as_the_strategy_says() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    for (name, strategy) in [
        ("default", None),
        ("recreate", Some(UpdateStrategyKind::Recreate)),
        ("rolling", Some(UpdateStrategyKind::RollingUpdate)),
        ("isolated", Some(UpdateStrategyKind::Recreate)),
    ] {
        cluster.create(&template(name)).await;
        let pool = pool(name, name, 4);
        let pool = strategy.map_or(pool.clone(), |kind| with_strategy(pool, kind));
        cluster.create(&pool).await;
        cluster.pool_ready(name, 4).await;
    }
    let isolated = uids(&cluster.members("isolated").await);
    let kept = uids(&cluster.members("default").await);
    for name in ["default", "recreate", "rolling"] {
        cluster
            .patch::<SandboxTemplate>(name, new_image("image-v2"))
            .await;
    }
    all_of_image(&cluster, "recreate", 4, "image-v2").await;
    all_of_image(&cluster, "rolling", 4, "image-v2").await;
    let rolled = eventually("the rollout to be reported", async || {
        let pool = cluster.get::<SandboxWarmPool>("rolling").await?;
        let status = pool.status?;
        (status.updated_replicas == 4 && status.ready_replicas == 4).then_some(status)
    })
    .await;
    assert_eq!(rolled.conditions[0].reason, "RolloutComplete");

    // The default strategy keeps the members; only a replacement is of the new revision.
    let members = cluster.members("default").await;
    assert_eq!(uids(&members), kept);
    cluster.delete::<Sandbox>(&members[0].name_any()).await;
    eventually("a replacement of the new revision", async || {
        let members = cluster.members("default").await;
        let new = members
            .iter()
            .filter(|member| image_of(member) == "image-v2")
            .count();
        (members.len() == 4 && new == 1).then_some(())
    })
    .await;
    assert_eq!(uids(&cluster.members("isolated").await), isolated);
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn switching_templates_replaces_members_and_editing_metadata_does_not() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("a")).await;
    cluster.create(&template("b")).await;
    cluster
        .create(&with_strategy(
            pool("warm", "a", 2),
            UpdateStrategyKind::Recreate,
        ))
        .await;
    cluster.pool_ready("warm", 2).await;
    let before = uids(&cluster.members("warm").await);
    let edit = json!({ "spec": { "podTemplate": { "metadata": { "labels": { "team": "ml" } } } } });
    cluster.patch::<SandboxTemplate>("a", edit).await;
    // A change that does roll, afterwards, shows that the edit was seen and rolled nothing.
    cluster
        .patch::<SandboxWarmPool>("warm", json!({ "spec": { "replicas": 3 } }))
        .await;
    cluster.pool_ready("warm", 3).await;
    assert!(uids(&cluster.members("warm").await).is_superset(&before));

    cluster
        .patch::<SandboxWarmPool>(
            "warm",
            json!({ "spec": { "sandboxTemplateRef": { "name": "b" } } }),
        )
        .await;
    eventually("all members to be of template b", async || {
        let members = cluster.members("warm").await;
        let switched = members
            .iter()
            .all(|member| member.annotations()[labels::SANDBOX_TEMPLATE_REF] == "b");
        (members.len() == 3 && switched).then_some(())
    })
    .await;
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_prefers_the_current_revision() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.full_pool(1).await;
    cluster
        .patch::<SandboxTemplate>("py", new_image("image-v2"))
        .await;
    // Templates and pools have separate watches: a pool that grows before it sees the new template uses the old revision.
    eventually("the pool to know of the new revision", async || {
        let pool = cluster.get::<SandboxWarmPool>("warm").await?;
        (pool.status?.updated_replicas == 0).then_some(())
    })
    .await;
    cluster
        .patch::<SandboxWarmPool>("warm", json!({ "spec": { "replicas": 2 } }))
        .await;
    cluster.pool_ready("warm", 2).await;
    cluster.create(&claim("mine", "py")).await;
    let ready = cluster.claim_ready("mine").await;
    assert_eq!(image_of(&cluster.sandbox_of(&ready).await), "image-v2");
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_orphan_is_taken_in_and_an_impostor_deleted() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.full_pool(1).await;
    let member = cluster.members("warm").await.remove(0);
    let mut impostor = member.clone();
    impostor.metadata = kube::core::ObjectMeta {
        name: Some("impostor".into()),
        labels: member.metadata.labels.clone(),
        ..Default::default()
    };
    impostor.status = None;
    impostor.spec.pod_template.spec_mut().containers[0].image = Some("evil".into());
    cluster.create(&impostor).await;
    cluster.gone::<Sandbox>("impostor").await;
    let orphan = json!({ "metadata": { "ownerReferences": null } });
    cluster.patch::<Sandbox>(&member.name_any(), orphan).await;
    eventually("the orphan to be owned again", async || {
        let members = cluster.members("warm").await;
        (uids(&members) == uids(std::slice::from_ref(&member))).then_some(())
    })
    .await;
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_templates_network_policy_is_kept_repaired_and_given_up() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    let policy = eventually("the policy", async || {
        cluster.get::<NetworkPolicy>("py-network-policy").await
    })
    .await;
    let spec = policy.spec.clone().unwrap();
    cluster
        .patch::<NetworkPolicy>("py-network-policy", json!({ "spec": { "ingress": null, "podSelector": { "matchLabels": { "old": "x" } } } }))
        .await;
    eventually("the policy to be repaired", async || {
        let policy = cluster.get::<NetworkPolicy>("py-network-policy").await?;
        (policy.spec.as_ref() == Some(&spec)).then_some(())
    })
    .await;
    let unmanaged =
        json!({ "spec": { "networkPolicyManagement": NetworkPolicyManagement::Unmanaged } });
    cluster.patch::<SandboxTemplate>("py", unmanaged).await;
    cluster.gone::<NetworkPolicy>("py-network-policy").await;
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_change_leaves_the_pools_of_other_templates_alone() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    for name in ["changed", "unchanged"] {
        cluster.create(&template(name)).await;
        let pool = with_strategy(pool(name, name, 2), UpdateStrategyKind::Recreate);
        cluster.create(&pool).await;
        cluster.pool_ready(name, 2).await;
    }
    let before = uids(&cluster.members("unchanged").await);
    cluster
        .patch::<SandboxTemplate>("changed", new_image("image-v2"))
        .await;
    all_of_image(&cluster, "changed", 2, "image-v2").await;
    cluster.pool_ready("changed", 2).await;
    assert_eq!(uids(&cluster.members("unchanged").await), before);
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_makes_nothing_in_a_namespace_that_ends() {
    let cluster = Cluster::start().await;
    let (tap, controllers) = cluster.tapped_controllers();
    cluster.full_pool(5).await;
    tap.forget();
    let refusal = json!({
        "status": "Failure", "message": "unable to create new content", "reason": "Forbidden", "code": 403,
        "details": {"causes": [{"reason": "NamespaceTerminating", "message": "is being terminated", "field": "metadata.namespace"}]},
    });
    let refusal: kube::core::Status = serde_json::from_value(refusal).unwrap();
    let makes_a_sandbox = |path: &str| path.ends_with("/sandboxes");
    tap.answer(move |seen| {
        (seen.is_write() && makes_a_sandbox(&seen.path)).then(|| refusal.clone())
    });
    let tried = || {
        let mut tried = tap.writes("/sandboxes");
        tried.retain(|seen| makes_a_sandbox(&seen.path));
        tried.len()
    };
    for member in cluster.members("warm").await {
        cluster.delete::<Sandbox>(&member.name_any()).await;
        cluster.gone::<Sandbox>(&member.name_any()).await;
        // The pool may pause before its next pass.
        eventually("the pool to be refused", async || {
            (tried() > 0).then_some(())
        })
        .await;
    }
    // A later event is seen after the deletions.
    cluster
        .create(&testkit::cluster::sandbox(
            "last",
            api::SandboxSpec::default(),
        ))
        .await;
    eventually("the last sandbox to be looked at", async || {
        cluster.get::<Sandbox>("last").await?.status.map(|_| ())
    })
    .await;
    assert_eq!(tried(), 1, "one refusal says enough");
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_creation_that_meets_a_conflict_is_tried_again() {
    let cluster = Cluster::start().await;
    let (tap, controllers) = cluster.tapped_controllers();
    cluster.create(&template("py")).await;
    // The response of a server to many concurrent creations that count against one quota.
    let conflict: kube::core::Status = serde_json::from_value(json!({
        "status": "Failure", "reason": "Conflict", "code": 409,
        "message": "Operation cannot be fulfilled on resourcequotas: the object has been modified",
    }))
    .unwrap();
    let refused = AtomicUsize::new(0);
    tap.answer(move |seen| {
        let makes_one = seen.is_write() && seen.path.ends_with("/sandboxes");
        let refuse = makes_one && refused.fetch_add(1, Ordering::Relaxed) < 2;
        refuse.then(|| conflict.clone())
    });
    cluster.create(&pool("warm", "py", 1)).await;
    cluster.pool_ready("warm", 1).await;
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_pool_writes_is_filed_under_its_controllers_name() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    cluster.create(&pool("warm", "py", 1)).await;
    let pool = cluster.pool_ready("warm", 1).await;
    let managers: Vec<_> = pool
        .managed_fields()
        .iter()
        .filter(|fields| fields.subresource.as_deref() == Some("status"))
        .map(|fields| (fields.manager.as_deref(), fields.operation.as_deref()))
        .collect();
    assert_eq!(managers, [(Some("warmpool-controller"), Some("Apply"))]);
    let member = cluster.members("warm").await.remove(0);
    let made_by = member
        .managed_fields()
        .iter()
        .find(|fields| fields.subresource.is_none());
    assert_eq!(
        made_by.unwrap().manager.as_deref(),
        Some("warmpool-controller")
    );
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_amount_that_makes_no_sense_is_refused_with_the_fields_name() {
    let cluster = Cluster::start().await;
    let kind = kube::api::ApiResource::erase::<SandboxWarmPool>(&());
    let pools = kube::Api::<kube::api::DynamicObject>::namespaced_with(
        cluster.client.clone(),
        support::NAMESPACE,
        &kind,
    );
    for (amount, is_fine) in [
        (json!("banana"), false),
        (json!(-3), false),
        (json!("101%"), false),
        (json!("5"), true),
        (json!("25%"), true),
        (json!(2), true),
    ] {
        let pool = json!({
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool",
            "metadata": { "generateName": "pool-" },
            "spec": {
                "sandboxTemplateRef": { "name": "py" },
                "updateStrategy": { "type": "RollingUpdate", "maxUnavailable": amount },
            },
        });
        let pool = serde_json::from_value(pool).unwrap();
        match pools.create(&kube::api::PostParams::default(), &pool).await {
            Ok(_) => assert!(is_fine, "{amount} was accepted"),
            Err(error) => {
                let field = "spec.updateStrategy.maxUnavailable";
                assert!(
                    !is_fine && error.to_string().contains(field),
                    "{amount}: {error}"
                );
            }
        }
    }
    cluster.stop().await;
}

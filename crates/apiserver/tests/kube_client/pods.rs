//! Binding and graceful deletion of pods.

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use serde_json::{Value, json};

use crate::requests::{create, delete, pod, try_merge};
use crate::support::{code, server};

#[tokio::test(flavor = "multi_thread")]
async fn pods_are_bound_once_and_deleted_gracefully() {
    let server = server().await;
    let pods: Api<Pod> = Api::default_namespaced(server.client());
    let made = create(&pods, &pod("p")).await;
    assert_eq!(made.status.unwrap().phase.unwrap(), "Pending");
    let bind = async |node: &str| {
        let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "p"}, "target": {"kind": "Node", "name": node}});
        pods.create_subresource::<_, Value>("binding", "p", &PostParams::default(), &binding)
            .await
    };
    bind("one").await.unwrap();
    assert_eq!(code(bind("two").await), 409);
    let bound = pods.get("p").await.unwrap();
    assert_eq!(bound.spec.unwrap().node_name.unwrap(), "one");
    let policy = json!({"spec": {"restartPolicy": "Never"}});
    assert_eq!(
        code(try_merge(&pods, "p", policy).await),
        422,
        "a pod's spec is immutable"
    );

    let going = delete(&pods, "p").await.unwrap();
    assert_eq!(going.metadata.deletion_grace_period_seconds, Some(30));
    assert!(pods.get("p").await.is_ok(), "the node removes it");
    pods.delete("p", &DeleteParams::default().grace_period(0))
        .await
        .unwrap();
    assert_eq!(code(pods.get("p").await), 404);
    server.shutdown().await;
}

//! RBAC: a user has the permissions of their roles, and cannot grant others.

use k8s_openapi::api::{
    authorization::v1::SelfSubjectAccessReview,
    core::v1::{ConfigMap, Secret},
    rbac::v1::{ClusterRoleBinding, Role, RoleBinding},
};
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;

use crate::{
    ann, grant, parsed,
    support::{code, server},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_user_has_only_the_permissions_of_their_roles() {
    let server = server().await;
    let user = server.client_as(ann());
    let maps: Api<ConfigMap> = Api::default_namespaced(user.clone());
    let kube::Error::Api(refused) = maps.list(&ListParams::default()).await.unwrap_err() else {
        panic!()
    };
    assert_eq!((refused.code, refused.reason.as_str()), (403, "Forbidden"));
    assert!(refused.message.contains("User \"ann\" cannot list resource \"configmaps\" in API group \"\" in the namespace \"default\""), "{}", refused.message);

    grant(
        &server.client(),
        json!([{"verbs": ["get", "list"], "apiGroups": [""], "resources": ["configmaps"]}]),
    )
    .await;
    maps.list(&ListParams::default()).await.unwrap();
    assert_eq!(
        code(
            Api::<ConfigMap>::namespaced(user.clone(), "kube-system")
                .list(&ListParams::default())
                .await
        ),
        403
    );
    assert_eq!(
        code(
            Api::<Secret>::default_namespaced(user.clone())
                .list(&ListParams::default())
                .await
        ),
        403
    );

    let ask = |verb: &str| -> SelfSubjectAccessReview {
        parsed(
            json!({"metadata": {}, "spec": {"resourceAttributes": {"verb": verb, "resource": "configmaps", "namespace": "default"}}}),
        )
    };
    let reviews: Api<SelfSubjectAccessReview> = Api::all(user);
    assert!(
        reviews
            .create(&PostParams::default(), &ask("list"))
            .await
            .unwrap()
            .status
            .unwrap()
            .allowed
    );
    assert!(
        !reviews
            .create(&PostParams::default(), &ask("delete"))
            .await
            .unwrap()
            .status
            .unwrap()
            .allowed
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_cannot_grant_permissions_they_do_not_have() {
    let server = server().await;
    grant(&server.client(), json!([
        {"verbs": ["*"], "apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles", "rolebindings"]},
        {"verbs": ["get"], "apiGroups": [""], "resources": ["configmaps"]},
    ])).await;
    // `*` would include `escalate` and `bind`, so grant exactly the write verbs.
    let roles: Api<Role> = Api::default_namespaced(server.client());
    let verbs = json!({"rules": [
        {"verbs": ["create", "patch", "get"], "apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles", "rolebindings"]},
        {"verbs": ["get"], "apiGroups": [""], "resources": ["configmaps"]},
    ]});
    roles
        .patch("granted", &PatchParams::default(), &Patch::Merge(verbs))
        .await
        .unwrap();
    let mine: Api<Role> = Api::default_namespaced(server.client_as(ann()));
    let role = |resource: &str| -> Role {
        parsed(
            json!({"metadata": {"name": format!("to-{resource}")}, "rules": [{"verbs": ["get"], "apiGroups": [""], "resources": [resource]}]}),
        )
    };
    mine.create(&PostParams::default(), &role("configmaps"))
        .await
        .unwrap();
    let kube::Error::Api(refused) = mine
        .create(&PostParams::default(), &role("secrets"))
        .await
        .unwrap_err()
    else {
        panic!()
    };
    assert!(
        refused.message.contains("not currently held"),
        "{}",
        refused.message
    );
    let bindings: Api<RoleBinding> = Api::default_namespaced(server.client_as(ann()));
    let binding: RoleBinding = parsed(
        json!({"metadata": {"name": "up"}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "User", "name": "ann"}]}),
    );
    assert_eq!(
        code(bindings.create(&PostParams::default(), &binding).await),
        403
    );
    let everywhere: Api<ClusterRoleBinding> = Api::all(server.client_as(ann()));
    assert_eq!(code(everywhere.list(&ListParams::default()).await), 403);
    server.shutdown().await;
}

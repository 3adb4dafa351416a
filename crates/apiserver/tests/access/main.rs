//! Authentication, authorization, audit, and the kubelet proxy.

#[path = "../support/mod.rs"]
mod support;

mod audit;
mod authentication;
mod authorization;
mod kubelet_proxy;
mod served;

use apiserver::User;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::{Api, Client, api::PostParams};
use serde_json::{Value, json};

fn parsed<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("the object is well formed")
}

fn ann() -> User {
    User {
        name: "ann".into(),
        groups: vec!["system:authenticated".into()],
        ..User::default()
    }
}

async fn grant(client: &Client, rules: Value) {
    let role: Role = parsed(json!({"metadata": {"name": "granted"}, "rules": rules}));
    Api::<Role>::default_namespaced(client.clone())
        .create(&PostParams::default(), &role)
        .await
        .expect("cannot create the role");
    let binding: RoleBinding = parsed(
        json!({"metadata": {"name": "granted"}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "granted"},
        "subjects": [{"kind": "User", "name": "ann"}, {"kind": "ServiceAccount", "name": "default", "namespace": "default"}]}),
    );
    Api::<RoleBinding>::default_namespaced(client.clone())
        .create(&PostParams::default(), &binding)
        .await
        .expect("cannot create the binding");
}

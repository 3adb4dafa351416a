//! Manifests survive decoding and encoding with the Rust types unchanged, in every served version.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;

use agent_sandbox_api::{
    self as api, Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool, kruise,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

fn manifests(dialect: &str) -> Vec<(String, Value)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/manifests")
        .join(dialect);
    let mut manifests: Vec<(String, Value)> = fs::read_dir(&directory)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let text = fs::read_to_string(&path).unwrap();
            (
                path.display().to_string(),
                serde_yaml_ng::from_str(&text).unwrap(),
            )
        })
        .collect();
    manifests.sort_by(|left, right| left.0.cmp(&right.0));
    assert!(!manifests.is_empty());
    manifests
}

fn through<Kind: Serialize + DeserializeOwned>(manifest: &Value) -> Value {
    let object: Kind = serde_json::from_value(manifest.clone()).unwrap();
    serde_json::to_value(object).unwrap()
}

#[test]
fn sandbox_kinds_round_trip_in_both_versions() {
    for (file, stored) in manifests("x-k8s") {
        for version in [api::DEPRECATED_VERSION, api::STORAGE_VERSION] {
            let mut manifest = stored.clone();
            let group = stored["apiVersion"]
                .as_str()
                .unwrap()
                .split_once('/')
                .unwrap()
                .0;
            manifest["apiVersion"] = format!("{group}/{version}").into();
            let read_back = match stored["kind"].as_str().unwrap() {
                "Sandbox" => through::<Sandbox>(&manifest),
                "SandboxClaim" => through::<SandboxClaim>(&manifest),
                "SandboxTemplate" => through::<SandboxTemplate>(&manifest),
                "SandboxWarmPool" => through::<SandboxWarmPool>(&manifest),
                other => panic!("{file}: unknown kind {other}"),
            };
            // An object of either version is encoded in the storage version.
            assert_eq!(read_back, stored, "{file} as {version}");
        }
    }
}

#[test]
fn kruise_kinds_round_trip() {
    for (file, manifest) in manifests("kruise") {
        let mut read_back = match manifest["kind"].as_str().unwrap() {
            "SandboxClaim" => through::<kruise::SandboxClaim>(&manifest),
            "SandboxSet" => through::<kruise::SandboxSet>(&manifest),
            other => panic!("{file}: unknown kind {other}"),
        };
        for field in ["claimTimeout", "ttlAfterCompleted"] {
            same_duration(&mut read_back, &manifest, field);
        }
        assert_eq!(read_back, manifest, "{file}");
    }
}

/// Asserts that a duration has the same value. It may be formatted differently, as in Go.
fn same_duration(read_back: &mut Value, manifest: &Value, field: &str) {
    let Some(written) = manifest["spec"][field].as_str() else {
        return;
    };
    let parse = |text: &str| text.parse::<kube::core::Duration>().unwrap();
    assert_eq!(
        parse(read_back["spec"][field].as_str().unwrap()),
        parse(written)
    );
    read_back["spec"][field] = written.into();
}

#[test]
fn a_status_written_by_upstream_is_decoded() {
    let sandbox: Sandbox = serde_json::from_value(serde_json::json!({
        "apiVersion": "agents.x-k8s.io/v1beta1",
        "kind": "Sandbox",
        "metadata": {"name": "s"},
        "spec": {"podTemplate": {"spec": {"containers": []}, "metadata": {}}},
        "status": {
            "serviceFQDN": "s.default.svc.cluster.local",
            "podIPs": ["10.0.0.1", "fd00::1"],
            "selector": "agents.x-k8s.io/sandbox-name-hash=0123abcd",
            "replicas": 1,
            "fieldOfALaterRelease": true,
        },
    }))
    .unwrap();
    let status = sandbox.status.unwrap();
    assert_eq!(
        status.service_fqdn.as_deref(),
        Some("s.default.svc.cluster.local")
    );
    assert_eq!(status.pod_ips, ["10.0.0.1", "fd00::1"]);
    assert_eq!(status.replicas, 1);
}

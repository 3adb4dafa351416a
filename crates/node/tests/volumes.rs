//! Volumes, as users see them: which pod gets which data, and when it is deleted.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on says so by panicking"
)]

mod support;

use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::{
    ConfigMap, Event, Namespace, PersistentVolume, PersistentVolumeClaim, Pod, Secret,
};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use support::{Machine, SmallDisk};
use testkit::eventually;
use tokio_util::sync::CancellationToken;

/// A machine that provisions volumes.
struct Volumes {
    machine: Machine,
    stop: CancellationToken,
}

impl Volumes {
    async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    async fn start_with(adjust: impl FnOnce(&mut agent_sandbox_node::Config)) -> Self {
        let volumes = Self::without_provisioner(adjust).await;
        volumes.provision();
        volumes
    }

    async fn without_provisioner(adjust: impl FnOnce(&mut agent_sandbox_node::Config)) -> Self {
        Self {
            machine: Machine::start_with(adjust).await,
            stop: CancellationToken::new(),
        }
    }

    fn provision(&self) {
        tokio::spawn(machine_control_plane::volume_provisioner::run(
            self.machine.client.clone(),
            self.machine.config.data_dir.canonicalize().unwrap(),
            self.stop.clone(),
        ));
    }

    fn claims(&self, namespace: &str) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.machine.client.clone(), namespace)
    }

    fn volumes(&self) -> Api<PersistentVolume> {
        Api::all(self.machine.client.clone())
    }

    async fn claim(&self, namespace: &str, name: &str, change: Value) {
        let mut spec = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}});
        for (key, value) in change.as_object().unwrap() {
            spec[key] = value.clone();
        }
        let claim = json!({"metadata": {"name": name}, "spec": spec});
        self.claims(namespace)
            .create(
                &PostParams::default(),
                &serde_json::from_value(claim).unwrap(),
            )
            .await
            .unwrap();
    }

    /// The volume of a claim, once it is bound.
    async fn bound(&self, namespace: &str, name: &str) -> String {
        eventually("the claim to be bound", || async {
            let claim = self.claims(namespace).get(name).await.unwrap();
            let is_bound = claim.status?.phase.as_deref() == Some("Bound");
            claim.spec?.volume_name.filter(|_| is_bound)
        })
        .await
    }

    fn directory(&self, volume: &str) -> PathBuf {
        self.machine.config.data_dir.join("volumes").join(volume)
    }

    async fn has_event(&self, namespace: &str, claim: &str, reason: &str, note: &str) {
        let events = Api::<Event>::namespaced(self.machine.client.clone(), namespace);
        eventually(&format!("{reason} of {claim}: {note}"), || async {
            let all = events.list(&ListParams::default()).await.unwrap();
            all.into_iter().find(|event| {
                event.involved_object.name.as_deref() == Some(claim)
                    && event.reason.as_deref() == Some(reason)
                    && event.message.as_deref().unwrap_or_default().contains(note)
            })
        })
        .await;
    }

    async fn finish(self) {
        self.stop.cancel();
        self.machine.finish().await;
    }
}

/// A pod with one container that has one volume at `/data`.
fn pod(script: &str, volume: Value) -> Value {
    let mut volume = volume;
    volume["name"] = json!("v");
    json!({"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "volumes": [volume],
        "containers": [{"name": "c", "image": "host", "command": ["sh", "-c", script],
            "volumeMounts": [{"name": "v", "mountPath": "/data"}]}]})
}

fn of_claim(name: &str) -> Value {
    json!({"persistentVolumeClaim": {"claimName": name}})
}

/// The reason why a pod's container does not start.
fn waits(pod: &Pod) -> String {
    let message = || {
        let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
        statuses
            .first()?
            .state
            .as_ref()?
            .waiting
            .as_ref()?
            .message
            .clone()
    };
    message().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_keeps_its_data_from_pod_to_pod_and_loses_it_with_the_claim() {
    let volumes = Volumes::start().await;
    let machine = &volumes.machine;
    volumes.claim("t", "data", json!({})).await;
    let spec = |script: &str| {
        let mut spec = pod(script, of_claim("data"));
        spec["securityContext"] = json!({"runAsUser": 1000, "fsGroup": 1000});
        spec
    };
    machine
        .create("writer", spec("echo kept > /data/file"))
        .await;
    machine.phase("writer", "Succeeded").await;
    machine.delete("writer").await;
    machine
        .create("reader", spec("grep kept /data/file && test -O /data/file"))
        .await;
    machine.phase("reader", "Succeeded").await;
    machine.delete("reader").await;
    let directory = volumes.directory(&volumes.bound("t", "data").await);
    assert!(directory.join("file").exists());
    let now = DeleteParams::default();
    volumes.claims("t").delete("data", &now).await.unwrap();
    eventually("the volume's directory to go", || async {
        (!directory.exists()).then_some(())
    })
    .await;
    volumes.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_waits_for_its_claim_to_be_bound_without_a_warning() {
    let volumes = Volumes::without_provisioner(|_| {}).await;
    let machine = &volumes.machine;
    volumes.claim("t", "data", json!({})).await;
    machine.create("p", pod("true", of_claim("data"))).await;
    let pods = Api::<Pod>::namespaced(machine.client.clone(), "t");
    eventually("the pod to say what it waits for", || async {
        let found = pods.get("p").await.unwrap();
        let unbound = "persistentvolumeclaim \"data\" is not bound";
        waits(&found).contains(unbound).then_some(())
    })
    .await;
    volumes.provision();
    machine.phase("p", "Succeeded").await;
    // Events of a pod are written in order, so by now a warning would be there.
    volumes.has_event("t", "p", "Started", "").await;
    let events = Api::<Event>::namespaced(machine.client.clone(), "t");
    let events = events.list(&ListParams::default()).await.unwrap();
    let warned = events
        .iter()
        .filter(|event| event.type_.as_deref() == Some("Warning"));
    assert_eq!(warned.collect::<Vec<_>>(), Vec::<&Event>::new());
    volumes.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_starts_once_the_objects_it_lacks_are_there() {
    let volumes = Volumes::start().await;
    let machine = &volumes.machine;
    let mut spec = pod(
        "test $PASSWORD = word",
        json!({"configMap": {"name": "settings"}}),
    );
    spec["containers"][0]["env"] = json!([{"name": "PASSWORD",
        "valueFrom": {"secretKeyRef": {"name": "password", "key": "k"}}}]);
    machine.create("p", spec).await;
    let lacks = "configmap \"settings\" not found";
    volumes.has_event("t", "p", "FailedMount", lacks).await;
    let parameters = PostParams::default();
    let settings = serde_json::from_value(json!({"metadata": {"name": "settings"}})).unwrap();
    let config_maps = Api::<ConfigMap>::namespaced(machine.client.clone(), "t");
    config_maps.create(&parameters, &settings).await.unwrap();
    let lacks = "secret \"password\" not found";
    volumes.has_event("t", "p", "Failed", lacks).await;
    let password = json!({"metadata": {"name": "password"}, "stringData": {"k": "word"}});
    let password = serde_json::from_value(password).unwrap();
    let secrets = Api::<Secret>::namespaced(machine.client.clone(), "t");
    secrets.create(&parameters, &password).await.unwrap();
    machine.phase("p", "Succeeded").await;
    volumes.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_cannot_take_or_delete_another_claims_volume_by_naming_it() {
    let volumes = Volumes::start().await;
    let machine = &volumes.machine;
    let thief = json!({"metadata": {"name": "thief"}});
    Api::<Namespace>::all(machine.client.clone())
        .create(
            &PostParams::default(),
            &serde_json::from_value(thief).unwrap(),
        )
        .await
        .unwrap();
    volumes.claim("t", "data", json!({})).await;
    let victim = volumes.bound("t", "data").await;
    let directory = volumes.directory(&victim);
    std::fs::write(directory.join("secret"), "secret").unwrap();

    for namespace in ["thief", "t"] {
        let claims = volumes.claims(namespace);
        volumes
            .claim(namespace, "loot", json!({"volumeName": victim}))
            .await;
        let note = "already bound to a different claim";
        volumes
            .has_event(namespace, "loot", "FailedBinding", note)
            .await;
        let claim = claims.get("loot").await.unwrap();
        let phase = claim.status.as_ref().unwrap().phase.as_deref();
        assert_eq!(phase, Some("Pending"), "{namespace}");

        // Even a claim whose status says that it is bound gives no access.
        let lie = json!({"status": {"phase": "Bound"}});
        claims
            .patch_status("loot", &PatchParams::default(), &Patch::Merge(lie))
            .await
            .unwrap();
        let spec = pod("cat /data/secret", of_claim("loot"));
        let thief =
            serde_json::from_value(json!({"metadata": {"name": "thief"}, "spec": spec})).unwrap();
        let pods = Api::<Pod>::namespaced(machine.client.clone(), namespace);
        pods.create(&PostParams::default(), &thief).await.unwrap();
        eventually("the pod to be refused", || async {
            let found = pods.get("thief").await.unwrap();
            waits(&found)
                .contains("does not belong to persistentvolumeclaim \"loot\"")
                .then_some(())
        })
        .await;
        let now = DeleteParams::default().grace_period(0);
        pods.delete("thief", &now).await.unwrap();
        claims
            .delete("loot", &DeleteParams::default())
            .await
            .unwrap();
    }
    // Claims are reclaimed in the order of their deletion, so those before the last one have been reclaimed as well.
    volumes.claim("t", "last", json!({})).await;
    let last = volumes.directory(&volumes.bound("t", "last").await);
    let now = DeleteParams::default();
    volumes.claims("t").delete("last", &now).await.unwrap();
    eventually("the last claim's directory to go", || async {
        (!last.exists()).then_some(())
    })
    .await;
    let kept = volumes.volumes().get(&victim).await.unwrap();
    assert_eq!(kept.status.unwrap().phase.as_deref(), Some("Bound"));
    assert_eq!(std::fs::read(directory.join("secret")).unwrap(), b"secret");
    volumes.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retained_volume_is_released_and_can_be_given_to_another_claim() {
    let volumes = Volumes::start().await;
    let class = json!({"metadata": {"name": "kept"}, "provisioner": "agents.x-k8s.io/directory", "reclaimPolicy": "Retain"});
    Api::<StorageClass>::all(volumes.machine.client.clone())
        .create(
            &PostParams::default(),
            &serde_json::from_value(class).unwrap(),
        )
        .await
        .unwrap();
    volumes
        .claim("t", "first", json!({"storageClassName": "kept"}))
        .await;
    let name = volumes.bound("t", "first").await;
    std::fs::write(volumes.directory(&name).join("file"), "kept\n").unwrap();
    let now = DeleteParams::default();
    volumes.claims("t").delete("first", &now).await.unwrap();
    eventually("the volume to be released", || async {
        let volume = volumes.volumes().get(&name).await.unwrap();
        (volume.status?.phase.as_deref() == Some("Released")).then_some(())
    })
    .await;
    let file = volumes.directory(&name).join("file");
    assert_eq!(std::fs::read(&file).unwrap(), b"kept\n");

    // It stays released until a user who may write volumes assigns it to a claim.
    volumes
        .claim(
            "t",
            "other",
            json!({"storageClassName": "kept", "volumeName": name}),
        )
        .await;
    volumes
        .has_event("t", "other", "FailedBinding", "a different claim")
        .await;
    let kept_for = json!({"spec": {"claimRef": {"namespace": "t", "name": "next", "uid": null, "resourceVersion": null}}});
    volumes
        .volumes()
        .patch(&name, &PatchParams::default(), &Patch::Merge(kept_for))
        .await
        .unwrap();
    volumes
        .claim(
            "t",
            "next",
            json!({"storageClassName": "kept", "volumeName": name}),
        )
        .await;
    assert_eq!(volumes.bound("t", "next").await, name);
    let machine = &volumes.machine;
    machine
        .create("p", pod("grep kept /data/file", of_claim("next")))
        .await;
    machine.phase("p", "Succeeded").await;
    volumes.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_with_an_unsupported_source_is_refused_and_not_mounted_empty() {
    let volumes = Volumes::start().await;
    let machine = &volumes.machine;
    for (name, source, kind) in [
        (
            "csi",
            json!({"csi": {"driver": "ebs.csi.aws.com", "volumeHandle": "h"}}),
            "CSI source",
        ),
        (
            "nfs",
            json!({"nfs": {"server": "192.0.2.1", "path": "/"}}),
            "NFS source",
        ),
        (
            "static",
            json!({"hostPath": {"path": "/srv"}}),
            "hostPath source",
        ),
    ] {
        let mut spec = source;
        spec["capacity"] = json!({"storage": "1Gi"});
        spec["accessModes"] = json!(["ReadWriteOnce"]);
        let volume = json!({"metadata": {"name": name}, "spec": spec});
        volumes
            .volumes()
            .create(
                &PostParams::default(),
                &serde_json::from_value(volume).unwrap(),
            )
            .await
            .unwrap();
        // The volume is unbound, so the claim is bound to it.
        volumes.claim("t", name, json!({"volumeName": name})).await;
        assert_eq!(volumes.bound("t", name).await, name);
        machine.create(name, pod("true", of_claim(name))).await;
        machine.has_event(name, "FailedMount", kind).await;
        let refused = machine.pod(name).await;
        assert_eq!(refused.status.unwrap().phase.as_deref(), Some("Pending"));
        assert!(!volumes.directory(name).exists());
    }
    volumes.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_created_sub_path_is_as_writable_as_its_volume() {
    let volumes = Volumes::start().await;
    let machine = &volumes.machine;
    volumes.claim("t", "data", json!({})).await;
    volumes.bound("t", "data").await;
    let cases = [
        ("claim-root", of_claim("data"), json!({}), "0 0 755"),
        (
            "claim-group",
            of_claim("data"),
            json!({"runAsUser": 1000, "fsGroup": 2000}),
            "0 2000 2775",
        ),
        ("empty-root", json!({"emptyDir": {}}), json!({}), "0 0 777"),
        (
            "empty-user",
            json!({"emptyDir": {}}),
            json!({"runAsUser": 1000}),
            "0 0 777",
        ),
        (
            "empty-group",
            json!({"emptyDir": {}}),
            json!({"runAsUser": 1000, "fsGroup": 2000}),
            "0 2000 2777",
        ),
        (
            "memory-group",
            json!({"emptyDir": {"medium": "Memory"}}),
            json!({"runAsUser": 1000, "fsGroup": 2000}),
            "0 2000 2777",
        ),
    ];
    for (name, volume, security, expected) in cases {
        let script = "echo x > /data/file; sleep 1000";
        let mut spec = pod(script, volume);
        spec["securityContext"] = security;
        spec["containers"][0]["volumeMounts"][0]["subPath"] = json!(format!("{name}/below"));
        machine.create(name, spec).await;
        let pod = machine.ready(name).await;
        let look = "until test -s /data/file; do sleep 0.01; done; stat -c '%u %g %a' /data; id -u; stat -c %u /data/file";
        let look = ["timeout", "120", "sh", "-c", look];
        let (code, out, err) = machine.exec(&pod, &look).await;
        assert_eq!(code, 0, "{name}: {err}");
        let mut lines = out.lines();
        assert_eq!(lines.next(), Some(expected), "{name}");
        assert_eq!(
            lines.next(),
            lines.next(),
            "{name}: the file is its maker's"
        );
        machine.delete(name).await;
    }
    volumes.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_sub_path_leads_out_of_its_volume() {
    let machine = Machine::start().await;
    let secret = tempfile::tempdir().unwrap();
    std::fs::write(secret.path().join("secret"), "secret").unwrap();
    let shown = secret.path().display();
    let links = format!(
        "ln -s {shown} /data/absolute; ln -s ../../../../../../../..{shown} /data/climbing; ln -s /proc/self/root /data/magic; mkdir /data/inner; ln -s inner /data/inside"
    );
    let volume = json!({"emptyDir": {}});
    for (name, path, escapes) in [
        ("absolute", "absolute", true),
        ("climbing", "climbing", true),
        ("through", "absolute/secret", true),
        ("magic", "magic", true),
        ("made", "absolute/made", true),
        ("inside", "inside", false),
    ] {
        let mut spec = pod("ls /data", volume.clone());
        spec["initContainers"] = json!([{"name": "i", "image": "host", "command": ["sh", "-c", links],
            "volumeMounts": [{"name": "v", "mountPath": "/data"}]}]);
        spec["containers"][0]["volumeMounts"][0]["subPath"] = json!(path);
        machine.create(name, spec).await;
        if escapes {
            let refused = machine
                .pod_with(name, "refused", |pod| waits(pod).contains("below"))
                .await;
            assert_eq!(refused.status.unwrap().phase.as_deref(), Some("Pending"));
        } else {
            machine.phase(name, "Succeeded").await;
        }
    }
    assert_eq!(support::entries(secret.path()).len(), 1, "nothing was made");
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn secret_volumes_have_room_for_objects_of_the_maximum_size() {
    let refresh = Duration::from_millis(50);
    let machine = Machine::start_with(|config| config.volume_refresh = refresh).await;
    let secrets = Api::<Secret>::namespaced(machine.client.clone(), "t");
    let names = ["one", "two", "three"];
    for name in names {
        let secret = json!({"metadata": {"name": name}, "stringData": {name: "small"}});
        machine.create_object::<Secret>(secret).await;
    }
    let sources: Vec<Value> = names.map(|name| json!({"secret": {"name": name}})).to_vec();
    let spec = pod("sleep 1000", json!({"projected": {"sources": sources}}));
    machine.create("p", spec).await;
    let pod = machine.ready("p").await;
    for size in [1_000_000, 1_040_000] {
        for name in names {
            let large = json!({"stringData": {name: "x".repeat(size)}});
            secrets
                .patch(name, &PatchParams::default(), &Patch::Merge(large))
                .await
                .unwrap();
        }
        eventually("the volume to follow", || async {
            let count = ["sh", "-c", "cd /data && cat one two three | wc -c"];
            let (_, out, _) = machine.exec(&pod, &count).await;
            (out.trim() == (3 * size).to_string()).then_some(())
        })
        .await;
    }
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn downward_api_volumes_follow_the_pods_labels_and_annotations() {
    let refresh = Duration::from_millis(50);
    let mut machine = Machine::start_with(|config| config.volume_refresh = refresh).await;
    let items = json!([{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
        {"path": "note", "fieldRef": {"fieldPath": "metadata.annotations['note']"}}]);
    let spec = pod("sleep 1000", json!({"downwardAPI": {"items": items}}));
    machine.create("p", spec).await;
    machine.ready("p").await;
    for round in ["first", "second", "after a restart"] {
        if round == "after a restart" {
            machine.stop_node().await;
            machine.start_node().await;
        }
        let word = round.replace(' ', "-");
        let change =
            json!({"metadata": {"labels": {"word": word}, "annotations": {"note": round}}});
        machine
            .pods()
            .patch("p", &PatchParams::default(), &Patch::Merge(change))
            .await
            .unwrap();
        let pod = machine.ready("p").await;
        let expected = format!("word=\"{word}\"\n{round}");
        eventually(&expected, || async {
            let show = ["sh", "-c", "cat /data/labels; echo; cat /data/note"];
            (machine.exec(&pod, &show).await.1 == expected).then_some(())
        })
        .await;
    }
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn host_paths_are_mounted_only_where_they_are_allowed() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("file"), "of the machine\n").unwrap();
    let shown = directory.path().display().to_string();
    let volume = |path: &str, kind: &str| json!({"hostPath": {"path": path, "type": kind}});

    let machine = Machine::start().await;
    machine
        .create("p", pod("cat /data/file", volume(&shown, "")))
        .await;
    let refused = machine
        .pod_with("p", "refused", |pod| {
            waits(pod).contains("hostPath is not allowed on this node (--allow-host-path)")
        })
        .await;
    assert_eq!(refused.status.unwrap().phase.as_deref(), Some("Pending"));
    machine.finish().await;

    let machine = Machine::start_with(|config| config.allow_host_path = true).await;
    machine
        .create(
            "p",
            pod(
                "grep 'of the machine' /data/file",
                volume(&shown, "Directory"),
            ),
        )
        .await;
    machine.phase("p", "Succeeded").await;
    let made = format!("{shown}/made");
    machine
        .create("makes", pod("ls /data", volume(&made, "DirectoryOrCreate")))
        .await;
    machine.phase("makes", "Succeeded").await;
    let file = format!("{shown}/file");
    machine
        .create("wrong", pod("true", volume(&file, "Directory")))
        .await;
    machine
        .has_event("wrong", "FailedMount", "file is not a directory")
        .await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_volumes_are_limited_by_their_own_or_their_pods_limit() {
    let machine = Machine::start().await;
    let size = "df -k --output=size /data | tail -1";
    for (name, empty, expected_kib) in [
        ("own", json!({"sizeLimit": "1Mi"}), 1 << 10),
        ("pod", json!({}), 48 << 10),
        ("less", json!({"sizeLimit": "1Gi"}), 48 << 10),
    ] {
        let mut empty = empty;
        empty["medium"] = json!("Memory");
        let mut spec = pod("sleep 1000", json!({"emptyDir": empty}));
        spec["containers"][0]["resources"] = json!({"limits": {"memory": "32Mi"}});
        let mut second = spec["containers"][0].clone();
        second["name"] = json!("second");
        second["resources"] = json!({"limits": {"memory": "16Mi"}});
        spec["containers"].as_array_mut().unwrap().push(second);
        machine.create(name, spec).await;
        let pod = machine.ready(name).await;
        let (_, out, err) = machine.exec(&pod, &["sh", "-c", size]).await;
        assert_eq!(out.trim(), expected_kib.to_string(), "{name}: {err}");
        if name == "own" {
            let fill = "head -c 2000000 /dev/zero > /data/x";
            let (code, _, err) = machine.exec(&pod, &["sh", "-c", fill]).await;
            assert_ne!(code, 0);
            assert!(err.contains("No space left"), "{err}");
        }
    }
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn files_in_memory_count_for_their_pod_also_after_the_container_that_wrote_them() {
    let machine = Machine::start().await;
    // Each stays within its own limit and that of its volume, but all together exceed the pod's limit.
    let volumes = [0, 1, 2]
        .map(|index| json!({"name": format!("v{index}"), "emptyDir": {"medium": "Memory"}}));
    let container = |name: &str, index: usize| {
        let script = format!("head -c 12000000 /dev/zero > /data/{name}");
        json!({"name": name, "image": "host", "command": ["sh", "-c", script], "resources": {"limits": {"memory": "32Mi"}},
            "volumeMounts": [{"name": format!("v{}", index % 3), "mountPath": "/data"}]})
    };
    let init: Vec<Value> = (0..6)
        .map(|index| container(&format!("i{index}"), index))
        .collect();
    let spec = json!({"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "volumes": volumes,
        "initContainers": init, "containers": [container("c", 0)]});
    machine.create("p", spec).await;
    let ended = machine.phase("p", "Failed").await;
    let statuses = ended.status.unwrap().init_container_statuses.unwrap();
    let reasons: Vec<String> = statuses
        .iter()
        .filter_map(|status| status.state.as_ref()?.terminated.as_ref()?.reason.clone())
        .collect();
    assert!(reasons.contains(&"Completed".to_owned()), "{reasons:?}");
    assert_eq!(reasons.last().map(String::as_str), Some("OOMKilled"));
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_whose_claim_grows_past_its_capacity_is_evicted_and_the_data_stays() {
    // However full the disk of the machine is.
    let disk = SmallDisk::new(c"size=400m");
    let volumes = Volumes::start_with(|config| {
        config.data_dir = disk.path().join("data");
        config.storage_check = Duration::from_millis(50);
    })
    .await;
    let machine = &volumes.machine;
    let small = json!({"resources": {"requests": {"storage": "1Mi"}}});
    volumes.claim("t", "data", small).await;
    let file = volumes
        .directory(&volumes.bound("t", "data").await)
        .join("file");
    let grow = "while :; do head -c 100000 /dev/zero >> /data/file; sleep 0.05; done";
    machine.create("writer", pod(grow, of_claim("data"))).await;
    let evicted = machine.phase("writer", "Failed").await.status.unwrap();
    assert_eq!(evicted.reason.as_deref(), Some("Evicted"));
    let message = "Usage of PersistentVolumeClaim \"data\" exceeds its capacity \"1Mi\". ";
    assert_eq!(evicted.message.as_deref(), Some(message));
    assert!(std::fs::metadata(&file).unwrap().len() > 1 << 20);
    // The next pod finds the claim full, and may free space.
    machine
        .create("cleaner", pod("sleep 0.5; rm /data/file", of_claim("data")))
        .await;
    machine.phase("cleaner", "Succeeded").await;
    assert!(!file.exists());
    volumes.finish().await;
}

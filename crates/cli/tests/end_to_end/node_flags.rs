//! What pods get from the flags of `up` that are the node's, and `agent-sandbox image`. Needs root: it starts containers.

use std::path::Path;
use std::process::Command;

use k8s_openapi::api::core::v1::{Event, Pod};
use kube::Api;
use kube::api::{AttachParams, DeleteParams, ListParams, PostParams};
use kube::runtime::wait::{await_condition, conditions};
use serde_json::{Value, json};
use testkit::eventually_within;

use crate::streams::{DEADLINE, client, within};
use crate::support::{Up, agent_sandbox, stderr_of, stdout_of};

async fn run_pod(pods: &Api<Pod>, name: &str, mut spec: Value) -> Pod {
    spec["terminationGracePeriodSeconds"] = json!(0);
    let pod = json!({"metadata": {"name": name}, "spec": spec});
    let pod = serde_json::from_value(pod).unwrap();
    pods.create(&PostParams::default(), &pod).await.unwrap();
    let running = await_condition(pods.clone(), name, conditions::is_pod_running());
    within(running).await.unwrap().unwrap()
}

#[tokio::test]
async fn flags_of_up_set_image_aliases_host_directories_and_pod_addresses() {
    let shared = tempfile::tempdir().unwrap();
    std::fs::write(shared.path().join("note"), "of the machine").unwrap();
    let up = Up::start(&[
        "--no-quickstart",
        "--allow-host-path",
        "--image-alias=python-runtime-sandbox=host",
        "--pod-cidr=10.61.0.0/16",
    ]);
    let client = client(&up).await;
    let pods = Api::<Pod>::default_namespaced(client.clone());
    let image = "registry.example/team/python-runtime-sandbox:v1";
    let script = "cat /machine/note > /dev/termination-log; sleep 1000";
    let spec = json!({"containers": [{"name": "c", "image": image, "command": ["sh", "-c", script],
            "volumeMounts": [{"name": "m", "mountPath": "/machine"}]}],
        "volumes": [{"name": "m", "hostPath": {"path": shared.path()}}]});
    let pod = run_pod(&pods, "p", spec).await;
    let address = pod.status.unwrap().pod_ip.unwrap();
    assert!(address.starts_with("10.61."), "{address}");
    let read = [
        "sh",
        "-c",
        "until cmp -s /machine/note /dev/termination-log; do sleep 0.01; done",
    ];
    let mut exec = pods
        .exec("p", read, &AttachParams::default())
        .await
        .unwrap();
    let status = within(exec.take_status().unwrap()).await.unwrap();
    assert_eq!(status.status.as_deref(), Some("Success"), "{status:?}");

    let events = Api::<Event>::default_namespaced(client);
    let reported = eventually_within(DEADLINE, "the event of the alias", async || {
        let events = events.list(&ListParams::default()).await.unwrap();
        let is_alias = |event: &Event| event.reason.as_deref() == Some("ImageAliased");
        events.items.into_iter().find(is_alias)
    })
    .await;
    assert_eq!(
        reported.message.unwrap(),
        format!("Image \"{image}\" is run as \"host\"")
    );
    pods.delete("p", &DeleteParams::default()).await.unwrap();
    eventually_within(DEADLINE, "the pod to go", async || {
        pods.get_opt("p").await.unwrap().is_none().then_some(())
    })
    .await;
}

#[test]
fn what_the_flags_of_the_node_cannot_mean_is_refused_with_the_remedy() {
    let home = tempfile::tempdir().unwrap();
    for command in ["up", "node"] {
        for (flag, remedy) in [
            ("--pod-cidr=10.61.0.0", "10.60.0.0/16"),
            ("--pod-cidr=10.61.3.0/16", "10.61.0.0"),
            ("--image-alias=runtime", "NAME=IMAGE"),
            ("--plain-http-registry=http://r", "HOST:PORT"),
        ] {
            let text = stderr_of(agent_sandbox(home.path()).args([command, flag]));
            assert!(text.contains(remedy), "{command} {flag}: {text}");
        }
    }
}

/// Runs a program of the machine and answers with what it prints first.
fn first_word(program: &mut Command) -> String {
    let printed = stdout_of(program);
    printed.split_whitespace().next().unwrap().to_owned()
}

/// An OCI layout of an image with one file.
fn layout(directory: &Path) {
    let blobs = directory.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).unwrap();
    let keep = |content: &[u8]| {
        let file = directory.join("new");
        std::fs::write(&file, content).unwrap();
        let digest = first_word(Command::new("sha256sum").arg(&file));
        std::fs::rename(&file, blobs.join(&digest)).unwrap();
        (format!("sha256:{digest}"), content.len())
    };
    let content = directory.join("content");
    std::fs::create_dir(&content).unwrap();
    std::fs::write(content.join("greeting"), "hello").unwrap();
    let archive = directory.join("layer.tar");
    let packed = Command::new("tar")
        .args(["--create", "--file"])
        .arg(&archive)
        .arg("--directory")
        .arg(&content)
        .arg("greeting")
        .status();
    assert!(packed.unwrap().success());
    let (layer, layer_size) = keep(&std::fs::read(&archive).unwrap());
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let config = json!({"architecture": architecture, "os": "linux", "config": {},
        "rootfs": {"type": "layers", "diff_ids": [layer]}});
    let (config, config_size) = keep(config.to_string().as_bytes());
    let manifest = json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config, "size": config_size},
        "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": layer, "size": layer_size}]});
    let (manifest, manifest_size) = keep(manifest.to_string().as_bytes());
    let index = json!({"schemaVersion": 2, "manifests": [
        {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": manifest, "size": manifest_size}]});
    std::fs::write(directory.join("index.json"), index.to_string()).unwrap();
    std::fs::write(
        directory.join("oci-layout"),
        r#"{"imageLayoutVersion": "1.0.0"}"#,
    )
    .unwrap();
}

#[test]
fn images_are_loaded_listed_and_removed_without_anything_running() {
    let home = tempfile::tempdir().unwrap();
    let files = tempfile::tempdir().unwrap();
    layout(files.path());
    let image = |arguments: &[&str]| {
        let mut command = agent_sandbox(home.path());
        command.arg("image").args(arguments);
        command
    };
    let path = files.path().to_str().unwrap();
    let text = stderr_of(&mut image(&["load", path]));
    assert!(text.contains("--name"), "{text}");
    let text = stdout_of(&mut image(&[
        "load",
        path,
        "--name",
        "registry.example/tool:v1",
    ]));
    let (name, id) = text.trim().split_once('\t').unwrap();
    assert_eq!(name, "registry.example/tool:v1");
    assert_eq!(stdout_of(&mut image(&["list", "-o", "name"])).trim(), name);
    let table = stdout_of(&mut image(&["list"]));
    let id = id.trim_start_matches("sha256:");
    assert!(table.contains(name) && table.contains(&id[..12]), "{table}");
    let listed: Value =
        serde_json::from_str(&stdout_of(&mut image(&["list", "-o", "json"]))).unwrap();
    assert_eq!(listed[0]["names"][0], name);
    let text = stderr_of(&mut image(&["rm", "registry.example/other:v1"]));
    assert!(text.contains("registry.example/other:v1"), "{text}");
    let text = stdout_of(&mut image(&["rm", name]));
    assert!(text.contains("removed"), "{text}");
    assert_eq!(stdout_of(&mut image(&["list", "-o", "name"])), "");
}

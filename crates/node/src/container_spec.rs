//! Translates a container of a pod into a [`ContainerSpec`]. Pure. An unsupported field is an error, never ignored.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Capabilities, Container, Pod, ResourceRequirements, SecurityContext,
};
use shim_protocol::Mount;

use crate::config::Config;
use crate::environment;
use crate::pod_resources;
use crate::quantity;
use crate::runtime::capabilities::ALLOWED_CAPABILITIES;
use crate::runtime::cgroups::Limits;
use crate::runtime::{ContainerId, ContainerSpec, ImageSource};

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SpecError {
    #[error("container {0:?} asks to be privileged, which this node never allows")]
    Privileged(String),
    #[error("{0} asks for a namespace of the machine, which this node never allows")]
    HostNamespace(&'static str),
    #[error("capability {0:?} is not allowed on this node")]
    Capability(String),
    #[error("seccomp profile type {0:?} is not supported on this node")]
    Seccomp(String),
    #[error("{field} {value} does not fit the {bits} bits of container UIDs and GIDs")]
    Identity {
        field: &'static str,
        value: i64,
        bits: u32,
    },
    #[error("{0} is not a quantity")]
    Quantity(String),
}

/// The default capabilities of a container: those of other container runtimes, as far as they have an effect inside the pod's user
/// namespace only. `NET_RAW`, `MKNOD` and `SETFCAP` are not among them.
const DEFAULT_CAPABILITIES: [&str; 11] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "AUDIT_WRITE",
];

const ALL: &str = "ALL";

/// The bit of a capability by its name, with or without the prefix `CAP_`.
fn bit(name: &str) -> Option<u64> {
    let (_, number) = ALLOWED_CAPABILITIES
        .iter()
        .find(|(allowed, _)| *allowed == plain(name))?;
    Some(1 << number)
}

fn plain(name: &str) -> String {
    let name = name.to_ascii_uppercase();
    name.strip_prefix("CAP_").unwrap_or(&name).to_owned()
}

/// The bounding set of a container, in the order of other container runtimes: first `drop: ALL`, then `add`, then `drop` by name.
pub fn capabilities(wanted: Option<&Capabilities>) -> Result<u64, SpecError> {
    let names = |list: fn(&Capabilities) -> Option<&Vec<String>>| {
        wanted.and_then(list).into_iter().flatten()
    };
    let dropped = || names(|wanted| wanted.drop.as_ref());
    let mut set = if dropped().any(|name| plain(name) == ALL) {
        0
    } else {
        let defaults = DEFAULT_CAPABILITIES.into_iter().filter_map(bit);
        defaults.fold(0, |set, bit| set | bit)
    };
    for name in names(|wanted| wanted.add.as_ref()) {
        set |= bit(name).ok_or_else(|| SpecError::Capability(name.clone()))?;
    }
    for bit in dropped().filter_map(|name| bit(name)) {
        set &= !bit;
    }
    Ok(set)
}

/// The limits from the container's resources, or the node's defaults.
pub fn limits(
    pod: &Pod,
    resources: Option<&ResourceRequirements>,
    config: &Config,
) -> Result<Limits, SpecError> {
    let table = |wanted: fn(&ResourceRequirements) -> Option<&BTreeMap<_, _>>, name: &str| {
        resources
            .and_then(wanted)
            .and_then(|table| table.get(name))
            .map(
                |quantity: &k8s_openapi::apimachinery::pkg::api::resource::Quantity| {
                    quantity.0.clone()
                },
            )
    };
    let parse = |text: Option<String>, read: fn(&str) -> Option<u64>| match text {
        None => Ok(None),
        Some(text) => read(&text).map(Some).ok_or(SpecError::Quantity(text)),
    };
    let memory = parse(
        table(|resources| resources.limits.as_ref(), "memory"),
        quantity::units,
    )?;
    let cpu = parse(
        table(|resources| resources.limits.as_ref(), "cpu"),
        quantity::milli,
    )?;
    let cpu_request = parse(
        table(|resources| resources.requests.as_ref(), "cpu"),
        quantity::milli,
    )?;
    let or_default = |container: &Container| {
        let own = pod_resources::limit(container.resources.as_ref(), "memory");
        own.map(|(bytes, _)| bytes).or(config.default_memory_limit)
    };
    let spec = pod.spec.as_ref();
    Ok(Limits {
        memory_bytes: memory.or(config.default_memory_limit),
        pod_memory_bytes: spec.and_then(|spec| pod_resources::total(spec, or_default)),
        processes: Some(config.default_process_limit),
        cpu_milli: cpu,
        cpu_request_milli: cpu_request.or(cpu),
    })
}

fn identity(field: &'static str, value: Option<i64>) -> Result<Option<u32>, SpecError> {
    const BITS: u32 = 16;
    value
        .map(|value| {
            u32::try_from(value)
                .ok()
                .filter(|value| *value < 1 << BITS)
                .ok_or(SpecError::Identity {
                    field,
                    value,
                    bits: BITS,
                })
        })
        .transpose()
}

/// The parts of the specification that do not come from the container.
#[derive(Debug)]
pub struct Parts {
    pub id: ContainerId,
    pub image: ImageSource,
    pub crashes: u32,
    pub environment: Vec<(String, String)>,
    pub mounts: Vec<Mount>,
}

pub fn build(
    pod: &Pod,
    container: &Container,
    parts: Parts,
    config: &Config,
) -> Result<ContainerSpec, SpecError> {
    let spec = pod.spec.clone().unwrap_or_default();
    for (field, is_asked_for) in [
        ("hostNetwork", spec.host_network),
        ("hostPID", spec.host_pid),
        ("hostIPC", spec.host_ipc),
    ] {
        if is_asked_for == Some(true) {
            return Err(SpecError::HostNamespace(field));
        }
    }
    let of_pod = spec.security_context.unwrap_or_default();
    let own: SecurityContext = container.security_context.clone().unwrap_or_default();
    if own.privileged == Some(true) {
        return Err(SpecError::Privileged(container.name.clone()));
    }
    let profile = own
        .seccomp_profile
        .as_ref()
        .or(of_pod.seccomp_profile.as_ref());
    if let Some(profile) = profile.filter(|profile| profile.type_ == "Localhost") {
        return Err(SpecError::Seccomp(profile.type_.clone()));
    }
    let known: BTreeMap<String, String> = parts.environment.iter().cloned().collect();
    let expanded = |words: &Option<Vec<String>>| -> Vec<String> {
        words
            .iter()
            .flatten()
            .map(|word| environment::expand(word, &known))
            .collect()
    };
    let mut supplementary_groups: Vec<u32> = Vec::new();
    for group in of_pod
        .supplemental_groups
        .iter()
        .flatten()
        .copied()
        .chain(of_pod.fs_group)
    {
        supplementary_groups.extend(identity("group", Some(group))?);
    }
    Ok(ContainerSpec {
        id: parts.id,
        image: parts.image,
        command: expanded(&container.command),
        arguments: expanded(&container.args),
        environment: parts.environment,
        working_directory: container
            .working_dir
            .clone()
            .filter(|directory| !directory.is_empty()),
        mounts: parts.mounts,
        user: identity("runAsUser", own.run_as_user.or(of_pod.run_as_user))?,
        group: identity("runAsGroup", own.run_as_group.or(of_pod.run_as_group))?,
        supplementary_groups,
        must_not_be_root: own.run_as_non_root.or(of_pod.run_as_non_root) == Some(true),
        capabilities: capabilities(own.capabilities.as_ref())?,
        no_new_privileges: own.allow_privilege_escalation == Some(false),
        read_only_root: own.read_only_root_filesystem == Some(true),
        limits: limits(pod, container.resources.as_ref(), config)?,
        terminal: container.tty == Some(true),
        stdin: container.stdin == Some(true),
        stdin_once: container.stdin_once == Some(true),
        termination_message_path: container
            .termination_message_path
            .clone()
            .unwrap_or_else(|| "/dev/termination-log".to_owned()),
        message_from_log: container.termination_message_policy.as_deref()
            == Some("FallbackToLogsOnError"),
        crashes: parts.crashes,
        beside: beside(pod, &container.name),
    })
}

/// The target container of an ephemeral container (`targetContainerName`).
fn beside(pod: &Pod, container: &str) -> Option<String> {
    let mut ephemeral = pod
        .spec
        .iter()
        .flat_map(|spec| spec.ephemeral_containers.iter().flatten());
    ephemeral
        .find(|ephemeral| ephemeral.name == container)?
        .target_container_name
        .clone()
        .filter(|target| !target.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[expect(
        clippy::needless_pass_by_value,
        reason = "a table reads better with its values in place"
    )]
    fn built(
        container: serde_json::Value,
        spec: serde_json::Value,
    ) -> Result<ContainerSpec, SpecError> {
        let mut pod = json!({"metadata": {"name": "p", "uid": "u"}, "spec": spec});
        pod["spec"]["containers"] = json!([container]);
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let parts = Parts {
            id: ContainerId {
                pod: "u".to_owned(),
                container: "c".to_owned(),
                attempt: 0,
            },
            image: ImageSource::Host,
            crashes: 0,
            environment: vec![("A".into(), "b".into())],
            mounts: Vec::new(),
        };
        build(
            &pod,
            &pod.spec.as_ref().unwrap().containers[0].clone(),
            parts,
            &Config::new("/nowhere"),
        )
    }

    #[test]
    fn security_contexts_merge_with_the_containers_first() {
        let spec = built(
            json!({"name": "c", "image": "host", "args": ["$(A)"], "securityContext": {"runAsUser": 7}}),
            json!({"securityContext": {"runAsUser": 5, "runAsGroup": 6, "fsGroup": 9, "supplementalGroups": [8]}}),
        )
        .unwrap();
        assert_eq!((spec.user, spec.group), (Some(7), Some(6)));
        assert_eq!(spec.supplementary_groups, [8, 9]);
        assert_eq!(spec.arguments, ["b"]);
    }

    fn named(set: u64) -> Vec<&'static str> {
        let known = ALLOWED_CAPABILITIES.iter();
        let has = known.filter(|(_, number)| set & (1 << number) != 0);
        has.map(|(name, _)| *name).collect()
    }

    #[test]
    fn capabilities_are_the_usual_ones_without_those_that_are_dropped() {
        let usual = named(capabilities(None).unwrap());
        assert_eq!(
            usual.join(" "),
            "CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE SYS_CHROOT AUDIT_WRITE"
        );
        let without =
            |name: &str| -> Vec<_> { usual.iter().copied().filter(|own| *own != name).collect() };
        let with = |name| usual.iter().copied().chain([name]).collect::<Vec<_>>();
        for (context, expected) in [
            (json!({}), usual.clone()),
            (json!({"drop": ["ALL"]}), vec![]),
            (json!({"drop": ["all"]}), vec![]),
            (
                json!({"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}),
                vec!["NET_BIND_SERVICE"],
            ),
            (
                json!({"drop": ["ALL"], "add": ["CAP_CHOWN", "chown"]}),
                vec!["CHOWN"],
            ),
            (json!({"drop": ["NET_RAW", "MKNOD"]}), usual.clone()),
            (json!({"drop": ["KILL"]}), without("KILL")),
            (json!({"add": ["KILL"], "drop": ["KILL"]}), without("KILL")),
            (json!({"add": ["SETFCAP"]}), with("SETFCAP")),
        ] {
            let wanted: Capabilities = serde_json::from_value(context.clone()).unwrap();
            let set = capabilities(Some(&wanted)).unwrap();
            assert_eq!(named(set), expected, "{context}");
        }
    }

    #[test]
    fn programs_may_gain_privileges_unless_the_container_says_otherwise() {
        for (context, expected) in [
            (json!({}), false),
            (json!({"allowPrivilegeEscalation": true}), false),
            (json!({"allowPrivilegeEscalation": false}), true),
        ] {
            let container = json!({"name": "c", "image": "host", "securityContext": context});
            let spec = built(container, json!({})).unwrap();
            assert_eq!(spec.no_new_privileges, expected, "{context}");
        }
    }

    #[test]
    fn what_would_weaken_the_container_is_refused_by_name() {
        for (context, message) in [
            (
                json!({"privileged": true}),
                "container \"c\" asks to be privileged, which this node never allows",
            ),
            (
                json!({"capabilities": {"add": ["SYS_ADMIN"]}}),
                "capability \"SYS_ADMIN\" is not allowed on this node",
            ),
            (
                json!({"capabilities": {"add": ["ALL"]}}),
                "capability \"ALL\" is not allowed on this node",
            ),
            (
                json!({"capabilities": {"add": ["NET_RAW"], "drop": ["NET_RAW"]}}),
                "capability \"NET_RAW\" is not allowed on this node",
            ),
            (
                json!({"runAsUser": 70000}),
                "runAsUser 70000 does not fit the 16 bits of container UIDs and GIDs",
            ),
            (
                json!({"seccompProfile": {"type": "Localhost"}}),
                "seccomp profile type \"Localhost\" is not supported on this node",
            ),
        ] {
            let error = built(
                json!({"name": "c", "image": "host", "securityContext": context}),
                json!({}),
            )
            .unwrap_err();
            assert_eq!(error.to_string(), message);
        }
    }

    #[test]
    fn a_pod_that_asks_for_a_namespace_of_the_machine_is_refused() {
        for field in ["hostNetwork", "hostPID", "hostIPC"] {
            let container = json!({"name": "c", "image": "host"});
            let error = built(container.clone(), json!({field: true})).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "{field} asks for a namespace of the machine, which this node never allows"
                )
            );
            assert!(built(container, json!({field: false})).is_ok(), "{field}");
        }
    }

    #[test]
    fn limits_come_from_resources_and_requests_default_to_them() {
        let spec = built(
            json!({"name": "c", "image": "host", "resources": {"limits": {"cpu": "250m", "memory": "1Gi"}}}),
            json!({}),
        )
        .unwrap();
        assert_eq!(spec.limits.memory_bytes, Some(1 << 30));
        assert_eq!(spec.limits.pod_memory_bytes, Some(1 << 30));
        assert_eq!(
            (spec.limits.cpu_milli, spec.limits.cpu_request_milli),
            (Some(250), Some(250))
        );
        assert_eq!(spec.limits.processes, Some(1024));
    }
}

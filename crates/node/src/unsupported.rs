//! What a pod asks for that this node does not do, said to its user as warnings. Pure.
//!
//! Fields that would make a pod run with less isolation than it thinks, or not at all, are refused where they are read
//! ([`container_spec`](crate::container_spec), [`volumes`](crate::volumes)); here are those without which it runs, though
//! perhaps not as meant. The test at the end goes through every field there is.

use k8s_openapi::api::core::v1::{
    Container, LifecycleHandler, Pod, PodSecurityContext, PodSpec, SecurityContext, Volume,
};

use crate::pod_lifecycle::ephemeral_containers;

/// Resources that are enforced, or counted.
const KNOWN_RESOURCES: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];

/// Collects sentences.
#[derive(Default)]
struct Found(Vec<String>);

impl Found {
    fn say(&mut self, present: bool, text: impl Into<String>) {
        if present {
            self.0.push(text.into());
        }
    }
}

fn given<T>(list: Option<&Vec<T>>) -> bool {
    list.is_some_and(|list| !list.is_empty())
}

/// What a pod asks for that this node does not do, one sentence each.
pub fn unsupported(pod: &Pod) -> Vec<String> {
    let Some(spec) = &pod.spec else {
        return Vec::new();
    };
    let mut found = Found::default();
    of_pod(spec, &mut found);
    if let Some(context) = &spec.security_context {
        of_pod_context(context, &mut found);
    }
    let plain = spec.containers.iter();
    for container in spec
        .init_containers
        .iter()
        .flatten()
        .chain(plain.clone())
        .chain(&ephemeral_containers(spec))
    {
        of_container(container, &mut found);
        if let Some(context) = &container.security_context {
            of_context(&container.name, context, &mut found);
        }
    }
    for container in plain {
        found.say(
            container.restart_policy.is_some(),
            format!(
                "restartPolicy of container {:?} is ignored: the pod's holds for it",
                container.name
            ),
        );
    }
    for volume in spec.volumes.iter().flatten() {
        of_volume(volume, &mut found);
    }
    found.0
}

fn of_pod(spec: &PodSpec, found: &mut Found) {
    found.say(
        spec.host_network == Some(true),
        "hostNetwork is ignored: every pod has its own network",
    );
    found.say(
        spec.host_pid == Some(true),
        "hostPID is ignored: no pod sees the machine's processes",
    );
    found.say(
        spec.host_ipc == Some(true),
        "hostIPC is ignored: every pod has its own IPC",
    );
    found.say(
        spec.host_users == Some(true),
        "hostUsers is ignored: every pod has its own identities",
    );
    let system = spec.os.as_ref().map(|os| os.name.as_str());
    found.say(
        system.is_some_and(|system| system != "linux"),
        "os is ignored: this node runs Linux",
    );
    found.say(
        given(spec.resource_claims.as_ref()),
        "resourceClaims are ignored: this node has no devices to allocate",
    );
    found.say(
        spec.resources.is_some(),
        "resources of the pod as a whole are ignored: set those of its containers",
    );
    found.say(
        spec.hostname_override.is_some(),
        "hostnameOverride is ignored: use hostname",
    );
    found.say(
        spec.set_hostname_as_fqdn == Some(true),
        "setHostnameAsFQDN is ignored: the hostname is the pod's, and the full name is in /etc/hosts",
    );
    let class = spec.runtime_class_name.as_deref().unwrap_or_default();
    found.say(
        spec.share_process_namespace == Some(true) && !class.is_empty(),
        format!("shareProcessNamespace is ignored in runtime class {class:?}: every container has its own processes"),
    );
    found.say(
        spec.workload_ref.is_some(),
        "workloadRef is ignored: pods are scheduled one by one",
    );
}

fn of_pod_context(context: &PodSecurityContext, found: &mut Found) {
    found.say(given(context.sysctls.as_ref()), "sysctls are ignored");
    found.say(
        context.se_linux_options.is_some(),
        "seLinuxOptions of the pod are ignored",
    );
    found.say(
        context.app_armor_profile.is_some(),
        "appArmorProfile of the pod is ignored",
    );
    found.say(
        context.windows_options.is_some(),
        "windowsOptions of the pod are ignored",
    );
    found.say(
        context.supplemental_groups_policy.as_deref() == Some("Strict"),
        "supplementalGroupsPolicy Strict is ignored: groups of the image's user are added",
    );
    let profile = context.seccomp_profile.as_ref();
    found.say(
        profile.is_some_and(|profile| profile.type_ == "Unconfined"),
        "the pod asks for no seccomp profile and gets the default one",
    );
}

fn of_container(container: &Container, found: &mut Found) {
    let name = &container.name;
    found.say(
        given(container.volume_devices.as_ref()),
        format!("volumeDevices of container {name:?} are ignored"),
    );
    found.say(
        given(container.restart_policy_rules.as_ref()),
        format!("restartPolicyRules of container {name:?} are ignored: the pod's restartPolicy holds for it"),
    );
    let mut ports = container.ports.iter().flatten();
    found.say(
        ports.any(|port| port.host_port.is_some_and(|port| port != 0)),
        format!("hostPort of container {name:?} is ignored: reach the pod at its address, by a service or by port-forward"),
    );
    if let Some(resources) = &container.resources {
        found.say(
            given(resources.claims.as_ref()),
            format!("resource claims of container {name:?} are ignored"),
        );
        let limits = resources.limits.iter().flatten();
        let asked = limits.chain(resources.requests.iter().flatten());
        let mut others: Vec<&str> = asked
            .map(|(resource, _)| resource.as_str())
            .filter(|resource| !KNOWN_RESOURCES.contains(resource))
            .collect();
        others.sort_unstable();
        others.dedup();
        found.say(
            !others.is_empty(),
            format!(
                "container {name:?} asks for resources that this node does not have: {}",
                others.join(", ")
            ),
        );
    }
    for mount in container.volume_mounts.iter().flatten() {
        let propagation = mount.mount_propagation.as_deref();
        found.say(
            propagation.is_some_and(|propagation| propagation != "None"),
            format!(
                "mountPropagation of {:?} in container {name:?} is ignored: no mount leaves or enters it",
                mount.mount_path
            ),
        );
        let recursively = mount.recursive_read_only.as_deref();
        found.say(
            recursively.is_some_and(|recursively| recursively != "Disabled"),
            format!(
                "recursiveReadOnly of {:?} in container {name:?} is ignored: nothing is mounted below it",
                mount.mount_path
            ),
        );
    }
    let hooks = container.lifecycle.iter();
    let sockets = |hook: &Option<LifecycleHandler>| {
        hook.as_ref().is_some_and(|hook| hook.tcp_socket.is_some())
    };
    for lifecycle in hooks {
        found.say(
            sockets(&lifecycle.post_start) || sockets(&lifecycle.pre_stop),
            format!("a lifecycle hook of container {name:?} is a tcpSocket, which does nothing"),
        );
    }
}

fn of_context(name: &str, context: &SecurityContext, found: &mut Found) {
    found.say(
        context.allow_privilege_escalation == Some(true),
        format!(
            "allowPrivilegeEscalation of container {name:?} is ignored: no program gains privileges"
        ),
    );
    found.say(
        context.se_linux_options.is_some(),
        format!("seLinuxOptions of container {name:?} are ignored"),
    );
    found.say(
        context.app_armor_profile.is_some(),
        format!("appArmorProfile of container {name:?} is ignored"),
    );
    found.say(
        context.windows_options.is_some(),
        format!("windowsOptions of container {name:?} are ignored"),
    );
    found.say(
        context.proc_mount.as_deref() == Some("Unmasked"),
        format!("procMount Unmasked of container {name:?} is ignored"),
    );
    let profile = context.seccomp_profile.as_ref();
    found.say(
        profile.is_some_and(|profile| profile.type_ == "Unconfined"),
        format!("container {name:?} asks for no seccomp profile and gets the default one"),
    );
}

fn of_volume(volume: &Volume, found: &mut Found) {
    let name = &volume.name;
    let medium = volume
        .empty_dir
        .as_ref()
        .and_then(|empty| empty.medium.as_deref());
    found.say(
        medium.is_some_and(|medium| !medium.is_empty() && medium != "Memory"),
        format!("the medium of volume {name:?} is ignored: it is a directory on disk"),
    );
    let projected = volume.projected.iter();
    for source in projected.flat_map(|projected| projected.sources.iter().flatten()) {
        found.say(
            source.cluster_trust_bundle.is_some(),
            format!("clusterTrustBundle in volume {name:?} is ignored"),
        );
        found.say(
            source.pod_certificate.is_some(),
            format!("podCertificate in volume {name:?} is ignored"),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::*;

    /// The fields of every type, one type a line.
    const TYPES: &str = include_str!("../../apimachinery/src/types/builtin.txt");

    /// Fields that do what they say.
    const HONOURED: [(&str, &[&str]); 9] = [
        (
            "PodSpec",
            &[
                "activeDeadlineSeconds",
                "automountServiceAccountToken",
                "containers",
                "dnsConfig",
                "dnsPolicy",
                "ephemeralContainers",
                "hostAliases",
                "hostname",
                "imagePullSecrets",
                "initContainers",
                "nodeName",
                "readinessGates",
                "restartPolicy",
                "runtimeClassName",
                "schedulerName",
                "schedulingGates",
                "securityContext",
                "serviceAccount",
                "serviceAccountName",
                "shareProcessNamespace",
                "subdomain",
                "terminationGracePeriodSeconds",
                "volumes",
            ],
        ),
        (
            "PodSecurityContext",
            &[
                "fsGroup",
                "runAsGroup",
                "runAsNonRoot",
                "runAsUser",
                "supplementalGroups",
            ],
        ),
        (
            "SecurityContext",
            &[
                "readOnlyRootFilesystem",
                "runAsGroup",
                "runAsNonRoot",
                "runAsUser",
            ],
        ),
        (
            "Container",
            &[
                "args",
                "command",
                "env",
                "envFrom",
                "image",
                "imagePullPolicy",
                "lifecycle",
                "livenessProbe",
                "name",
                "ports",
                "readinessProbe",
                "resources",
                "securityContext",
                "startupProbe",
                "stdin",
                "stdinOnce",
                "terminationMessagePath",
                "terminationMessagePolicy",
                "tty",
                "volumeMounts",
                "workingDir",
            ],
        ),
        (
            "VolumeMount",
            &["mountPath", "name", "readOnly", "subPath", "subPathExpr"],
        ),
        ("ContainerPort", &["containerPort", "name", "protocol"]),
        ("ResourceRequirements", &["limits", "requests"]),
        ("LifecycleHandler", &["exec", "httpGet", "sleep"]),
        (
            "VolumeProjection",
            &["configMap", "downwardAPI", "secret", "serviceAccountToken"],
        ),
    ];

    /// Fields whose value is refused with a reason, elsewhere.
    const REFUSED: [(&str, &[&str]); 1] = [("SecurityContext", &["capabilities", "privileged"])];

    /// Fields with nothing to do on one node, or whose scheduler is the one to speak.
    const WITHOUT_MEANING: [(&str, &[&str]); 4] = [
        (
            "PodSpec",
            &[
                // No service has an address of its own here, so there is nothing to put into variables.
                "enableServiceLinks",
                // The scheduler's.
                "affinity",
                "nodeSelector",
                "topologySpreadConstraints",
                "tolerations",
                "priority",
                "priorityClassName",
                "preemptionPolicy",
                // What a runtime class adds to the requests.
                "overhead",
            ],
        ),
        // How labels and owners of files are set, not which.
        (
            "PodSecurityContext",
            &["fsGroupChangePolicy", "seLinuxChangePolicy"],
        ),
        // There is no subresource to resize a pod with.
        ("Container", &["resizePolicy"]),
        // Says something only beside a port of the host's, which is told of.
        ("ContainerPort", &["hostIP"]),
    ];

    /// A pod with this field, for each that is told of.
    fn told() -> Vec<(&'static str, &'static str, Value)> {
        let container = |fields: Value| {
            let mut container = json!({"name": "c", "image": "host"});
            for (name, value) in fields.as_object().unwrap() {
                container[name] = value.clone();
            }
            json!({"containers": [container]})
        };
        let context = |fields: Value| container(json!({"securityContext": fields}));
        let mount = |field: &str, value: &str| {
            container(json!({"volumeMounts": [{"name": "v", "mountPath": "/v", field: value}]}))
        };
        let projected = |field: &str| {
            let source = json!({"path": "p", "name": "n", "signerName": "s", "keyType": "k"});
            json!({"containers": [], "volumes": [{"name": "v", "projected": {"sources": [{field: source}]}}]})
        };
        vec![
            ("PodSpec", "hostNetwork", json!({"hostNetwork": true})),
            ("PodSpec", "hostPID", json!({"hostPID": true})),
            ("PodSpec", "hostIPC", json!({"hostIPC": true})),
            ("PodSpec", "hostUsers", json!({"hostUsers": true})),
            ("PodSpec", "os", json!({"os": {"name": "windows"}})),
            (
                "PodSpec",
                "resourceClaims",
                json!({"resourceClaims": [{"name": "r"}]}),
            ),
            (
                "PodSpec",
                "resources",
                json!({"resources": {"limits": {"cpu": "1"}}}),
            ),
            (
                "PodSpec",
                "hostnameOverride",
                json!({"hostnameOverride": "h"}),
            ),
            (
                "PodSpec",
                "setHostnameAsFQDN",
                json!({"setHostnameAsFQDN": true}),
            ),
            (
                "PodSpec",
                "workloadRef",
                json!({"workloadRef": {"name": "w", "podGroup": "g"}}),
            ),
            (
                "PodSecurityContext",
                "sysctls",
                json!({"securityContext": {"sysctls": [{"name": "a", "value": "b"}]}}),
            ),
            (
                "PodSecurityContext",
                "seLinuxOptions",
                json!({"securityContext": {"seLinuxOptions": {}}}),
            ),
            (
                "PodSecurityContext",
                "appArmorProfile",
                json!({"securityContext": {"appArmorProfile": {"type": "Unconfined"}}}),
            ),
            (
                "PodSecurityContext",
                "windowsOptions",
                json!({"securityContext": {"windowsOptions": {}}}),
            ),
            (
                "PodSecurityContext",
                "supplementalGroupsPolicy",
                json!({"securityContext": {"supplementalGroupsPolicy": "Strict"}}),
            ),
            (
                "PodSecurityContext",
                "seccompProfile",
                json!({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}),
            ),
            (
                "SecurityContext",
                "allowPrivilegeEscalation",
                context(json!({"allowPrivilegeEscalation": true})),
            ),
            (
                "SecurityContext",
                "seLinuxOptions",
                context(json!({"seLinuxOptions": {}})),
            ),
            (
                "SecurityContext",
                "appArmorProfile",
                context(json!({"appArmorProfile": {"type": "Unconfined"}})),
            ),
            (
                "SecurityContext",
                "windowsOptions",
                context(json!({"windowsOptions": {}})),
            ),
            (
                "SecurityContext",
                "procMount",
                context(json!({"procMount": "Unmasked"})),
            ),
            (
                "SecurityContext",
                "seccompProfile",
                context(json!({"seccompProfile": {"type": "Unconfined"}})),
            ),
            (
                "Container",
                "volumeDevices",
                container(json!({"volumeDevices": [{"name": "v", "devicePath": "/d"}]})),
            ),
            (
                "Container",
                "restartPolicy",
                container(json!({"restartPolicy": "Always"})),
            ),
            (
                "Container",
                "restartPolicyRules",
                container(json!({"restartPolicyRules": [{"action": "Restart"}]})),
            ),
            (
                "ContainerPort",
                "hostPort",
                container(json!({"ports": [{"containerPort": 1, "hostPort": 1}]})),
            ),
            (
                "ResourceRequirements",
                "claims",
                container(json!({"resources": {"claims": [{"name": "r"}]}})),
            ),
            (
                "VolumeMount",
                "mountPropagation",
                mount("mountPropagation", "Bidirectional"),
            ),
            (
                "VolumeMount",
                "recursiveReadOnly",
                mount("recursiveReadOnly", "Enabled"),
            ),
            (
                "LifecycleHandler",
                "tcpSocket",
                container(json!({"lifecycle": {"preStop": {"tcpSocket": {"port": 1}}}})),
            ),
            (
                "VolumeProjection",
                "clusterTrustBundle",
                projected("clusterTrustBundle"),
            ),
            (
                "VolumeProjection",
                "podCertificate",
                projected("podCertificate"),
            ),
        ]
    }

    fn warnings(mut spec: Value) -> Vec<String> {
        if spec.get("containers").is_none() {
            spec["containers"] = json!([]);
        }
        unsupported(&serde_json::from_value(json!({"spec": spec})).unwrap())
    }

    #[test]
    fn each_field_that_is_not_honoured_is_told_of_by_name() {
        for (kind, field, spec) in told() {
            let said = warnings(spec);
            // What is meant is a profile; the field is named after it.
            let word = if field == "seccompProfile" {
                "seccomp"
            } else {
                field
            };
            let word = if field == "claims" {
                "resource claims"
            } else {
                word
            };
            assert!(
                said.len() == 1 && said[0].contains(word),
                "{kind}.{field}: {said:?}"
            );
        }
        let other = json!({"containers": [{"name": "c", "resources": {"limits": {"cpu": "1", "example.com/gpu": "1"}}}]});
        assert_eq!(
            warnings(other),
            ["container \"c\" asks for resources that this node does not have: example.com/gpu"]
        );
        let huge = json!({"volumes": [{"name": "v", "emptyDir": {"medium": "HugePages"}}]});
        assert_eq!(
            warnings(huge),
            ["the medium of volume \"v\" is ignored: it is a directory on disk"]
        );
    }

    #[test]
    fn other_runtimes_do_not_share_processes_and_say_so() {
        let pod = json!({"shareProcessNamespace": true, "runtimeClassName": "gvisor"});
        let said = warnings(pod);
        assert!(
            said.len() == 1 && said[0].starts_with("shareProcessNamespace"),
            "{said:?}"
        );
    }

    #[test]
    fn what_is_usual_is_told_nobody() {
        let usual = json!({"containers": [{"name": "c", "image": "host", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
            "securityContext": {"allowPrivilegeEscalation": false, "seccompProfile": {"type": "RuntimeDefault"}},
            "volumeMounts": [{"name": "v", "mountPath": "/v"}], "ports": [{"containerPort": 80}]}],
            "initContainers": [{"name": "s", "image": "host", "restartPolicy": "Always"}],
            "shareProcessNamespace": true, "os": {"name": "linux"}, "volumes": [{"name": "v", "emptyDir": {"medium": "Memory"}}]});
        assert_eq!(warnings(usual), Vec::<String>::new());
    }

    #[test]
    fn no_field_of_a_pod_is_forgotten() {
        let mut accounted: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        let lists = HONOURED.iter().chain(&REFUSED).chain(&WITHOUT_MEANING);
        for (kind, fields) in lists {
            accounted.entry(kind).or_default().extend(*fields);
        }
        for (kind, field, _) in told() {
            accounted.entry(kind).or_default().push(field);
        }
        for (kind, mut known) in accounted {
            let line = TYPES
                .lines()
                .find_map(|line| line.strip_prefix(kind)?.strip_prefix(' '))
                .unwrap_or_else(|| panic!("{kind} is not in the table"));
            let mut fields: Vec<&str> = line
                .split(' ')
                .filter_map(|field| field.split(':').next())
                .collect();
            fields.sort_unstable();
            known.sort_unstable();
            assert_eq!(known, fields, "fields of {kind}");
        }
    }
}

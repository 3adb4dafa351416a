//! The checks of the baseline level, which prevents known privilege escalations.

use std::collections::BTreeSet;

use apimachinery::go;
use serde_json::Value;

use super::{Violation, containers, has_user_namespace, named, names_of, plural, quoted, setters};

/// Forbidden string values of a field in the security contexts of a pod and its containers, and the pod or containers that set
/// them.
fn bad_values<'a>(
    spec: &'a Value,
    pointer: &str,
    is_allowed: impl Fn(&str) -> bool,
) -> (BTreeSet<&'a str>, bool, Vec<&'a str>) {
    let bad = |holder: &'a Value| {
        let value = holder["securityContext"].pointer(pointer)?;
        let value = value.as_str().unwrap_or_default();
        (!is_allowed(value)).then_some(value)
    };
    let of_pod = bad(spec);
    let values = containers(spec).filter_map(bad).chain(of_pod).collect();
    let names = names_of(spec, |container| bad(container).is_some());
    (values, of_pod.is_some(), names)
}

pub fn app_armor_profile(metadata: &Value, spec: &Value) -> Option<Violation> {
    const ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";
    let (values, is_pod, names) = bad_values(spec, "/appArmorProfile/type", |kind| {
        matches!(kind, "RuntimeDefault" | "Localhost")
    });
    let annotations: Vec<String> = metadata["annotations"]
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(key, value)| Some((key, value.as_str()?)))
        .filter(|(key, value)| {
            let is_allowed =
                value.is_empty() || *value == "runtime/default" || value.starts_with("localhost/");
            key.starts_with(ANNOTATION) && !is_allowed
        })
        .map(|(key, value)| format!("{key}={}", go::quote(value)))
        .collect();
    let mut setters = Vec::from_iter(setters(is_pod, &names));
    if !annotations.is_empty() {
        setters.push(plural(annotations.len(), "annotation", "annotations").to_owned());
    }
    if setters.is_empty() {
        return None;
    }
    let values: Vec<String> = values
        .into_iter()
        .map(ToOwned::to_owned)
        .chain(annotations)
        .collect();
    Some(Violation {
        reason: plural(
            values.len(),
            "forbidden AppArmor profile",
            "forbidden AppArmor profiles",
        ),
        detail: format!(
            "{} must not set AppArmor profile type to {}",
            setters.join(" and "),
            quoted(values)
        ),
    })
}

pub fn capabilities(_: &Value, spec: &Value) -> Option<Violation> {
    const ALLOWED: [&str; 13] = [
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    ];
    let (names, added) = added_capabilities(spec, |name| ALLOWED.contains(&name))?;
    Some(Violation {
        reason: "non-default capabilities",
        detail: format!("{names} must not include {added} in securityContext.capabilities.add"),
    })
}

/// The containers that add forbidden capabilities, and the capabilities.
pub fn added_capabilities(
    spec: &Value,
    is_allowed: impl Fn(&str) -> bool,
) -> Option<(String, String)> {
    let bad = |container: &Value| -> Vec<String> {
        let added = container.pointer("/securityContext/capabilities/add");
        let added = added.and_then(Value::as_array).into_iter().flatten();
        let added = added.filter_map(Value::as_str);
        added
            .filter(|name| !is_allowed(name))
            .map(ToOwned::to_owned)
            .collect()
    };
    let names = names_of(spec, |container| !bad(container).is_empty());
    let added: BTreeSet<String> = containers(spec).flat_map(bad).collect();
    (!names.is_empty()).then(|| (named(&names), quoted(added)))
}

pub fn host_namespaces(_: &Value, spec: &Value) -> Option<Violation> {
    let shared: Vec<String> = ["hostNetwork", "hostPID", "hostIPC"]
        .into_iter()
        .filter(|field| spec[*field] == true)
        .map(|field| format!("{field}=true"))
        .collect();
    (!shared.is_empty()).then(|| Violation {
        reason: "host namespaces",
        detail: shared.join(", "),
    })
}

pub fn host_path_volumes(_: &Value, spec: &Value) -> Option<Violation> {
    let volumes = spec["volumes"].as_array().into_iter().flatten();
    let names: Vec<&str> = volumes
        .filter(|volume| volume["hostPath"].is_object())
        .map(|volume| volume["name"].as_str().unwrap_or_default())
        .collect();
    (!names.is_empty()).then(|| Violation {
        reason: "hostPath volumes",
        detail: format!(
            "{} {}",
            plural(names.len(), "volume", "volumes"),
            quoted(&names)
        ),
    })
}

pub fn host_ports(_: &Value, spec: &Value) -> Option<Violation> {
    let ports = |container: &Value| -> Vec<String> {
        let ports = container["ports"].as_array().into_iter().flatten();
        ports
            .filter_map(|port| port["hostPort"].as_i64())
            .filter(|port| *port != 0)
            .map(|port| port.to_string())
            .collect()
    };
    let names = names_of(spec, |container| !ports(container).is_empty());
    let ports: BTreeSet<String> = containers(spec).flat_map(ports).collect();
    (!names.is_empty()).then(|| Violation {
        reason: "hostPort",
        detail: format!(
            "{} {} {} {}",
            named(&names),
            plural(names.len(), "uses", "use"),
            plural(ports.len(), "hostPort", "hostPorts"),
            Vec::from_iter(ports).join(", ")
        ),
    })
}

pub fn host_probes(_: &Value, spec: &Value) -> Option<Violation> {
    const HANDLERS: [&str; 5] = [
        "/livenessProbe",
        "/readinessProbe",
        "/startupProbe",
        "/lifecycle/postStart",
        "/lifecycle/preStop",
    ];
    let hosts = |container: &Value| -> Vec<String> {
        let handlers = HANDLERS
            .iter()
            .filter_map(|pointer| container.pointer(pointer));
        handlers
            .flat_map(|handler| ["httpGet", "tcpSocket"].map(|action| &handler[action]["host"]))
            .filter_map(Value::as_str)
            .filter(|host| !host.is_empty())
            .map(ToOwned::to_owned)
            .collect()
    };
    // Unlike the other checks, this one sorts the names.
    let names: BTreeSet<&str> = names_of(spec, |container| !hosts(container).is_empty())
        .into_iter()
        .collect();
    let names = Vec::from_iter(names);
    let hosts: BTreeSet<String> = containers(spec).flat_map(hosts).collect();
    (!names.is_empty()).then(|| Violation {
        reason: "probe or lifecycle host",
        detail: format!(
            "{} {} {} {}",
            named(&names),
            plural(names.len(), "uses", "use"),
            plural(
                hosts.len(),
                "probe or lifecycle host",
                "probe or lifecycle hosts"
            ),
            quoted(hosts)
        ),
    })
}

pub fn privileged(_: &Value, spec: &Value) -> Option<Violation> {
    let names = names_of(spec, |container| {
        container["securityContext"]["privileged"] == true
    });
    (!names.is_empty()).then(|| Violation {
        reason: "privileged",
        detail: format!(
            "{} must not set securityContext.privileged=true",
            named(&names)
        ),
    })
}

pub fn proc_mount(_: &Value, spec: &Value) -> Option<Violation> {
    let bad = |container: &Value| {
        let kind = container["securityContext"]["procMount"].as_str()?;
        (kind != "Default").then(|| kind.to_owned())
    };
    let names = names_of(spec, |container| bad(container).is_some());
    let kinds: BTreeSet<String> = containers(spec).filter_map(bad).collect();
    (!names.is_empty()).then(|| Violation {
        reason: "procMount",
        detail: format!(
            "{} must not set securityContext.procMount to {}",
            named(&names),
            quoted(kinds)
        ),
    })
}

pub fn proc_mount_1_35(metadata: &Value, spec: &Value) -> Option<Violation> {
    if has_user_namespace(spec) {
        return None;
    }
    proc_mount(metadata, spec)
}

const SELINUX_TYPES: [&str; 5] = [
    "",
    "container_t",
    "container_init_t",
    "container_kvm_t",
    // Since 1.31.
    "container_engine_t",
];

pub fn selinux_options(_: &Value, spec: &Value) -> Option<Violation> {
    selinux_options_of(spec, &SELINUX_TYPES[..4])
}

pub fn selinux_options_1_31(_: &Value, spec: &Value) -> Option<Violation> {
    selinux_options_of(spec, &SELINUX_TYPES)
}

fn selinux_options_of(spec: &Value, allowed: &[&str]) -> Option<Violation> {
    let mut kinds = BTreeSet::new();
    let (mut user, mut role) = (false, false);
    let mut is_bad = |holder: &Value| {
        let options = &holder["securityContext"]["seLinuxOptions"];
        let text = |field: &str| options[field].as_str().unwrap_or_default().to_owned();
        let is_kind_bad = !allowed.contains(&text("type").as_str());
        if is_kind_bad {
            kinds.insert(text("type"));
        }
        let (has_user, has_role) = (!text("user").is_empty(), !text("role").is_empty());
        user |= has_user;
        role |= has_role;
        is_kind_bad || has_user || has_role
    };
    let is_pod = is_bad(spec);
    let names: Vec<&str> = containers(spec)
        .filter(|container| is_bad(container))
        .map(|container| container["name"].as_str().unwrap_or_default())
        .collect();
    let setters = setters(is_pod, &names)?;
    let mut details = Vec::new();
    if !kinds.is_empty() {
        let noun = plural(kinds.len(), "type", "types");
        details.push(format!("{noun} {}", quoted(kinds)));
    }
    if user {
        details.push("user may not be set".to_owned());
    }
    if role {
        details.push("role may not be set".to_owned());
    }
    Some(Violation {
        reason: "seLinuxOptions",
        detail: format!(
            "{setters} set forbidden securityContext.seLinuxOptions: {}",
            details.join("; ")
        ),
    })
}

/// Checks the seccomp annotations, which were used before version 1.19.
pub fn seccomp_annotations(metadata: &Value, spec: &Value) -> Option<Violation> {
    const POD: &str = "seccomp.security.alpha.kubernetes.io/pod";
    const CONTAINER: &str = "container.seccomp.security.alpha.kubernetes.io/";
    let of_containers = containers(spec).map(|container| {
        format!(
            "{CONTAINER}{}",
            container["name"].as_str().unwrap_or_default()
        )
    });
    let forbidden: BTreeSet<String> = std::iter::once(POD.to_owned())
        .chain(of_containers)
        .filter_map(|key| {
            let value = metadata["annotations"][key.as_str()].as_str()?;
            let is_allowed = matches!(value, "runtime/default" | "docker/default")
                || value.starts_with("localhost/");
            (!is_allowed).then(|| format!("{key}={}", go::quote(value)))
        })
        .collect();
    (!forbidden.is_empty()).then(|| Violation {
        reason: "seccompProfile",
        detail: format!(
            "forbidden {} {}",
            plural(forbidden.len(), "annotation", "annotations"),
            Vec::from_iter(forbidden).join(", ")
        ),
    })
}

/// Whether a type of seccomp profile is allowed.
pub fn is_seccomp(kind: &str) -> bool {
    matches!(kind, "Localhost" | "RuntimeDefault")
}

pub fn seccomp_profile(_: &Value, spec: &Value) -> Option<Violation> {
    let (kinds, is_pod, names) = bad_values(spec, "/seccompProfile/type", is_seccomp);
    let setters = setters(is_pod, &names)?;
    Some(Violation {
        reason: "seccompProfile",
        detail: format!(
            "{setters} must not set securityContext.seccompProfile.type to {}",
            quoted(kinds)
        ),
    })
}

/// Allowed sysctls, in the order of the versions that added them.
const SYSCTLS: [&str; 12] = [
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
];

pub fn sysctls(_: &Value, spec: &Value) -> Option<Violation> {
    sysctls_of(spec, &SYSCTLS[..5])
}

pub fn sysctls_1_27(_: &Value, spec: &Value) -> Option<Violation> {
    sysctls_of(spec, &SYSCTLS[..6])
}

pub fn sysctls_1_29(_: &Value, spec: &Value) -> Option<Violation> {
    sysctls_of(spec, &SYSCTLS[..10])
}

pub fn sysctls_1_32(_: &Value, spec: &Value) -> Option<Violation> {
    sysctls_of(spec, &SYSCTLS)
}

fn sysctls_of(spec: &Value, allowed: &[&str]) -> Option<Violation> {
    let sysctls = spec["securityContext"]["sysctls"].as_array();
    let forbidden: Vec<&str> = sysctls
        .into_iter()
        .flatten()
        .map(|sysctl| sysctl["name"].as_str().unwrap_or_default())
        .filter(|name| !allowed.contains(name))
        .collect();
    (!forbidden.is_empty()).then(|| Violation {
        reason: "forbidden sysctls",
        detail: forbidden.join(", "),
    })
}

pub fn windows_host_process(_: &Value, spec: &Value) -> Option<Violation> {
    let is_bad =
        |holder: &Value| holder["securityContext"]["windowsOptions"]["hostProcess"] == true;
    let setters = setters(is_bad(spec), &names_of(spec, is_bad))?;
    Some(Violation {
        reason: "hostProcess",
        detail: format!("{setters} must not set securityContext.windowsOptions.hostProcess=true"),
    })
}

//! The table of checks by level and version, and the evaluation of a pod.

use serde_json::Value;

use super::{
    Violation, baseline,
    policy::{Level, LevelVersion, Version},
    restricted,
};

/// A check of a pod's metadata and spec.
type Check = fn(&Value, &Value) -> Option<Violation>;

/// A check that exists since a minor version. Of several rows with the same name, the newest that the requested version includes
/// applies.
struct Row {
    name: &'static str,
    since: u32,
    check: Check,
    /// Baseline checks that this check replaces.
    replaces: &'static [&'static str],
}

const fn row(name: &'static str, since: u32, check: Check) -> Row {
    Row {
        name,
        since,
        check,
        replaces: &[],
    }
}

/// The baseline checks, in the order in which Kubernetes reports violations.
const BASELINE: &[Row] = &[
    row("appArmorProfile", 0, baseline::app_armor_profile),
    row("capabilities_baseline", 0, baseline::capabilities),
    row("hostNamespaces", 0, baseline::host_namespaces),
    row("hostPathVolumes", 0, baseline::host_path_volumes),
    row("hostPorts", 0, baseline::host_ports),
    row("hostProbesAndHostLifecycle", 34, baseline::host_probes),
    row("privileged", 0, baseline::privileged),
    row("procMount", 0, baseline::proc_mount),
    row("procMount", 35, baseline::proc_mount_1_35),
    row("seLinuxOptions", 0, baseline::selinux_options),
    row("seLinuxOptions", 31, baseline::selinux_options_1_31),
    row("seccompProfile_baseline", 0, baseline::seccomp_annotations),
    row("seccompProfile_baseline", 19, baseline::seccomp_profile),
    row("sysctls", 0, baseline::sysctls),
    row("sysctls", 27, baseline::sysctls_1_27),
    row("sysctls", 29, baseline::sysctls_1_29),
    row("sysctls", 32, baseline::sysctls_1_32),
    row("windowsHostProcess", 0, baseline::windows_host_process),
];

const RESTRICTED: &[Row] = &[
    row(
        "allowPrivilegeEscalation",
        8,
        restricted::allow_privilege_escalation,
    ),
    row(
        "allowPrivilegeEscalation",
        25,
        restricted::allow_privilege_escalation_1_25,
    ),
    Row {
        replaces: &["capabilities_baseline"],
        ..row("capabilities_restricted", 22, restricted::capabilities)
    },
    Row {
        replaces: &["capabilities_baseline"],
        ..row("capabilities_restricted", 25, restricted::capabilities_1_25)
    },
    Row {
        replaces: &["procMount"],
        ..row("procMount_restricted", 35, baseline::proc_mount)
    },
    Row {
        replaces: &["hostPathVolumes"],
        ..row("restrictedVolumes", 0, restricted::volumes)
    },
    row("runAsNonRoot", 0, restricted::run_as_non_root),
    row("runAsNonRoot", 35, restricted::run_as_non_root_1_35),
    row("runAsUser", 23, restricted::run_as_user),
    row("runAsUser", 35, restricted::run_as_user_1_35),
    Row {
        replaces: &["seccompProfile_baseline"],
        ..row("seccompProfile_restricted", 19, restricted::seccomp_profile)
    },
    Row {
        replaces: &["seccompProfile_baseline"],
        ..row(
            "seccompProfile_restricted",
            25,
            restricted::seccomp_profile_1_25,
        )
    },
];

/// The rows that apply in a version.
fn as_of(rows: &'static [Row], version: Version) -> impl Iterator<Item = &'static Row> {
    let applies = move |row: &Row| Version::Minor(row.since) <= version;
    rows.iter().filter(move |row| {
        let is_superseded = rows
            .iter()
            .any(|other| other.name == row.name && other.since > row.since && applies(other));
        applies(row) && !is_superseded
    })
}

/// All violations of a level by a pod.
pub fn violations(required: LevelVersion, metadata: &Value, spec: &Value) -> Vec<Violation> {
    let baseline = as_of(BASELINE, required.version);
    let rows: Vec<&Row> = match required.level {
        Level::Privileged => Vec::new(),
        Level::Baseline => baseline.collect(),
        Level::Restricted => {
            let restricted: Vec<&Row> = as_of(RESTRICTED, required.version).collect();
            let is_needed = |row: &&Row| {
                !restricted
                    .iter()
                    .any(|other| other.replaces.contains(&row.name))
            };
            baseline
                .filter(is_needed)
                .chain(restricted.iter().copied())
                .collect()
        }
    };
    rows.iter()
        .filter_map(|row| (row.check)(metadata, spec))
        .collect()
}

/// The reasons with their details: `host namespaces (hostPID=true), privileged (…)`.
pub fn with_details(violations: &[Violation]) -> String {
    let described: Vec<String> = violations
        .iter()
        .map(|violation| match violation.detail.as_str() {
            "" => violation.reason.to_owned(),
            detail => format!("{} ({detail})", violation.reason),
        })
        .collect();
    described.join(", ")
}

/// The reasons without their details.
pub fn reasons(violations: &[Violation]) -> String {
    let reasons: Vec<&str> = violations
        .iter()
        .map(|violation| violation.reason)
        .collect();
    reasons.join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn violations_of(level: Level, version: Version, pod: &Value) -> String {
        let required = LevelVersion { level, version };
        with_details(&violations(required, &pod["metadata"], &pod["spec"]))
    }

    /// A pod that meets the restricted level.
    fn restricted() -> Value {
        json!({"metadata": {}, "spec": {
            "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
            "volumes": [{"name": "v", "emptyDir": {}}],
            "containers": [{"name": "c", "image": "i", "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}}}],
        }})
    }

    #[test]
    fn a_plain_pod_meets_the_baseline_and_not_the_restricted_level() {
        let plain = json!({"metadata": {}, "spec": {"containers": [{"name": "a"}], "initContainers": [{"name": "b"}]}});
        assert_eq!(
            violations_of(Level::Privileged, Version::Latest, &plain),
            ""
        );
        assert_eq!(violations_of(Level::Baseline, Version::Latest, &plain), "");
        assert_eq!(
            violations_of(Level::Restricted, Version::Latest, &restricted()),
            ""
        );
        assert_eq!(
            violations_of(Level::Restricted, Version::Latest, &plain),
            "allowPrivilegeEscalation != false (containers \"b\", \"a\" must set securityContext.allowPrivilegeEscalation=false), unrestricted capabilities (containers \"b\", \"a\" must set securityContext.capabilities.drop=[\"ALL\"]), runAsNonRoot != true (pod or containers \"b\", \"a\" must set securityContext.runAsNonRoot=true), seccompProfile (pod or containers \"b\", \"a\" must set securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\")"
        );
    }

    /// The message of each check for a pod that fails only that check.
    #[test]
    #[expect(clippy::too_many_lines, reason = "one table of every check")]
    fn every_check_reports_its_violation_with_kubernetes_messages() {
        use Level::{Baseline, Restricted};
        let container =
            |context: Value| json!({"containers": [{"name": "c", "securityContext": context}]});
        let whole =
            |context: Value| json!({"securityContext": context, "containers": [{"name": "c"}]});
        let cases = [
            (
                Baseline,
                json!({"hostNetwork": true, "hostPID": true, "hostIPC": true}),
                "host namespaces (hostNetwork=true, hostPID=true, hostIPC=true)",
            ),
            (
                Baseline,
                json!({"volumes": [{"name": "a", "hostPath": {"path": "/"}}, {"name": "b", "hostPath": {"path": "/"}}]}),
                "hostPath volumes (volumes \"a\", \"b\")",
            ),
            (
                Baseline,
                json!({"containers": [{"name": "c", "ports": [{"containerPort": 1, "hostPort": 80}, {"containerPort": 2, "hostPort": 8080}, {"containerPort": 3, "hostPort": 0}]}]}),
                "hostPort (container \"c\" uses hostPorts 80, 8080)",
            ),
            (
                Baseline,
                json!({"containers": [{"name": "c", "livenessProbe": {"httpGet": {"host": "127.0.0.1", "port": 1}}, "lifecycle": {"preStop": {"tcpSocket": {"host": "10.0.0.1", "port": 1}}}}]}),
                "probe or lifecycle host (container \"c\" uses probe or lifecycle hosts \"10.0.0.1\", \"127.0.0.1\")",
            ),
            (
                Baseline,
                container(json!({"privileged": true})),
                "privileged (container \"c\" must not set securityContext.privileged=true)",
            ),
            (
                Baseline,
                container(json!({"procMount": "Unmasked"})),
                "procMount (container \"c\" must not set securityContext.procMount to \"Unmasked\")",
            ),
            (
                Baseline,
                container(json!({"capabilities": {"add": ["SYS_ADMIN", "CHOWN", "NET_RAW"]}})),
                "non-default capabilities (container \"c\" must not include \"NET_RAW\", \"SYS_ADMIN\" in securityContext.capabilities.add)",
            ),
            (
                Baseline,
                whole(json!({"seLinuxOptions": {"type": "spc_t", "user": "u", "role": "r"}})),
                "seLinuxOptions (pod set forbidden securityContext.seLinuxOptions: type \"spc_t\"; user may not be set; role may not be set)",
            ),
            (
                Baseline,
                whole(json!({"seccompProfile": {"type": "Unconfined"}})),
                "seccompProfile (pod must not set securityContext.seccompProfile.type to \"Unconfined\")",
            ),
            (
                Baseline,
                whole(
                    json!({"sysctls": [{"name": "kernel.msgmax", "value": "1"}, {"name": "net.ipv4.tcp_rmem", "value": "1"}]}),
                ),
                "forbidden sysctls (kernel.msgmax)",
            ),
            (
                Baseline,
                whole(json!({"appArmorProfile": {"type": "Unconfined"}})),
                "forbidden AppArmor profile (pod must not set AppArmor profile type to \"Unconfined\")",
            ),
            (
                Baseline,
                container(json!({"windowsOptions": {"hostProcess": true}})),
                "hostProcess (container \"c\" must not set securityContext.windowsOptions.hostProcess=true)",
            ),
            (
                Restricted,
                json!({"volumes": [{"name": "a", "hostPath": {"path": "/"}}, {"name": "b", "nfs": {}}, {"name": "c", "emptyDir": {}}]}),
                "restricted volume types (volumes \"a\", \"b\" use restricted volume types \"hostPath\", \"nfs\")",
            ),
            (
                Restricted,
                json!({"containers": [{"name": "c", "securityContext": {"allowPrivilegeEscalation": true, "capabilities": {"drop": ["ALL"]}}}]}),
                "allowPrivilegeEscalation != false (container \"c\" must set securityContext.allowPrivilegeEscalation=false)",
            ),
            (
                Restricted,
                json!({"containers": [{"name": "c", "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["NET_RAW"], "add": ["CHOWN", "NET_BIND_SERVICE"]}}}]}),
                "unrestricted capabilities (container \"c\" must set securityContext.capabilities.drop=[\"ALL\"]; container \"c\" must not include \"CHOWN\" in securityContext.capabilities.add)",
            ),
            (
                Restricted,
                json!({"securityContext": {"runAsNonRoot": false, "seccompProfile": {"type": "Localhost"}}}),
                "runAsNonRoot != true (pod must not set securityContext.runAsNonRoot=false)",
            ),
            (
                Restricted,
                json!({"securityContext": {"runAsNonRoot": true, "runAsUser": 0, "seccompProfile": {"type": "Localhost"}}}),
                "runAsUser=0 (pod must not set runAsUser=0)",
            ),
            (
                Restricted,
                json!({"securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "Unconfined"}}}),
                "seccompProfile (pod must not set securityContext.seccompProfile.type to \"Unconfined\")",
            ),
        ];
        for (level, spec, expected) in cases {
            let mut pod = if level == Baseline {
                json!({"metadata": {}, "spec": {"containers": [{"name": "c"}]}})
            } else {
                restricted()
            };
            for (field, value) in spec.as_object().unwrap() {
                pod["spec"][field] = value.clone();
            }
            assert_eq!(violations_of(level, Version::Latest, &pod), expected);
        }
    }

    #[test]
    fn deprecated_annotations_are_checked() {
        let pod = json!({"metadata": {"annotations": {
            "container.apparmor.security.beta.kubernetes.io/c": "unconfined",
            "seccomp.security.alpha.kubernetes.io/pod": "unconfined",
        }}, "spec": {"containers": [{"name": "c"}]}});
        let armor = "forbidden AppArmor profile (annotation must not set AppArmor profile type to \"container.apparmor.security.beta.kubernetes.io/c=\"unconfined\"\")";
        assert_eq!(violations_of(Level::Baseline, Version::Latest, &pod), armor);
        assert_eq!(
            violations_of(Level::Baseline, Version::Minor(18), &pod),
            format!(
                "{armor}, seccompProfile (forbidden annotation seccomp.security.alpha.kubernetes.io/pod=\"unconfined\")"
            )
        );
    }

    #[test]
    fn each_version_has_its_own_checks() {
        let context = |context: Value| json!({"metadata": {}, "spec": {"securityContext": context, "containers": [{"name": "c"}]}});
        let reasons_of = |level, version, pod: &Value| {
            let required = LevelVersion { level, version };
            reasons(&violations(required, &pod["metadata"], &pod["spec"]))
        };
        let sysctl = context(json!({"sysctls": [{"name": "net.ipv4.tcp_rmem", "value": "1"}]}));
        assert_eq!(
            reasons_of(Level::Baseline, Version::Minor(31), &sysctl),
            "forbidden sysctls"
        );
        assert_eq!(reasons_of(Level::Baseline, Version::Minor(32), &sysctl), "");
        assert_eq!(reasons_of(Level::Baseline, Version::Minor(99), &sysctl), "");
        let engine = context(json!({"seLinuxOptions": {"type": "container_engine_t"}}));
        assert_eq!(
            reasons_of(Level::Baseline, Version::Minor(30), &engine),
            "seLinuxOptions"
        );
        assert_eq!(reasons_of(Level::Baseline, Version::Minor(31), &engine), "");
        let plain = context(json!({}));
        assert_eq!(
            reasons_of(Level::Restricted, Version::Minor(7), &plain),
            "runAsNonRoot != true"
        );
        assert_eq!(
            reasons_of(Level::Restricted, Version::Minor(21), &plain),
            "allowPrivilegeEscalation != false, runAsNonRoot != true, seccompProfile"
        );
        let mut own_users = restricted();
        own_users["spec"]["hostUsers"] = json!(false);
        own_users["spec"]["securityContext"]["runAsNonRoot"] = json!(false);
        own_users["spec"]["securityContext"]["runAsUser"] = json!(0);
        assert_eq!(
            reasons_of(Level::Restricted, Version::Latest, &own_users),
            ""
        );
        assert_eq!(
            reasons_of(Level::Restricted, Version::Minor(34), &own_users),
            "runAsNonRoot != true, runAsUser=0"
        );
    }
}

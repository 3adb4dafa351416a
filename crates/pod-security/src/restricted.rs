//! The checks of the restricted level, which requires hardened pods.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{
    Violation, baseline, containers, has_user_namespace, named, names_of, plural, quoted, setters,
};

/// Whether the pod runs on Windows, to which these checks do not apply.
fn is_windows(spec: &Value) -> bool {
    spec["os"]["name"] == "windows"
}

pub fn allow_privilege_escalation(_: &Value, spec: &Value) -> Option<Violation> {
    let names = names_of(spec, |container| {
        container["securityContext"]["allowPrivilegeEscalation"] != false
    });
    (!names.is_empty()).then(|| Violation {
        reason: "allowPrivilegeEscalation != false",
        detail: format!(
            "{} must set securityContext.allowPrivilegeEscalation=false",
            named(&names)
        ),
    })
}

pub fn allow_privilege_escalation_1_25(metadata: &Value, spec: &Value) -> Option<Violation> {
    if is_windows(spec) {
        return None;
    }
    allow_privilege_escalation(metadata, spec)
}

pub fn capabilities(_: &Value, spec: &Value) -> Option<Violation> {
    let drops_all = |container: &Value| {
        let dropped = container.pointer("/securityContext/capabilities/drop");
        let mut dropped = dropped.and_then(Value::as_array).into_iter().flatten();
        dropped.any(|name| name == "ALL")
    };
    let without_drop = names_of(spec, |container| !drops_all(container));
    let mut details = Vec::new();
    if !without_drop.is_empty() {
        details.push(format!(
            "{} must set securityContext.capabilities.drop=[\"ALL\"]",
            named(&without_drop)
        ));
    }
    let added = baseline::added_capabilities(spec, |name| name == "NET_BIND_SERVICE");
    if let Some((names, added)) = added {
        details.push(format!(
            "{names} must not include {added} in securityContext.capabilities.add"
        ));
    }
    (!details.is_empty()).then(|| Violation {
        reason: "unrestricted capabilities",
        detail: details.join("; "),
    })
}

pub fn capabilities_1_25(metadata: &Value, spec: &Value) -> Option<Violation> {
    if is_windows(spec) {
        return None;
    }
    capabilities(metadata, spec)
}

pub fn volumes(_: &Value, spec: &Value) -> Option<Violation> {
    const ALLOWED: [&str; 9] = [
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    ];
    let source = |volume: &Value| -> Option<String> {
        let sources: Vec<&String> = volume
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(_, source)| source.is_object())
            .map(|(name, _)| name)
            .collect();
        if sources.iter().any(|name| ALLOWED.contains(&name.as_str())) {
            return None;
        }
        let first = sources.first().map(ToString::to_string);
        Some(first.unwrap_or_else(|| "unknown".to_owned()))
    };
    let all = spec["volumes"].as_array().map_or(&[][..], Vec::as_slice);
    let bad: Vec<(&str, String)> = all
        .iter()
        .filter_map(|volume| Some((volume["name"].as_str().unwrap_or_default(), source(volume)?)))
        .collect();
    let kinds: BTreeSet<&str> = bad.iter().map(|(_, kind)| kind.as_str()).collect();
    (!bad.is_empty()).then(|| Violation {
        reason: "restricted volume types",
        detail: format!(
            "{} {} {} {} {}",
            plural(bad.len(), "volume", "volumes"),
            quoted(bad.iter().map(|(name, _)| name)),
            plural(bad.len(), "uses", "use"),
            plural(
                kinds.len(),
                "restricted volume type",
                "restricted volume types"
            ),
            quoted(kinds)
        ),
    })
}

pub fn run_as_non_root(_: &Value, spec: &Value) -> Option<Violation> {
    let value = |holder: &Value| holder["securityContext"]["runAsNonRoot"].as_bool();
    let explicit = names_of(spec, |container| value(container) == Some(false));
    let reason = "runAsNonRoot != true";
    if let Some(setters) = setters(value(spec) == Some(false), &explicit) {
        return Some(Violation {
            reason,
            detail: format!("{setters} must not set securityContext.runAsNonRoot=false"),
        });
    }
    let unset = names_of(spec, |container| value(container).is_none());
    (value(spec) != Some(true) && !unset.is_empty()).then(|| Violation {
        reason,
        detail: format!(
            "pod or {} must set securityContext.runAsNonRoot=true",
            named(&unset)
        ),
    })
}

pub fn run_as_non_root_1_35(metadata: &Value, spec: &Value) -> Option<Violation> {
    if has_user_namespace(spec) {
        return None;
    }
    run_as_non_root(metadata, spec)
}

pub fn run_as_user(_: &Value, spec: &Value) -> Option<Violation> {
    let is_root = |holder: &Value| holder["securityContext"]["runAsUser"] == 0;
    let setters = setters(is_root(spec), &names_of(spec, is_root))?;
    Some(Violation {
        reason: "runAsUser=0",
        detail: format!("{setters} must not set runAsUser=0"),
    })
}

pub fn run_as_user_1_35(metadata: &Value, spec: &Value) -> Option<Violation> {
    if has_user_namespace(spec) {
        return None;
    }
    run_as_user(metadata, spec)
}

pub fn seccomp_profile(metadata: &Value, spec: &Value) -> Option<Violation> {
    if let Some(explicit) = baseline::seccomp_profile(metadata, spec) {
        return Some(explicit);
    }
    let is_set = |holder: &Value| holder["securityContext"]["seccompProfile"].is_object();
    if is_set(spec) || containers(spec).next().is_none() {
        return None;
    }
    let unset = names_of(spec, |container| !is_set(container));
    (!unset.is_empty()).then(|| Violation {
        reason: "seccompProfile",
        detail: format!(
            "pod or {} must set securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\"",
            named(&unset)
        ),
    })
}

pub fn seccomp_profile_1_25(metadata: &Value, spec: &Value) -> Option<Violation> {
    if is_windows(spec) {
        return None;
    }
    seccomp_profile(metadata, spec)
}

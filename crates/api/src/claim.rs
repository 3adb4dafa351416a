//! `SandboxClaim`: a request for one sandbox.
//!
//! Two generations of clients name the source of the sandbox differently: by template (`sandboxTemplateRef`, restricted by
//! `warmpool`) or by pool (`warmPoolRef`). Only [`SandboxClaimSpec::source`] reads these three fields.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::lenient::lenient;
use crate::sandbox::{PersistentVolumeClaimTemplate, PodMetadata, SuspensionStrategy};
use crate::template::SandboxTemplateRef;

/// The desired state of a SandboxClaim.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[cfg_attr(not(feature = "schema"), kube(schema = "disabled"))]
#[kube(
    group = "extensions.agents.x-k8s.io",
    version = "v1beta1",
    kind = "SandboxClaim",
    plural = "sandboxclaims",
    singular = "sandboxclaim",
    shortname = "sandboxclaim",
    namespaced,
    status = "SandboxClaimStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "A request for one sandbox, fulfilled from a warm pool or by a cold start.",
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Ready")].status"#
    ),
    printcolumn(name = "Sandbox", type_ = "string", json_path = ".status.sandbox.name"),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Ready")].reason"#
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[cfg_attr(
    feature = "schema",
    schemars(extend("x-kubernetes-validations" = [
        {
            "rule": "has(self.sandboxTemplateRef) != has(self.warmPoolRef)",
            "message": "exactly one of sandboxTemplateRef and warmPoolRef must be set",
        },
        {
            "rule": "!has(self.warmPoolRef) || !has(self.warmpool)",
            "message": "warmpool goes with sandboxTemplateRef; warmPoolRef already names the pool",
            "fieldPath": ".warmpool",
        },
    ]))
)]
#[serde(rename_all = "camelCase")]
pub struct SandboxClaimSpec {
    /// The template of the sandbox. Exactly one of this and `warmPoolRef` is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_template_ref: Option<SandboxTemplateRef>,

    /// The pool to take a sandbox from; an empty pool means a cold start from its template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm_pool_ref: Option<WarmPoolRef>,

    /// With `sandboxTemplateRef`: `none` never takes from a pool, `default` from any pool of the template, any other value
    /// from the pool of that name. Unset means `default`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmpool: Option<String>,

    /// Labels and annotations to add to the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub additional_pod_metadata: Option<PodMetadata>,

    /// Environment variables to inject, if the template allows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("x-kubernetes-list-type" = "atomic")))]
    pub env: Option<Vec<EnvVar>>,

    /// Additional volumes of this claim, if the template allows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("x-kubernetes-list-type" = "atomic")))]
    pub volume_claim_templates: Option<Vec<PersistentVolumeClaimTemplate>>,

    /// How the sandbox is suspended, if the template allows it. It counts when the claim gets its sandbox; afterwards the Sandbox's own
    /// field decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspension_strategy: Option<SuspensionStrategy>,

    /// When the claim expires, and what happens then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<Lifecycle>,
}

/// The observed state of a SandboxClaim.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct SandboxClaimStatus {
    /// Ready, Finished, and Suspended while the sandbox is to be suspended without losing its pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "schema",
        schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))
    )]
    pub conditions: Vec<Condition>,

    /// The sandbox of the claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<ClaimedSandbox>,
}

/// The sandbox that meets a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct ClaimedSandbox {
    /// The name of the Sandbox, in the claim's namespace.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,

    /// The pod's addresses.
    #[serde(default, rename = "podIPs", skip_serializing_if = "Vec::is_empty")]
    pub pod_ips: Vec<String>,
}

/// A warm pool in the same namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct WarmPoolRef {
    /// The name of the SandboxWarmPool.
    #[cfg_attr(feature = "schema", schemars(length(min = 1)))]
    pub name: String,
}

/// An environment variable for one container of the sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct EnvVar {
    /// The variable's name.
    pub name: String,

    /// The variable's value.
    pub value: String,

    /// The container or init container that gets it; the default is the first container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_name: Option<String>,
}

/// When a claim ends, and how.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Lifecycle {
    /// When the claim expires, as an absolute time.
    #[serde(
        default,
        deserialize_with = "crate::decoding::time",
        skip_serializing_if = "Option::is_none"
    )]
    pub shutdown_time: Option<Time>,

    /// How long the claim lasts after its sandbox has finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(range(min = 0)))]
    pub ttl_seconds_after_finished: Option<i32>,

    /// Delete and DeleteForeground delete the claim when it expires, Retain only its sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("default" = "Retain")))]
    pub shutdown_policy: Option<ClaimShutdownPolicy>,
}

/// What happens to a claim when it expires.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub enum ClaimShutdownPolicy {
    /// The claim is deleted, and its sandbox with it.
    Delete,
    /// The same, but the claim stays visible until its sandbox is gone.
    DeleteForeground,
    /// Only the sandbox is deleted.
    #[default]
    Retain,
}

lenient!(ClaimShutdownPolicy: Delete, DeleteForeground, Retain; else Retain);

/// The source from which a claim gets its sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimSource<'a> {
    /// `sandboxTemplateRef` with `warmpool`.
    Template {
        template: &'a str,
        warm_pool: WarmPoolPolicy<'a>,
    },
    /// `warmPoolRef`: only this pool, or a cold start from its template.
    Pool { pool: &'a str },
}

/// The pools from which a claim by template may take a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WarmPoolPolicy<'a> {
    /// `none`: always a cold start.
    None,
    /// `default`: any pool of the template.
    Any,
    /// The name of a pool: only that pool.
    Only(&'a str),
}

/// A claim that does not name exactly one source. The schema refuses it, but an object may be older than the schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    #[error("spec: exactly one of sandboxTemplateRef and warmPoolRef must be set, and neither is")]
    Neither,
    #[error("spec: exactly one of sandboxTemplateRef and warmPoolRef must be set, and both are")]
    Both,
}

impl SandboxClaimSpec {
    /// The source from which this claim gets its sandbox.
    pub fn source(&self) -> Result<ClaimSource<'_>, SourceError> {
        match (&self.sandbox_template_ref, &self.warm_pool_ref) {
            (Some(template), None) => Ok(ClaimSource::Template {
                template: &template.name,
                warm_pool: match self.warmpool.as_deref() {
                    None | Some("" | "default") => WarmPoolPolicy::Any,
                    Some("none") => WarmPoolPolicy::None,
                    Some(pool) => WarmPoolPolicy::Only(pool),
                },
            }),
            (None, Some(pool)) => Ok(ClaimSource::Pool { pool: &pool.name }),
            (None, None) => Err(SourceError::Neither),
            (Some(_), Some(_)) => Err(SourceError::Both),
        }
    }

    pub fn shutdown_policy(&self) -> ClaimShutdownPolicy {
        self.lifecycle
            .as_ref()
            .and_then(|lifecycle| lifecycle.shutdown_policy)
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by_template(warmpool: Option<&str>) -> SandboxClaimSpec {
        SandboxClaimSpec {
            sandbox_template_ref: Some(SandboxTemplateRef { name: "t".into() }),
            warmpool: warmpool.map(Into::into),
            ..SandboxClaimSpec::default()
        }
    }

    #[test]
    fn the_warmpool_field_has_two_reserved_words() {
        let table = [
            (None, WarmPoolPolicy::Any),
            (Some("default"), WarmPoolPolicy::Any),
            (Some("none"), WarmPoolPolicy::None),
            (Some("fast"), WarmPoolPolicy::Only("fast")),
        ];
        for (field, expected) in table {
            let spec = by_template(field);
            let source = ClaimSource::Template {
                template: "t",
                warm_pool: expected,
            };
            assert_eq!(spec.source(), Ok(source), "{field:?}");
        }
    }

    #[test]
    fn a_claim_names_exactly_one_source() {
        let mut spec = SandboxClaimSpec::default();
        assert_eq!(spec.source(), Err(SourceError::Neither));
        spec.warm_pool_ref = Some(WarmPoolRef { name: "p".into() });
        assert_eq!(spec.source(), Ok(ClaimSource::Pool { pool: "p" }));
        spec.sandbox_template_ref = Some(SandboxTemplateRef { name: "t".into() });
        assert_eq!(spec.source(), Err(SourceError::Both));
    }
}

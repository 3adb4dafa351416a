//! Interprets an object's status for a client that waits for it. Pure.

use api::conditions::{self, ConditionType, Reason};
use api::start_problem::StartProblem;
use api::{Sandbox, SandboxClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

/// The verdict on an object's current state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict<T> {
    /// The object reached the state.
    Done(T),
    /// The object may still reach the state.
    Wait,
    /// The object will not reach the state, for this reason.
    Refused { reason: String, message: String },
}

/// The sandbox behind a claim, as reported in the claim's status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bound {
    pub sandbox: String,
    pub pod_ips: Vec<String>,
}

/// The sandbox that a claim is bound to, ready or not.
pub(crate) fn bound(claim: &SandboxClaim) -> Option<Bound> {
    let sandbox = claim.status.as_ref()?.sandbox.as_ref()?;
    (!sandbox.name.is_empty()).then(|| Bound {
        sandbox: sandbox.name.clone(),
        pod_ips: sandbox.pod_ips.clone(),
    })
}

/// Whether a claim can be used.
pub(crate) fn of_claim(claim: &SandboxClaim) -> Verdict<Bound> {
    match ready(conditions_of_claim(claim), claim.metadata.generation) {
        Verdict::Done(()) => bound(claim).map_or(Verdict::Wait, Verdict::Done),
        Verdict::Wait => Verdict::Wait,
        Verdict::Refused { reason, message } => Verdict::Refused { reason, message },
    }
}

/// Whether a sandbox that was resumed runs again.
pub(crate) fn of_resumed(sandbox: &Sandbox) -> Verdict<Bound> {
    if sandbox.spec.suspension().is_requested() {
        return Verdict::Wait;
    }
    let conditions = conditions_of(sandbox);
    match ready(conditions, sandbox.metadata.generation) {
        Verdict::Done(()) => Verdict::Done(Bound {
            sandbox: sandbox.metadata.name.clone().unwrap_or_default(),
            pod_ips: pod_ips(sandbox),
        }),
        Verdict::Wait => Verdict::Wait,
        Verdict::Refused { reason, message } => Verdict::Refused { reason, message },
    }
}

/// Whether the suspension of a sandbox is complete.
pub(crate) fn of_suspended(sandbox: &Sandbox) -> Verdict<()> {
    let conditions = conditions_of(sandbox);
    let suspended = conditions::find(conditions, ConditionType::Suspended)
        .filter(|condition| is_current(condition, sandbox.metadata.generation))
        .filter(|_| sandbox.spec.suspension().is_requested());
    if let Some(suspended) = suspended {
        if suspended.status == "True" {
            return Verdict::Done(());
        }
        if Reason::from_wire(&suspended.reason).is_some_and(Reason::prevents_suspension) {
            return Verdict::Refused {
                reason: suspended.reason.clone(),
                message: suspended.message.clone(),
            };
        }
    }
    match conditions::find(conditions, ConditionType::Ready).map(|condition| &condition.reason) {
        Some(reason) if reason == Reason::SandboxExpired.as_str() => Verdict::Refused {
            reason: reason.clone(),
            message: "the sandbox has expired".into(),
        },
        _ => Verdict::Wait,
    }
}

/// Whether a sandbox is suspended with its processes frozen.
pub(crate) fn is_frozen(sandbox: &Sandbox) -> bool {
    conditions::find(conditions_of(sandbox), ConditionType::Suspended).is_some_and(|suspended| {
        suspended.status == "True" && suspended.reason == Reason::Frozen.as_str()
    })
}

pub(crate) fn conditions_of_claim(claim: &SandboxClaim) -> &[Condition] {
    claim
        .status
        .as_ref()
        .map_or(&[][..], |status| &status.conditions)
}

pub(crate) fn conditions_of(sandbox: &Sandbox) -> &[Condition] {
    sandbox
        .status
        .as_ref()
        .map_or(&[][..], |status| &status.conditions)
}

pub(crate) fn pod_ips(sandbox: &Sandbox) -> Vec<String> {
    sandbox
        .status
        .as_ref()
        .map(|status| status.pod_ips.clone())
        .unwrap_or_default()
}

fn ready(conditions: &[Condition], generation: Option<i64>) -> Verdict<()> {
    let Some(ready) = conditions::find(conditions, ConditionType::Ready) else {
        return Verdict::Wait;
    };
    // A condition of an older generation describes an outdated spec.
    if !is_current(ready, generation) {
        return Verdict::Wait;
    }
    if ready.status == "True" {
        return Verdict::Done(());
    }
    // A pod that cannot start has its own reason, in the message.
    if ready.status == "False"
        && ready.reason == Reason::DependenciesNotReady.as_str()
        && let Some(problem) = StartProblem::parse(&ready.message)
        && problem.lasting().is_some()
    {
        return Verdict::Refused {
            reason: problem.reason.clone(),
            message: problem.to_string(),
        };
    }
    if ready.status == "False" && ends_waiting(&ready.reason) {
        return Verdict::Refused {
            reason: ready.reason.clone(),
            message: ready.message.clone(),
        };
    }
    Verdict::Wait
}

fn is_current(condition: &Condition, generation: Option<i64>) -> bool {
    match (condition.observed_generation, generation) {
        (Some(observed), Some(generation)) => observed >= generation,
        _ => true,
    }
}

/// Whether clients stop waiting for this reason: it is final, or names an object that does not exist and is not known to be
/// about to be created.
fn ends_waiting(reason: &str) -> bool {
    Reason::from_wire(reason).is_some_and(|reason| {
        reason.is_final() || matches!(reason, Reason::TemplateNotFound | Reason::WarmPoolNotFound)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn claim(status: &serde_json::Value) -> SandboxClaim {
        serde_json::from_value(json!({
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
            "kind": "SandboxClaim",
            "metadata": {"name": "c", "generation": 2},
            "spec": {},
            "status": status,
        }))
        .unwrap()
    }

    fn condition(kind: &str, status: &str, reason: &str, observed: i64) -> serde_json::Value {
        json!({
            "type": kind, "status": status, "reason": reason, "message": "m",
            "observedGeneration": observed, "lastTransitionTime": "2026-01-01T00:00:00Z",
        })
    }

    fn ready(status: &str, reason: &str, observed: i64) -> serde_json::Value {
        json!([condition("Ready", status, reason, observed)])
    }

    #[test]
    fn a_claim_is_usable_once_it_is_ready_and_bound() {
        let sandbox = json!({"name": "warm-1", "podIPs": ["10.0.0.7"]});
        let met = claim(
            &json!({"conditions": ready("True", "DependenciesReady", 2), "sandbox": sandbox}),
        );
        let expected = Bound {
            sandbox: "warm-1".into(),
            pod_ips: vec!["10.0.0.7".into()],
        };
        assert_eq!(of_claim(&met), Verdict::Done(expected));
        for status in [
            json!({}),
            json!({"conditions": ready("True", "DependenciesReady", 2)}),
            json!({"conditions": ready("True", "DependenciesReady", 1), "sandbox": sandbox}),
            json!({"conditions": ready("False", "SandboxNotReady", 2), "sandbox": sandbox}),
            json!({"conditions": ready("False", "ReconcilerError", 2)}),
            json!({"conditions": ready("False", "PodFailed", 1)}),
            json!({"conditions": ready("False", "SomethingNew", 2)}),
        ] {
            assert_eq!(of_claim(&claim(&status)), Verdict::Wait, "{status}");
        }
    }

    #[test]
    fn final_reasons_end_the_wait() {
        for reason in [
            "InvalidMetadata",
            "EnvVarsInjectionRejected",
            "VolumeClaimTemplatesError",
            "ClaimExpired",
            "SandboxExpired",
            "InvalidConfiguration",
            "PodFailed",
            "PodSucceeded",
            "TemplateNotFound",
            "WarmPoolNotFound",
        ] {
            let refused = claim(&json!({"conditions": ready("False", reason, 2)}));
            let expected = Verdict::Refused {
                reason: reason.into(),
                message: "m".into(),
            };
            assert_eq!(of_claim(&refused), expected);
        }
    }

    #[test]
    fn a_pod_that_cannot_start_ends_the_wait() {
        let verdict = |problem: &str| {
            let message = format!("Pod exists with phase: Pending; container \"main\": {problem}");
            let mut condition = condition("Ready", "False", "DependenciesNotReady", 2);
            condition["message"] = message.into();
            of_claim(&claim(&json!({"conditions": [condition]})))
        };
        let refused = |reason: &str, message: &str| Verdict::Refused {
            reason: reason.into(),
            message: message.into(),
        };
        assert_eq!(
            verdict("InvalidImageName: invalid image name \"X\""),
            refused(
                "InvalidImageName",
                "container \"main\": InvalidImageName: invalid image name \"X\""
            )
        );
        assert_eq!(
            verdict("ImagePullBackOff: x:1 is not found at r.example"),
            refused(
                "ImagePullBackOff",
                "container \"main\": ImagePullBackOff: x:1 is not found at r.example"
            )
        );
        for problem in [
            "ErrImagePull: x:1 is not found at r.example",
            "ImagePullBackOff: r.example does not answer",
            "CrashLoopBackOff: the last run ended with code 1",
        ] {
            assert_eq!(verdict(problem), Verdict::Wait, "{problem}");
        }
    }

    fn sandbox(replicas: i32, mode: &str, conditions: &serde_json::Value) -> Sandbox {
        serde_json::from_value(json!({
            "apiVersion": "agents.x-k8s.io/v1beta1",
            "kind": "Sandbox",
            "metadata": {"name": "s", "generation": 3},
            "spec": {"podTemplate": {"spec": {"containers": []}}, "replicas": replicas, "operatingMode": mode},
            "status": {"conditions": conditions, "podIPs": ["10.0.0.9"]},
        }))
        .unwrap()
    }

    #[test]
    fn suspension_is_over_when_the_pod_is_gone() {
        let done = sandbox(
            0,
            "Suspended",
            &json!([condition("Suspended", "True", "PodTerminated", 3)]),
        );
        assert_eq!(of_suspended(&done), Verdict::Done(()));
        let going = sandbox(
            0,
            "Suspended",
            &json!([condition("Suspended", "False", "PodNotTerminated", 3)]),
        );
        assert_eq!(of_suspended(&going), Verdict::Wait);
        let stale = sandbox(
            0,
            "Suspended",
            &json!([condition("Suspended", "True", "PodTerminated", 2)]),
        );
        assert_eq!(of_suspended(&stale), Verdict::Wait);
        let frozen = sandbox(
            0,
            "Suspended",
            &json!([condition("Suspended", "True", "Frozen", 3)]),
        );
        assert_eq!(of_suspended(&frozen), Verdict::Done(()));
        for (reason, generation, is_refused) in [
            ("FreezeNotSupported", 3, true),
            ("HibernateNotSupported", 3, true),
            ("FreezeNotSupported", 2, false),
            ("FreezeFailed", 3, false),
            ("Freezing", 3, false),
        ] {
            let conditions = json!([condition("Suspended", "False", reason, generation)]);
            let verdict = of_suspended(&sandbox(0, "Suspended", &conditions));
            let refused = matches!(verdict, Verdict::Refused { .. });
            assert_eq!(refused, is_refused, "{reason} {verdict:?}");
        }
        let expired = sandbox(0, "Suspended", &ready("False", "SandboxExpired", 3));
        assert!(matches!(of_suspended(&expired), Verdict::Refused { .. }));
    }

    #[test]
    fn a_resumed_sandbox_must_become_ready_again() {
        let conditions = ready("True", "DependenciesReady", 3);
        assert!(
            matches!(of_resumed(&sandbox(1, "Running", &conditions)), Verdict::Done(bound) if bound.pod_ips == ["10.0.0.9"])
        );
        let stale = ready("True", "DependenciesReady", 2);
        assert_eq!(of_resumed(&sandbox(1, "Running", &stale)), Verdict::Wait);
        // Another client suspended it again.
        assert_eq!(
            of_resumed(&sandbox(0, "Running", &conditions)),
            Verdict::Wait
        );
    }
}

//! Describes, as text for users, what a sandbox that is not ready waits for. Pure.

use api::conditions::{self, ConditionType, Reason};
use api::start_problem::StartProblem;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

/// What a sandbox waits for.
///
/// The texts may contain output of a registry or a kubelet: escape them before printing to a terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiting {
    /// Reason and message of the Ready condition.
    pub state: String,
    /// The problem that keeps the sandbox from becoming ready, such as `container "main": ErrImagePull: …`. `None` during a normal start.
    pub problem: Option<String>,
}

/// Reads it from the Ready condition of an object that is not ready.
pub(crate) fn of(conditions: &[Condition]) -> Option<Waiting> {
    let ready = conditions::find(conditions, ConditionType::Ready)?;
    let state = format!("{}: {}", ready.reason, ready.message);
    let problem = match StartProblem::parse(&ready.message) {
        Some(problem) => Some(problem.to_string()),
        None if is_on_its_way(&ready.reason) => None,
        None => Some(state.clone()),
    };
    (ready.status != "True").then_some(Waiting { state, problem })
}

/// Whether a reason occurs in every normal start.
fn is_on_its_way(reason: &str) -> bool {
    matches!(
        Reason::from_wire(reason),
        Some(
            Reason::DependenciesNotReady
                | Reason::SandboxNotReady
                | Reason::SandboxMissing
                | Reason::SandboxCreatePending
                | Reason::SandboxSuspended
        )
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(status: &str, reason: &str, message: &str) -> Vec<Condition> {
        let condition = serde_json::json!({
            "type": "Ready", "status": status, "reason": reason, "message": message,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        });
        vec![serde_json::from_value(condition).unwrap()]
    }

    #[test]
    fn a_problem_is_reported_and_a_normal_start_is_not() {
        let problem = |conditions: &[Condition]| of(conditions).and_then(|waiting| waiting.problem);
        let failing =
            "Pod exists with phase: Pending; container \"main\": ErrImagePull: no such host";
        assert_eq!(
            problem(&ready("False", "DependenciesNotReady", failing)).as_deref(),
            Some("container \"main\": ErrImagePull: no such host")
        );
        assert_eq!(
            problem(&ready("False", "ReconcilerError", "Error seen: quota")).as_deref(),
            Some("ReconcilerError: Error seen: quota")
        );
        let pending = ready(
            "False",
            "DependenciesNotReady",
            "Pod exists with phase: Pending",
        );
        assert_eq!(problem(&pending), None);
        assert_eq!(
            of(&pending).unwrap().state,
            "DependenciesNotReady: Pod exists with phase: Pending"
        );
        assert_eq!(
            of(&ready("True", "DependenciesReady", "Pod is Ready")),
            None
        );
        assert_eq!(of(&[]), None);
    }
}

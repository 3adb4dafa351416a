//! Why the sandbox's pod does not start, for the message of Ready.
//!
//! A kubelet changes the text of the same failure with every attempt: the reason alternates between the failure and its back-off, and the
//! message contains the delay. Each change would be a write of the sandbox's status and of its claim's. So the text here contains no
//! counts or times of attempts, and a repeated failure keeps its text.

use api::start_problem::{StartProblem, Subject};

use super::observed_pod::{ContainerStatus, ObservedPod};

const PULL_FAILED: &str = "ErrImagePull";
const PULL_BACK_OFF: &str = "ImagePullBackOff";

/// What keeps the pod from starting, if anything. `published` is the present message of Ready.
pub(super) fn start_failure(pod: &ObservedPod, published: Option<&str>) -> Option<StartProblem> {
    let problem = unscheduled(pod).or_else(|| stalled_container(pod))?;
    let before = published.and_then(StartProblem::parse);
    Some(match before {
        Some(before) => steady(problem, before),
        None => problem,
    })
}

/// The scheduler's message about a pod that fits no node.
fn unscheduled(pod: &ObservedPod) -> Option<StartProblem> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let condition = conditions
        .iter()
        .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False")?;
    let reason = condition.reason.as_deref().unwrap_or("Unschedulable");
    let message = condition.message.as_deref().unwrap_or_default();
    Some(StartProblem::new(Subject::Pod, reason, message))
}

fn stalled_container(pod: &ObservedPod) -> Option<StartProblem> {
    let status = pod.status.as_ref()?;
    let containers = status.init_container_statuses.iter();
    let mut containers = containers.chain(&status.container_statuses);
    containers.find_map(container_problem)
}

fn container_problem(container: &ContainerStatus) -> Option<StartProblem> {
    let waiting = container.waiting()?;
    let message = waiting.message.as_deref().unwrap_or_default();
    let (reason, detail) = match waiting.reason.as_deref()? {
        "CrashLoopBackOff" => ("CrashLoopBackOff", last_end(container)),
        PULL_BACK_OFF => (PULL_BACK_OFF, pull_failure(message).to_owned()),
        // A container that is being created has a message only while its volumes cannot be mounted.
        "ContainerCreating" => ("FailedMount", message.to_owned()),
        reason => (reason, message.to_owned()),
    };
    let subject = Subject::Container(container.name.clone());
    Some(StartProblem::new(subject, reason, &detail))
}

/// How the last run ended. The kubelet's message names the delay until the next one instead.
fn last_end(container: &ContainerStatus) -> String {
    let Some(end) = container.last_end() else {
        return String::new();
    };
    let reason = end.reason.as_deref().filter(|reason| *reason != "Error");
    match reason {
        Some(reason) => format!("the last run ended with code {} ({reason})", end.exit_code),
        None => format!("the last run ended with code {}", end.exit_code),
    }
}

/// Why an image could not be pulled, out of `Back-off pulling image "…": ErrImagePull: why`. Empty if the kubelet gives no reason.
fn pull_failure(message: &str) -> &str {
    let Some(rest) = message.strip_prefix("Back-off pulling image \"") else {
        return message;
    };
    let why = rest.split_once("\": ").map_or("", |(_, why)| why);
    why.strip_prefix("ErrImagePull: ").unwrap_or(why)
}

/// The problem with the published text, if it is the same failure again.
fn steady(problem: StartProblem, before: StartProblem) -> StartProblem {
    let is_pull =
        |problem: &StartProblem| matches!(problem.reason.as_str(), PULL_FAILED | PULL_BACK_OFF);
    if problem.subject != before.subject || !is_pull(&problem) || !is_pull(&before) {
        return problem;
    }
    // Older kubelets do not repeat, while they back off, why the pull failed.
    if problem.reason == PULL_BACK_OFF && problem.detail.is_empty() {
        return StartProblem {
            detail: before.detail,
            ..problem
        };
    }
    // After a back-off, another attempt that fails in the same way is not reported again.
    let is_same_again = before.reason == PULL_BACK_OFF && before.detail == problem.detail;
    if is_same_again { before } else { problem }
}

//! Condition types and reasons, and the only function that merges a condition into a status.
//!
//! Nothing else writes `lastTransitionTime` or `observedGeneration`, so both have the same meaning on every kind.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// Declares an enum whose variants have the same names in the API as in Rust.
macro_rules! wire_names {
    ($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_meta])* $variant,)+
        }

        impl $name {
            /// The name in the API.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => stringify!($variant),)+
                }
            }

            /// The variant with this name in the API, if there is one.
            pub fn from_wire(name: &str) -> Option<Self> {
                match name {
                    $(stringify!($variant) => Some(Self::$variant),)+
                    _ => None,
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str(self.as_str())
            }
        }
    };
}

wire_names! {
    /// The condition types of our kinds.
    ConditionType {
        /// On sandboxes and claims: whether the sandbox can be used.
        Ready,
        /// On sandboxes: whether a suspension is requested, and the pod is deleted or frozen. Always present on objects that set `operatingMode`; on
        /// others only while a suspension is requested. See [`crate::sandbox::ConditionForm`].
        Suspended,
        /// On sandboxes that set `operatingMode`: the pod's condition of this type.
        PodScheduled,
        /// On sandboxes and claims: the pod has terminated.
        Finished,
        /// On warm pools: whether all sandboxes have the current revision.
        Updated,
        /// On batch claims: claiming has ended.
        Completed,
    }
}

wire_names! {
    /// The reasons of our conditions.
    Reason {
        DependenciesReady,
        DependenciesNotReady,
        SandboxSuspended,
        SandboxExpired,
        ReconcilerError,
        /// The spec can never work: the API server or our own validation refuses it.
        InvalidConfiguration,
        PodTerminated,
        /// Suspended is False while the pod stops, on sandboxes that do not set `operatingMode`.
        PodNotTerminated,
        /// Suspended is False while the pod stops, on sandboxes that set `operatingMode`.
        PodTerminating,
        /// Suspended is False because the pod of the sandbox's name belongs to another object, and is left alone.
        PodNotOwned,
        /// Suspended is True: the pod exists, and all of its processes are stopped where they are.
        Frozen,
        /// Suspended is False while the pod starts, or its processes are being frozen.
        Freezing,
        /// Suspended is False because the pod's node cannot freeze pods. The pod runs on.
        FreezeNotSupported,
        /// Suspended is False because the node could not freeze the pod, and tries again.
        FreezeFailed,
        /// Suspended is False because no node can write a pod's memory to disk. The pod runs on.
        HibernateNotSupported,
        /// Suspended is False because nothing asks for suspension.
        NotSuspended,
        /// PodScheduled is True, and the scheduler gave no reason.
        PodScheduled,
        /// PodScheduled is not known, or not True without a reason.
        PodSchedulingUnknown,
        PodSucceeded,
        PodFailed,
        ClaimExpired,
        TemplateNotFound,
        WarmPoolNotFound,
        AdoptionConflict,
        SandboxCreatePending,
        InvalidMetadata,
        EnvVarsInjectionRejected,
        VolumeClaimTemplatesError,
        SandboxMissing,
        SandboxNotReady,
        RolloutInProgress,
        RolloutComplete,
        /// On sandbox sets: fewer sandboxes can be claimed than desired.
        Replenishing,
        /// On sandbox sets: as many sandboxes can be claimed as desired.
        Replenished,
        /// On batch claims: sandboxes are being claimed.
        Claiming,
        /// On batch claims: the set has no sandbox left to claim.
        OutOfStock,
        AllReplicasClaimed,
        TimeoutReached,
        SandboxSetNotFound,
    }
}

impl Reason {
    /// Whether clients stop waiting for Ready when they see this reason. It must never be used for a failure that a retry may
    /// fix.
    pub fn is_final(self) -> bool {
        matches!(
            self,
            Self::InvalidMetadata
                | Self::EnvVarsInjectionRejected
                | Self::VolumeClaimTemplatesError
                | Self::ClaimExpired
                | Self::SandboxExpired
                | Self::InvalidConfiguration
                | Self::PodFailed
                | Self::PodSucceeded
        )
    }

    /// Whether a condition Suspended that is False for this reason stays so until the spec changes.
    pub fn prevents_suspension(self) -> bool {
        matches!(
            self,
            Self::FreezeNotSupported | Self::HibernateNotSupported | Self::InvalidConfiguration
        )
    }
}

/// The status of a condition that a controller finds out itself. Unknown occurs only in conditions that are copied ([`set`]): a
/// condition that is not known to be true is False.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConditionStatus {
    True,
    False,
}

impl ConditionStatus {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
        }
    }
}

impl From<bool> for ConditionStatus {
    fn from(holds: bool) -> Self {
        if holds { Self::True } else { Self::False }
    }
}

/// The most characters that a condition's message may hold, as `metav1.Condition` bounds it.
pub const MESSAGE_LIMIT: usize = 32_768;

/// Cuts a message to what a condition may hold, with an ellipsis where it was cut. A longer one would make the API server refuse the
/// whole status, and no client would learn what is wrong.
fn bounded(message: &str) -> String {
    if message.chars().nth(MESSAGE_LIMIT).is_none() {
        return message.to_owned();
    }
    let start = message.chars().take(MESSAGE_LIMIT - 1);
    start.chain(['…']).collect()
}

/// The new state of a condition, before it is merged into a status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub kind: ConditionType,
    pub status: ConditionStatus,
    pub reason: Reason,
    pub message: String,
}

impl Finding {
    pub fn new(
        kind: ConditionType,
        status: impl Into<ConditionStatus>,
        reason: Reason,
        message: impl Into<String>,
    ) -> Self {
        Self {
            kind,
            status: status.into(),
            reason,
            message: message.into(),
        }
    }
}

/// Merges a finding into `conditions`, with the given `generation` and time `now`.
///
/// The transition time changes only if the status changes. The order of the other conditions is preserved.
pub fn merge(
    conditions: &mut Vec<Condition>,
    finding: &Finding,
    generation: Option<i64>,
    now: &Time,
) {
    let condition = Condition {
        type_: finding.kind.as_str().to_owned(),
        status: finding.status.as_str().to_owned(),
        reason: finding.reason.as_str().to_owned(),
        message: bounded(&finding.message),
        observed_generation: generation,
        last_transition_time: now.clone(),
    };
    set(conditions, condition);
}

/// Merges a condition whose transition time is now, such as a copy of a pod's condition. A condition that had the same status before
/// keeps its transition time.
pub fn set(conditions: &mut Vec<Condition>, condition: Condition) {
    let existing = conditions
        .iter_mut()
        .find(|existing| existing.type_ == condition.type_);
    match existing {
        Some(existing) if existing.status == condition.status => {
            let last_transition_time = existing.last_transition_time.clone();
            *existing = Condition {
                last_transition_time,
                ..condition
            };
        }
        Some(existing) => *existing = condition,
        None => conditions.push(condition),
    }
}

/// Copies a condition from another object. Only the generation is replaced by that of the target object.
pub fn forward(conditions: &mut Vec<Condition>, condition: &Condition, generation: Option<i64>) {
    let forwarded = Condition {
        observed_generation: generation,
        ..condition.clone()
    };
    match conditions
        .iter_mut()
        .find(|existing| existing.type_ == forwarded.type_)
    {
        Some(existing) => *existing = forwarded,
        None => conditions.push(forwarded),
    }
}

/// Removes the condition of this type, if there is one.
pub fn remove(conditions: &mut Vec<Condition>, kind: ConditionType) {
    conditions.retain(|condition| condition.type_ != kind.as_str());
}

/// The condition of this type, if there is one.
pub fn find(conditions: &[Condition], kind: ConditionType) -> Option<&Condition> {
    conditions
        .iter()
        .find(|condition| condition.type_ == kind.as_str())
}

/// Whether the condition of this type is True.
pub fn is_true(conditions: &[Condition], kind: ConditionType) -> bool {
    find(conditions, kind)
        .is_some_and(|condition| condition.status == ConditionStatus::True.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Time {
        Time(k8s_openapi::jiff::Timestamp::from_second(second).unwrap())
    }

    fn ready(holds: bool, message: &str) -> Finding {
        let reason = if holds {
            Reason::DependenciesReady
        } else {
            Reason::DependenciesNotReady
        };
        Finding::new(ConditionType::Ready, holds, reason, message)
    }

    #[test]
    fn the_transition_time_moves_only_when_the_status_changes() {
        let mut conditions = Vec::new();
        merge(&mut conditions, &ready(false, "starting"), Some(1), &at(10));
        merge(
            &mut conditions,
            &ready(false, "still starting"),
            Some(2),
            &at(20),
        );
        assert_eq!(conditions.len(), 1);
        assert_eq!(conditions[0].message, "still starting");
        assert_eq!(conditions[0].observed_generation, Some(2));
        assert_eq!(conditions[0].last_transition_time, at(10));

        merge(&mut conditions, &ready(true, "up"), Some(2), &at(30));
        assert_eq!(conditions[0].status, "True");
        assert_eq!(conditions[0].last_transition_time, at(30));
    }

    #[test]
    fn a_forwarded_condition_keeps_all_but_its_generation() {
        let mut source = Vec::new();
        merge(&mut source, &ready(true, "up"), Some(7), &at(10));
        let mut conditions = Vec::new();
        merge(&mut conditions, &ready(false, "starting"), Some(1), &at(5));
        forward(&mut conditions, &source[0], Some(2));
        assert_eq!(conditions.len(), 1);
        assert_eq!(conditions[0].last_transition_time, at(10));
        assert_eq!(conditions[0].message, "up");
        assert_eq!(conditions[0].observed_generation, Some(2));
    }

    #[test]
    fn a_message_is_cut_to_what_a_condition_may_hold() {
        let mut conditions = Vec::new();
        for (message, kept) in [
            ("é".repeat(MESSAGE_LIMIT), "é".repeat(MESSAGE_LIMIT)),
            (
                "é".repeat(MESSAGE_LIMIT + 1),
                "é".repeat(MESSAGE_LIMIT - 1) + "…",
            ),
        ] {
            merge(&mut conditions, &ready(false, &message), Some(1), &at(10));
            assert_eq!(conditions[0].message, kept);
        }
    }

    #[test]
    fn other_conditions_are_left_as_they_are() {
        let mut conditions = Vec::new();
        merge(&mut conditions, &ready(true, "up"), Some(1), &at(1));
        let finished = Finding::new(
            ConditionType::Finished,
            true,
            Reason::PodFailed,
            "Pod failed",
        );
        merge(&mut conditions, &finished, Some(1), &at(2));
        merge(&mut conditions, &ready(false, "down"), Some(1), &at(3));
        assert_eq!(
            find(&conditions, ConditionType::Finished)
                .unwrap()
                .last_transition_time,
            at(2)
        );
        assert!(is_true(&conditions, ConditionType::Finished));
        assert!(!is_true(&conditions, ConditionType::Ready));

        remove(&mut conditions, ConditionType::Finished);
        assert_eq!(conditions.len(), 1);
        assert!(find(&conditions, ConditionType::Finished).is_none());
    }

    #[test]
    fn api_names_round_trip() {
        assert_eq!(
            Reason::from_wire("EnvVarsInjectionRejected"),
            Some(Reason::EnvVarsInjectionRejected)
        );
        assert_eq!(Reason::from_wire("NoSuchReason"), None);
        assert_eq!(ConditionType::Suspended.to_string(), "Suspended");
    }
}

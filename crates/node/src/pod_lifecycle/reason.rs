//! The reasons in a pod's status and events, spelled as a kubelet spells them where a kubelet has them.

use std::fmt;

/// An enum whose variants are spelled in the API as they are here.
macro_rules! reasons {
    ($(#[$about:meta])* $name:ident { $($(#[$meta:meta])* $reason:ident,)+ }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$meta])* $reason,)+
        }

        impl $name {
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$reason => stringify!($reason),)+
                }
            }

            /// The reason of this spelling, if it is one of these.
            pub fn parse(text: &str) -> Option<Self> {
                match text {
                    $(stringify!($reason) => Some(Self::$reason),)+
                    _ => None,
                }
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                self.as_str()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(self.as_str())
            }
        }
    };
}

reasons! {
    /// Why a container waits: `state.waiting.reason` of its status.
    WaitingReason {
        ContainerCreating,
        PodInitializing,
        CrashLoopBackOff,
        ErrImagePull,
        ImagePullBackOff,
        ErrImageNeverPull,
        InvalidImageName,
        CreateContainerConfigError,
        CreateContainerError,
        FailedCreatePodSandBox,
        /// No kubelet's: network policies select the pod and this node cannot enforce them.
        NetworkPolicyNotEnforced,
        /// No kubelet's: the node has no runtime for the pod's runtime class.
        RuntimeClassUnavailable,
    }
}

reasons! {
    /// The reason of an event about a pod.
    EventReason {
        BackOff,
        CPUThrottled,
        DeadlineExceeded,
        Evicted,
        Failed,
        FailedCreatePodSandBox,
        FailedMount,
        FailedPostStartHook,
        FailedPreStopHook,
        FreezeFailed,
        InvalidConfiguration,
        Killing,
        NetworkPolicyNotEnforced,
        OutOfpods,
        PodWorkerPanicked,
        RuntimeClassUnavailable,
        Started,
        Unhealthy,
        Unsupported,
    }
}

/// Why a pod failed as a whole: `reason` of its status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FailureReason {
    Evicted,
    OutOfPods,
    DeadlineExceeded,
    /// The reason in the pod's status before this run of the node. An end once reported stands, also one from another component.
    Reported(String),
}

impl FailureReason {
    pub fn as_str(&self) -> &str {
        match self {
            Self::Evicted => "Evicted",
            Self::OutOfPods => "OutOfpods",
            Self::DeadlineExceeded => "DeadlineExceeded",
            Self::Reported(reason) => reason,
        }
    }

    /// The reason of the event that announces the end.
    pub fn event(&self) -> EventReason {
        match self {
            Self::Evicted => EventReason::Evicted,
            Self::OutOfPods => EventReason::OutOfpods,
            Self::DeadlineExceeded => EventReason::DeadlineExceeded,
            Self::Reported(_) => EventReason::Failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_spelled_as_in_the_api() {
        assert_eq!(WaitingReason::ErrImagePull.as_str(), "ErrImagePull");
        assert_eq!(
            WaitingReason::parse("ContainerCreating"),
            Some(WaitingReason::ContainerCreating)
        );
        assert_eq!(WaitingReason::parse("containercreating"), None);
        assert_eq!(FailureReason::OutOfPods.as_str(), "OutOfpods");
    }
}

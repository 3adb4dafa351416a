//! Enums of the API that decode an unknown value as a default.
//!
//! Schemas list the values of an enum, but an object may be older than its schema, or written for a newer one. Upstream compares
//! such fields with the values that it knows and treats any other as the default. An unknown value must not make the whole object
//! unreadable.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserializer, Error, Visitor};

/// An enum whose values have names.
pub(crate) trait Named: Copy {
    /// The value with this name, or the value that stands for all unknown names.
    fn named(name: &str) -> Self;
}

/// Decodes a value from its name.
pub(crate) fn deserialize<'de, T: Named, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    struct Names<T>(PhantomData<T>);

    impl<T: Named> Visitor<'_> for Names<T> {
        type Value = T;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a string")
        }

        fn visit_str<E: Error>(self, name: &str) -> Result<T, E> {
            Ok(T::named(name))
        }
    }

    deserializer.deserialize_str(Names(PhantomData))
}

/// Implements `Deserialize` for an enum whose values have the same names in the API as in Rust.
macro_rules! lenient {
    ($name:ident: $($variant:ident),+; else $fallback:ident) => {
        impl crate::lenient::Named for $name {
            fn named(name: &str) -> Self {
                match name {
                    $(stringify!($variant) => Self::$variant,)+
                    _ => Self::$fallback,
                }
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                crate::lenient::deserialize(deserializer)
            }
        }
    };
}

pub(crate) use lenient;

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::json;

    use crate::claim::ClaimShutdownPolicy;
    use crate::sandbox::{OperatingMode, ShutdownPolicy, SuspensionType};
    use crate::template::{
        EnvVarsInjectionPolicy, NetworkPolicyManagement, VolumeClaimTemplatesPolicy,
    };
    use crate::warm_pool::UpdateStrategyKind;

    fn read<T: DeserializeOwned>(name: &str) -> T {
        serde_json::from_value(json!(name)).unwrap()
    }

    #[test]
    fn an_unknown_enum_value_is_the_default_as_in_upstream() {
        let unknown = "Unheard-of";
        assert_eq!(
            read::<UpdateStrategyKind>(unknown),
            UpdateStrategyKind::OnReplenish
        );
        assert_eq!(read::<ShutdownPolicy>(unknown), ShutdownPolicy::Retain);
        assert_eq!(
            read::<ClaimShutdownPolicy>(unknown),
            ClaimShutdownPolicy::Retain
        );
        assert_eq!(read::<OperatingMode>(unknown), OperatingMode::Running);
        assert_eq!(
            read::<NetworkPolicyManagement>(unknown),
            NetworkPolicyManagement::Managed
        );
        assert_eq!(
            read::<EnvVarsInjectionPolicy>(unknown),
            EnvVarsInjectionPolicy::Disallowed
        );
        assert_eq!(
            read::<VolumeClaimTemplatesPolicy>(unknown),
            VolumeClaimTemplatesPolicy::Disallowed
        );
        // The default deletes the pod, and with it the memory that another strategy would keep.
        assert_eq!(read::<SuspensionType>(unknown), SuspensionType::Unknown);
    }

    #[test]
    fn known_values_are_themselves() {
        assert_eq!(
            read::<UpdateStrategyKind>("Recreate"),
            UpdateStrategyKind::Recreate
        );
        assert_eq!(read::<OperatingMode>("Suspended"), OperatingMode::Suspended);
        assert_eq!(
            read::<ClaimShutdownPolicy>("DeleteForeground"),
            ClaimShutdownPolicy::DeleteForeground
        );
        assert!(serde_json::from_value::<UpdateStrategyKind>(json!(3)).is_err());
    }
}

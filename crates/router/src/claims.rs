//! Maps the name of a claim to its sandbox. Independent of HTTP and Kubernetes; `claim_watch` translates.
//!
//! A claim's status names the sandbox that it is bound to. That alone is not enough: a client that may write a claim's status, or a
//! sandbox's owner references, could otherwise redirect requests for one name to a sandbox of another name (confused deputy). Both
//! objects must agree: the claim names the sandbox, and the sandbox's controller is that claim, by its UID.

use std::collections::HashSet;

use crate::identify::SandboxKey;

/// A claim that is bound to a sandbox of its namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundClaim {
    pub uid: String,
    /// The sandbox's name.
    pub sandbox: String,
}

/// The claim that is the controller of a sandbox, by its owner reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimOwner {
    pub name: String,
    pub uid: String,
}

/// The bound claims, by namespace and name.
#[derive(Debug, Default)]
pub struct Claims {
    bound: papaya::HashMap<String, BoundClaim>,
}

impl Claims {
    /// Records the sandbox that a claim is bound to. Returns whether that is a change.
    pub fn set(&self, key: &str, bound: Option<BoundClaim>) -> bool {
        let claims = self.bound.pin();
        match bound {
            None => claims.remove(key).is_some(),
            Some(bound) if claims.get(key) == Some(&bound) => false,
            Some(bound) => {
                claims.insert(key.to_owned(), bound);
                true
            }
        }
    }

    pub fn keep_only(&self, listed: &HashSet<String>) {
        self.bound.pin().retain(|key, _| listed.contains(key));
    }

    /// The sandbox that a claim owns. `owner_of` returns the claim that is a sandbox's controller.
    pub fn sandbox_of(
        &self,
        claim: &SandboxKey,
        owner_of: impl FnOnce(&SandboxKey) -> Option<ClaimOwner>,
    ) -> Option<SandboxKey> {
        let claims = self.bound.pin();
        let bound = claims.get(claim.as_str())?;
        let sandbox = SandboxKey::new(claim.namespace(), &bound.sandbox);
        let owner = owner_of(&sandbox)?;
        let is_owned = owner.uid == bound.uid && owner.name == claim.name();
        is_owned.then_some(sandbox)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(name: &str, uid: &str) -> ClaimOwner {
        ClaimOwner {
            name: name.into(),
            uid: uid.into(),
        }
    }

    #[test]
    fn a_claim_resolves_only_to_the_sandbox_that_it_owns() {
        let claims = Claims::default();
        let bound = BoundClaim {
            uid: "1".into(),
            sandbox: "warm".into(),
        };
        assert!(claims.set("team/mine", Some(bound.clone())));
        assert!(!claims.set("team/mine", Some(bound)));
        let table = [
            (Some(owner("mine", "1")), Some("team/warm"), "its own"),
            (
                Some(owner("mine", "2")),
                None,
                "owned by an earlier claim of the same name",
            ),
            (Some(owner("theirs", "3")), None, "owned by another claim"),
            (
                Some(owner("theirs", "1")),
                None,
                "an owner whose name and UID do not match",
            ),
            (None, None, "owned by a pool, or without an owner"),
        ];
        for (owner, expected, which) in table {
            let found = claims.sandbox_of(&SandboxKey::new("team", "mine"), |sandbox| {
                assert_eq!(sandbox.as_str(), "team/warm");
                owner
            });
            let found = found.as_ref().map(SandboxKey::as_str);
            assert_eq!(found, expected, "{which}");
        }
        let elsewhere = claims.sandbox_of(&SandboxKey::new("other", "mine"), |_| {
            Some(owner("mine", "1"))
        });
        assert_eq!(elsewhere, None, "another namespace");
        assert!(claims.set("team/mine", None));
        let unbound = claims.sandbox_of(&SandboxKey::new("team", "mine"), |_| {
            Some(owner("mine", "1"))
        });
        assert_eq!(unbound, None);
    }
}

//! Which sandbox the name of a claim stands for. It knows neither HTTP nor Kubernetes; `claim_watch` translates.
//!
//! A claim says by its status which sandbox it is bound to. That alone opens nothing: who may write a claim's status, or a
//! sandbox's owner references, could otherwise have requests for one name end in a sandbox of another (confused deputy). Both
//! objects must agree: the claim names the sandbox, and the sandbox's controller is that very claim, by its UID.

use std::collections::HashSet;

use crate::identify::SandboxKey;

/// A claim that is bound to a sandbox of its namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundClaim {
    pub uid: String,
    /// The sandbox's name.
    pub sandbox: String,
}

/// The claim that a sandbox names as its controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimOwner {
    pub name: String,
    pub uid: String,
}

/// The claims that are bound, by namespace and name.
#[derive(Debug, Default)]
pub struct Claims {
    bound: papaya::HashMap<String, BoundClaim>,
}

impl Claims {
    /// Takes note of what a claim is bound to. Whether that is news.
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

    /// The sandbox that a claim owns. `owner_of` tells which claim a sandbox names as its controller.
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
    fn a_claim_leads_only_to_the_sandbox_that_it_owns() {
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
                "of an earlier claim of its name",
            ),
            (Some(owner("theirs", "3")), None, "of another claim"),
            (
                Some(owner("theirs", "1")),
                None,
                "an owner that does not add up",
            ),
            (None, None, "of a pool, or of nothing"),
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

//! Which sandbox a claim has, or is about to have.

use std::sync::Arc;

use api::{Sandbox, SandboxClaim, labels};
use kube::ResourceExt;

use super::acquisition::{allows_adoption, is_adoptable};
use crate::owner::is_controlled_by;

/// What a claim has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Holding<'a> {
    /// A sandbox that it controls.
    Owned(&'a Sandbox),
    /// It is bound to a warm sandbox that is still its pool's, and is to be transferred.
    Bound(&'a Sandbox),
    /// It is bound to a sandbox of its own name that does not exist yet.
    Planned,
    /// It is bound to a sandbox that is gone, belongs to another owner, or that the claim's spec does not allow it to adopt.
    Broken { name: &'a str },
    /// Nothing.
    Free,
}

/// The names under which a claim's sandbox may be found, each once, best first.
pub fn names_to_look_up(claim: &SandboxClaim) -> Vec<&str> {
    let mut names = Vec::with_capacity(3);
    let own_name = claim.metadata.name.as_deref();
    for name in [reported_name(claim), bound_name(claim), own_name]
        .into_iter()
        .flatten()
    {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// What the claim has, given the sandboxes of [`names_to_look_up`], in that order, followed by all others that it controls.
///
/// The owner reference of a sandbox decides. Users can edit the binding on the claim, so it is only a hint: it may be missing, and it
/// may name a sandbox that the claim must not have.
pub fn holding<'a>(
    claim: &'a SandboxClaim,
    found: &'a [(String, Option<Arc<Sandbox>>)],
) -> Holding<'a> {
    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
    let owned = found
        .iter()
        .filter_map(|(_, sandbox)| sandbox.as_deref())
        .find(|sandbox| is_controlled_by(&sandbox.metadata, uid));
    if let Some(sandbox) = owned {
        return Holding::Owned(sandbox);
    }
    let Some(name) = bound_name(claim) else {
        return Holding::Free;
    };
    let bound = found
        .iter()
        .find(|(found, _)| *found == name)
        .and_then(|(_, sandbox)| sandbox.as_deref());
    match bound {
        Some(sandbox) if is_adoptable(sandbox) && allows_adoption(claim, sandbox) => {
            Holding::Bound(sandbox)
        }
        None if claim.metadata.name.as_deref() == Some(name) => Holding::Planned,
        Some(_) | None => Holding::Broken { name },
    }
}

/// The sandbox that the claim's status names.
fn reported_name(claim: &SandboxClaim) -> Option<&str> {
    claim
        .status
        .as_ref()
        .and_then(|status| status.sandbox.as_ref())
        .map(|sandbox| sandbox.name.as_str())
        .filter(|name| !name.is_empty())
}

/// The sandbox that the claim is bound to. The annotation holds names of any length; older controllers write only the label.
pub(super) fn bound_name(claim: &SandboxClaim) -> Option<&str> {
    claim
        .annotations()
        .get(labels::ASSIGNED_SANDBOX_NAME)
        .or_else(|| claim.labels().get(labels::ASSIGNED_SANDBOX_NAME))
        .map(String::as_str)
        .filter(|name| !name.is_empty())
}

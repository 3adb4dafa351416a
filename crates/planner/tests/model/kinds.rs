//! The kinds of the model: where the server stores them and processes cache them, and what must hold of writes.

use std::collections::BTreeMap;

use agent_sandbox_planner::claim::unfinished_binding;
use agent_sandbox_planner::owner::is_controlled_by;
use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool, labels};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;

use super::objects::Modelled;
use super::process::Process;
use super::server::Server;

impl Modelled<Server> for Sandbox {
    fn stored(server: &Server) -> &BTreeMap<String, Self> {
        &server.sandboxes
    }

    fn stored_mut(server: &mut Server) -> &mut BTreeMap<String, Self> {
        &mut server.sandboxes
    }

    fn cached<'a>(_: &'a Server, process: &'a Process) -> &'a BTreeMap<String, Self> {
        &process.sandboxes
    }

    fn learn(process: &mut Process, server: &Server, name: &str) {
        process.see_sandbox(server, name);
    }

    /// A pool never creates more sandboxes than it was asked for.
    fn check_creation(created: &Self, server: &Server) {
        let is_owner =
            |pool: &&SandboxWarmPool| is_controlled_by(&created.metadata, &pool.uid().unwrap());
        if let Some(pool) = server.pools.values().find(is_owner) {
            let desired = usize::try_from(pool.spec.desired_replicas()).unwrap();
            let members = server.members(pool);
            assert!(
                members <= desired,
                "{members} members where {desired} were asked for"
            );
        }
    }
}

impl Modelled<Server> for SandboxClaim {
    fn stored(server: &Server) -> &BTreeMap<String, Self> {
        &server.claims
    }

    fn stored_mut(server: &mut Server) -> &mut BTreeMap<String, Self> {
        &mut server.claims
    }

    fn cached<'a>(_: &'a Server, process: &'a Process) -> &'a BTreeMap<String, Self> {
        &process.claims
    }

    fn learn(process: &mut Process, server: &Server, name: &str) {
        process.see_claim(server, name);
    }

    /// A claim is bound to no warm sandbox that the process knows another claim to be bound to.
    fn check_write(before: &Self, after: &Self, server: &Server, process: &Process) {
        let bound = |claim: &Self| {
            let annotations = claim.annotations();
            annotations.get(labels::ASSIGNED_SANDBOX_NAME).cloned()
        };
        let Some(sandbox) = bound(after).filter(|name| bound(before).as_ref() != Some(name)) else {
            return;
        };
        let is_its_own = server.sandboxes.get(&sandbox).is_none_or(|sandbox| {
            is_controlled_by(&sandbox.metadata, after.metadata.uid.as_deref().unwrap())
        });
        let other = process.claims.values().find(|other| {
            other.uid() != after.uid() && unfinished_binding(other) == Some(&sandbox)
        });
        if let (false, Some(other)) = (is_its_own || sandbox == after.name_any(), other) {
            let (name, other) = (after.name_any(), other.name_any());
            panic!("claim {name} is bound to sandbox {sandbox}, which claim {other} is bound to");
        }
    }
}

impl Modelled<Server> for SandboxTemplate {
    fn stored(server: &Server) -> &BTreeMap<String, Self> {
        &server.templates
    }

    fn stored_mut(server: &mut Server) -> &mut BTreeMap<String, Self> {
        &mut server.templates
    }
}

impl Modelled<Server> for SandboxWarmPool {
    fn stored(server: &Server) -> &BTreeMap<String, Self> {
        &server.pools
    }

    fn stored_mut(server: &mut Server) -> &mut BTreeMap<String, Self> {
        &mut server.pools
    }
}

impl Modelled<Server> for NetworkPolicy {
    fn stored(server: &Server) -> &BTreeMap<String, Self> {
        &server.network_policies
    }

    fn stored_mut(server: &mut Server) -> &mut BTreeMap<String, Self> {
        &mut server.network_policies
    }
}

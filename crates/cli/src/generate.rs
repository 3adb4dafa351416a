//! `agent-sandbox generate`: prints the files of `deploy/` for a cluster.

use std::io::{self, Write};

use clap::{Args, ValueEnum};

use crate::assets;

/// Stands between two documents of a YAML stream.
const SEPARATOR: &str = "---\n";

/// Print CRDs, RBAC or manifests of the controller, the router and nodes for a Kubernetes cluster
#[derive(Debug, Args)]
pub struct Arguments {
    /// What to print
    #[arg(value_enum)]
    what: What,

    /// Print the definition, the role or the manifests of the Sandbox kind alone, without claims, templates and warm pools
    #[arg(long, conflicts_with = "kruise")]
    core: bool,

    /// Print those of the OpenKruise dialect instead
    #[arg(long)]
    kruise: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum What {
    /// The custom resource definitions
    Crds,
    /// The cluster roles
    Rbac,
    /// Namespace, service account, bindings, service and deployment
    Manifests,
    /// The router: service, deployment, service account, cluster role
    Router,
    /// The cluster role of `agent-sandbox node`, to be bound to the user of each node
    Node,
    /// A Gateway in front of the router on GKE
    GatewayGke,
    /// A Gateway in front of the router on kind
    GatewayKind,
}

/// Which part of the installation to print.
#[derive(Clone, Copy, Debug)]
enum Scope {
    Core,
    CoreAndExtensions,
    Kruise,
}

pub fn print(arguments: &Arguments) -> anyhow::Result<()> {
    let scope = match (arguments.core, arguments.kruise) {
        (true, _) => Scope::Core,
        (_, true) => Scope::Kruise,
        _ => Scope::CoreAndExtensions,
    };
    let documents = documents(arguments.what, scope)?;
    io::stdout().write_all(documents.join(SEPARATOR).as_bytes())?;
    Ok(())
}

fn documents(what: What, scope: Scope) -> anyhow::Result<Vec<&'static str>> {
    Ok(match (what, scope) {
        (What::Crds, Scope::Core) => vec![assets::CORE_CRD],
        (What::Crds, Scope::CoreAndExtensions) => assets::CRDS.to_vec(),
        (What::Crds, Scope::Kruise) => vec![assets::KRUISE_CRDS],
        (What::Rbac, Scope::Core) => vec![assets::CORE_RBAC],
        (What::Rbac, Scope::CoreAndExtensions) => assets::RBAC.to_vec(),
        (What::Rbac, Scope::Kruise) => vec![assets::KRUISE_RBAC],
        (What::Manifests, Scope::Core) => vec![assets::CORE_MANIFESTS],
        (What::Manifests, Scope::CoreAndExtensions) => manifests_with_extensions(),
        (What::Router, Scope::CoreAndExtensions) => vec![assets::ROUTER],
        (What::Node, Scope::CoreAndExtensions) => vec![assets::NODE_RBAC],
        (What::GatewayGke, Scope::CoreAndExtensions) => vec![assets::GATEWAY_GKE],
        (What::GatewayKind, Scope::CoreAndExtensions) => vec![assets::GATEWAY_KIND],
        (_, Scope::Core) => anyhow::bail!(
            "--core goes with crds, rbac and manifests; everything else is the same with and without extensions"
        ),
        (_, Scope::Kruise) => anyhow::bail!(
            "the OpenKruise dialect needs nothing beyond its CRDs and RBAC: add --kruise to the controller's arguments"
        ),
    })
}

/// The core's manifests without their Deployment, whose name the Deployment with `--extensions` has too, and the extensions'.
fn manifests_with_extensions() -> Vec<&'static str> {
    let is_deployment = |document: &str| document.lines().any(|line| line == "kind: Deployment");
    assets::CORE_MANIFESTS
        .split(SEPARATOR)
        .filter(|document| !is_deployment(document))
        .chain(assets::EXTENSIONS_MANIFESTS)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kind and name of each printed object.
    fn names(documents: &[&str]) -> Vec<String> {
        let text = documents.join(SEPARATOR);
        text.split(SEPARATOR)
            .map(|document| {
                let value = |key: &str| {
                    let line = document.lines().find_map(|line| line.strip_prefix(key));
                    line.unwrap_or_else(|| panic!("no {key} in {document}"))
                };
                format!("{} {}", value("kind: "), value("  name: "))
            })
            .collect()
    }

    fn deployment_args(documents: &[&str]) -> Vec<String> {
        let text = documents.join(SEPARATOR);
        text.lines()
            .map(str::trim)
            .filter(|line| line.starts_with("- --"))
            .map(ToOwned::to_owned)
            .collect()
    }

    #[test]
    fn manifests_hold_each_object_once() {
        let core = documents(What::Manifests, Scope::Core).unwrap();
        assert_eq!(
            names(&core),
            [
                "Namespace agent-sandbox-system",
                "ServiceAccount agent-sandbox-controller",
                "ClusterRoleBinding agent-sandbox-controller",
                "Service agent-sandbox-controller",
                "Deployment agent-sandbox-controller",
            ]
        );
        assert_eq!(deployment_args(&core), ["- --leader-elect=true"]);
        let all = documents(What::Manifests, Scope::CoreAndExtensions).unwrap();
        assert_eq!(
            names(&all),
            [
                "Namespace agent-sandbox-system",
                "ServiceAccount agent-sandbox-controller",
                "ClusterRoleBinding agent-sandbox-controller",
                "Service agent-sandbox-controller",
                "ClusterRoleBinding agent-sandbox-controller-extensions",
                "Deployment agent-sandbox-controller",
            ]
        );
        assert_eq!(
            deployment_args(&all),
            ["- --leader-elect=true", "- --extensions"]
        );
    }

    #[test]
    fn the_core_is_the_sandbox_kind_alone() {
        let crds = documents(What::Crds, Scope::Core).unwrap();
        assert_eq!(crds.len(), 1);
        assert!(crds[0].contains("\n  name: sandboxes.agents.x-k8s.io\n"));
        let rbac = documents(What::Rbac, Scope::Core).unwrap();
        assert_eq!(names(&rbac), ["ClusterRole agent-sandbox-controller"]);
        assert!(!rbac[0].contains("extensions.agents.x-k8s.io"));
        assert!(documents(What::Router, Scope::Core).is_err());
    }
}

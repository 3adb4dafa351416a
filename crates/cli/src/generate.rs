//! `agent-sandbox generate`: prints the files of `deploy/` for a cluster.

use std::io::{self, Write};

use clap::{Args, ValueEnum};

use crate::assets;

/// Print CRDs, RBAC or manifests of the controller, the router and nodes for a Kubernetes cluster
#[derive(Debug, Args)]
pub struct Arguments {
    /// What to print
    #[arg(value_enum)]
    what: What,

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

pub fn print(arguments: &Arguments) -> anyhow::Result<()> {
    let documents: &[&str] = match (arguments.what, arguments.kruise) {
        (What::Crds, false) => &assets::CRDS,
        (What::Crds, true) => &[assets::KRUISE_CRDS],
        (What::Rbac, false) => &assets::RBAC,
        (What::Rbac, true) => &[assets::KRUISE_RBAC],
        (What::Manifests, false) => &assets::MANIFESTS,
        (What::Router, false) => &[assets::ROUTER],
        (What::Node, false) => &[assets::NODE_RBAC],
        (What::GatewayGke, false) => &[assets::GATEWAY_GKE],
        (What::GatewayKind, false) => &[assets::GATEWAY_KIND],
        (_, true) => {
            anyhow::bail!(
                "the OpenKruise dialect needs nothing beyond its CRDs and RBAC: add --kruise to the controller's arguments"
            )
        }
    };
    io::stdout().write_all(documents.join("---\n").as_bytes())?;
    Ok(())
}

//! The project's own tasks. `cargo xtask --help` lists them.

mod adr;
mod api_reference;
mod artifacts;
mod attacks;
mod cluster;
mod commits;
mod crds;
mod dist;
mod documents;
mod go_programs;
mod kube_assets;
mod kubernetes;
mod layers;
mod links;
mod manifests;
mod named_tests;
mod openapi;
mod release;
mod router_manifests;
mod schema;
mod test_clients;
mod test_dist;
mod test_leaks;
mod test_slow;
mod tidy;
mod vocabulary;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "The project's own tasks")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Write every generated file: CRDs, RBAC, manifests, the API reference, the index of ADRs
    Generate,
    /// Fail if a generated file is not what `generate` would write
    Verify,
    /// Fail if the crates break the dependency rules or the habits of the code, or if an ADR or a link is wrong
    Tidy,
    /// Fail if the subject of a new commit does not have the form `area: what changed`
    CheckCommits,
    /// Run published clients, unmodified, and every block of the pages for users against `agent-sandbox up`
    TestClients(test_clients::Arguments),
    /// Let a thousand pods come and go, with the node killed in between, and look for what is left
    TestLeaks(test_leaks::Arguments),
    /// Make every registered attack against release binaries, and print which mechanism refuses each
    TestAttacks(attacks::Arguments),
    /// Write the manifests that a release publishes
    Release(release::Arguments),
    /// Build programs, images, packages and everything else that a release hands out
    Dist(dist::Arguments),
    /// Check what `dist` has written: the installer, the package, the images, and that packaging is reproducible
    TestDist(test_dist::Arguments),
    /// Build a real Kubernetes control plane, kubectl and helm into a cache outside the checkout
    KubeAssets(kube_assets::Arguments),
    /// Run a real Kubernetes control plane on loopback, for a command or until Enter is pressed or it is interrupted
    KubeUp(kubernetes::UpArguments),
    /// Run the conformance suite, the install paths and the system on a real Kubernetes control plane
    TestKubernetes(kubernetes::Arguments),
    /// Run the system on a whole Kubernetes: kubelet, containerd, CNI, network policies, gVisor
    TestCluster(cluster::Arguments),
    /// Run what takes too long for `.ci/run`: test-cluster, test-attacks, and the claim leaks in full
    TestSlow(test_slow::Arguments),
    /// Run a whole Kubernetes in namespaces of its own, for one command
    ClusterUp(cluster::UpArguments),
    /// Be PID 1 of a cluster's namespaces
    #[command(name = cluster::namespaces::INIT, hide = true)]
    ClusterInit(cluster::namespaces::InitArguments),
    /// Start the cluster in its namespaces, and run the suites
    #[command(name = cluster::DRIVER, hide = true)]
    ClusterDriver(cluster::DriverArguments),
    /// Become a program that is killed with the process that asked for it
    #[command(name = kubernetes::processes::BOUND, hide = true)]
    Bound(kubernetes::processes::BoundArguments),
}

fn main() -> ExitCode {
    let root = workspace_root();
    let result = match Arguments::parse().task {
        Task::Generate => artifacts::write(&root),
        Task::Verify => artifacts::verify(&root),
        Task::Tidy => tidy::check(&root),
        Task::CheckCommits => commits::check(&root),
        Task::TestClients(arguments) => test_clients::run(&root, &arguments),
        Task::TestLeaks(arguments) => test_leaks::run(&root, &arguments),
        Task::TestAttacks(arguments) => attacks::run(&root, &arguments),
        Task::Release(arguments) => release::run(&root, &arguments),
        Task::Dist(arguments) => dist::run(&root, &arguments),
        Task::TestDist(arguments) => test_dist::run(&root, &arguments),
        Task::KubeAssets(arguments) => kube_assets::run(&root, &arguments),
        Task::KubeUp(arguments) => kubernetes::up(&root, &arguments),
        Task::TestKubernetes(arguments) => kubernetes::run(&root, &arguments),
        Task::TestCluster(arguments) => cluster::run(&root, &arguments),
        Task::TestSlow(arguments) => test_slow::run(&root, &arguments),
        Task::ClusterUp(arguments) => cluster::up(&root, &arguments),
        Task::ClusterInit(arguments) => cluster::namespaces::init(&arguments),
        Task::ClusterDriver(arguments) => cluster::drive(&arguments),
        Task::Bound(arguments) => kubernetes::processes::become_bound(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn workspace_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the workspace")
        .to_owned()
}

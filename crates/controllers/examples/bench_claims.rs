//! Measures how fast claims are met by the embedded API server, in one process and with nothing to install:
//!
//! ```text
//! cargo run --release -p agent-sandbox-controllers --features bench --example bench_claims -- [POOL] [ONE_BY_ONE] [AT_ONCE] [SUSTAINED] [AT_RATE]
//! ```

use controllers::bench::{Options, claims};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::PostParams;

const DEFINITIONS: [&str; 4] = [
    include_str!("../../../deploy/crds/agents.x-k8s.io_sandboxes.yaml"),
    include_str!("../../../deploy/crds/extensions.agents.x-k8s.io_sandboxclaims.yaml"),
    include_str!("../../../deploy/crds/extensions.agents.x-k8s.io_sandboxtemplates.yaml"),
    include_str!("../../../deploy/crds/extensions.agents.x-k8s.io_sandboxwarmpools.yaml"),
];

/// As in the product.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type Failure = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let numbers: Vec<usize> = std::env::args()
        .skip(1)
        .map(|argument| argument.parse())
        .collect::<Result<_, _>>()?;
    let defaults = Options::default();
    let options = Options {
        pool: numbers.first().copied().unwrap_or(defaults.pool),
        sequential: numbers.get(1).copied().unwrap_or(defaults.sequential),
        at_once: numbers.get(2).copied().unwrap_or(defaults.at_once),
        sustained: numbers.get(3).copied().unwrap_or(defaults.sustained),
        at_rate: numbers.get(4).copied().unwrap_or(defaults.at_rate),
        ..defaults
    };
    // Durable, as in production.
    let directory = tempfile::tempdir()?;
    let server = apiserver::Server::open(apiserver::Config::new(directory.path())).await?;
    let client = server.client();
    let definitions = Api::<CustomResourceDefinition>::all(client.clone());
    for document in DEFINITIONS {
        let definition = serde_yaml_ng::from_str(document)?;
        definitions
            .create(&PostParams::default(), &definition)
            .await?;
    }
    let report = tokio::spawn(async move { claims(client, &options).await }).await??;
    println!("{report}");
    for excess in report.excess_writes() {
        println!("too many writes: {excess}");
    }
    server.shutdown().await;
    Ok(())
}

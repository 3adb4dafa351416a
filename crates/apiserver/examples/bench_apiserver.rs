//! Runs the benchmarks of the API server and prints the results as JSON: `bench_apiserver DIRECTORY`.

use apiserver::bench::{Options, run};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = std::env::args()
        .nth(1)
        .ok_or("usage: bench_apiserver DIRECTORY")?;
    let report = run(&Options::new(directory)).await?;
    println!("{}", serde_json::to_string_pretty(&report)?);
    Ok(())
}

//! Takes the API server's figures on this machine and prints them as JSON. `measure DIRECTORY`.

use apiserver::bench::{Options, run};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = std::env::args().nth(1).ok_or("usage: measure DIRECTORY")?;
    let report = run(&Options::new(directory)).await?;
    println!("{}", serde_json::to_string_pretty(&report)?);
    Ok(())
}

//! Measures the router against nginx and prints a table: `cargo run --release --example bench-router --features bench`.

fn main() {
    match router::bench::run(&router::bench::Options::default()) {
        Err(error) => eprintln!("{error}"),
        Ok(measurements) => {
            println!(
                "| target | connections | requests/s | p50 µs | p99 µs | failures | against nginx |\n|---|---|---|---|---|---|---|"
            );
            for found in &measurements {
                let nginx = measurements.iter().find(|other| {
                    other.target == "nginx" && other.connections == found.connections
                });
                let ratios = nginx.map(|nginx| found.against(nginx)).unwrap_or_default();
                println!(
                    "| {} | {} | {:.0} | {} | {} | {} | {ratios:.2?} |",
                    found.target,
                    found.connections,
                    found.requests_per_second(),
                    found.percentile(50).as_micros(),
                    found.percentile(99).as_micros(),
                    found.failures
                );
            }
        }
    }
}

//! Measures the router against nginx and prints a table: `cargo run --release --example bench-router --features bench`.

fn main() {
    match router::bench::run(&router::bench::Options::default()) {
        Err(error) => eprintln!("{error}"),
        Ok(measurements) => {
            println!(
                "| target | connections | requests/s | p50 µs | p99 µs | failures |\n|---|---|---|---|---|---|"
            );
            for found in measurements {
                println!(
                    "| {} | {} | {:.0} | {} | {} | {} |",
                    found.target,
                    found.connections,
                    found.requests_per_second,
                    found.p50.as_micros(),
                    found.p99.as_micros(),
                    found.failures
                );
            }
        }
    }
}

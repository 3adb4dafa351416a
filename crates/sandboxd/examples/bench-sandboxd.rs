//! Measures commands through the server and prints a table: `cargo run --release --example bench-sandboxd --features bench`.

use std::time::Duration;

fn main() {
    let base = std::env::temp_dir().join(format!("sandboxd-bench-{}", std::process::id()));
    match sandboxd::bench::run(&base, &[1, 8], Duration::from_secs(5)) {
        Err(error) => eprintln!("{error}"),
        Ok(measurements) => {
            println!("| clients | commands/s | p50 µs | p99 µs |\n|---|---|---|---|");
            for found in measurements {
                let (p50, p99) = (found.p50.as_micros(), found.p99.as_micros());
                println!(
                    "| {} | {:.0} | {p50} | {p99} |",
                    found.clients, found.commands_per_second
                );
            }
        }
    }
    let _ = std::fs::remove_dir_all(base);
}

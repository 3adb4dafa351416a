//! Measures pulls from a registry on loopback: an image that is not in the store, one whose layers mostly are, and one that is
//! complete.
//!
//! `cargo run --release -p agent-sandbox-images --example bench_images`

#![expect(
    clippy::unwrap_used,
    reason = "a measurement that cannot continue panics"
)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use agent_sandbox_images::{Images, Reference, Settings};
use serde_json::json;
use support::{FakeServer, Item, TestImage, content_of, layer};

const LAYERS: u8 = 4;
const FILES_PER_LAYER: usize = 400;
const FILE_BYTES: usize = 64 << 10;
const RUNS: usize = 5;

/// Files that compress to about half their size, as programs do.
fn files(seed: u8) -> Vec<u8> {
    let mut state = u32::from(seed) + 1;
    let contents: Vec<(String, Vec<u8>)> = (0..FILES_PER_LAYER)
        .map(|number| {
            let content = (0..FILE_BYTES)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 28).to_le_bytes()[0]
                })
                .collect();
            (format!("layer-{seed}/file-{number}"), content)
        })
        .collect();
    let items: Vec<Item<'_>> = contents
        .iter()
        .map(|(path, content)| Item::File(path, 0o644, content))
        .collect();
    layer(&items)
}

fn report(what: &str, mut sample: Vec<Duration>, megabytes: u32) {
    sample.sort();
    let median = sample[sample.len() / 2];
    let rate = f64::from(megabytes) / median.as_secs_f64();
    println!(
        "{what}: median {:.1} ms ({:.1} – {:.1}), {rate:.0} MB/s unpacked",
        median.as_secs_f64() * 1e3,
        sample[0].as_secs_f64() * 1e3,
        sample[sample.len() - 1].as_secs_f64() * 1e3,
    );
}

#[tokio::main]
async fn main() {
    let mut layers: Vec<Vec<u8>> = (0..LAYERS).map(files).collect();
    let image = TestImage::new(&layers, &json!({}));
    layers.push(layer(&[Item::File("new", 0o644, b"x")]));
    let sharing = TestImage::new(&layers, &json!({}));
    let mut content = content_of("v1", &image);
    content.extend(content_of("v2", &sharing));
    let registry = FakeServer::registry(content).await;
    let unpacked = usize::from(LAYERS) * FILES_PER_LAYER * FILE_BYTES / 1_000_000;
    let unpacked = u32::try_from(unpacked).expect("the image is smaller than 4 GiB");
    let compressed: usize = image.layers.iter().map(Vec::len).sum();
    println!(
        "an image of {LAYERS} layers with {} files, {unpacked} MB, {} MB compressed; {RUNS} runs",
        usize::from(LAYERS) * FILES_PER_LAYER,
        compressed / 1_000_000
    );
    let (mut absent, mut shared, mut present) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..RUNS {
        let directory = tempfile::tempdir().unwrap();
        let images = Images::open(Settings::new(directory.path())).unwrap();
        for (tag, sample) in [
            (":v1", &mut absent),
            (":v2", &mut shared),
            (":v2", &mut present),
        ] {
            let name = Reference::parse(&registry.image(tag)).unwrap();
            let began = Instant::now();
            images.pull(&name, Vec::new()).await.unwrap();
            sample.push(began.elapsed());
        }
    }
    report("not in the store", absent, unpacked);
    report("all layers but a small one in the store", shared, unpacked);
    report(
        "in the store, tag checked at the registry",
        present,
        unpacked,
    );
}

//! Reports the images of the node in its status (`status.images`), for schedulers and `kubectl describe node`.

use std::sync::Arc;
use std::time::Duration;

use images::{Images, Reference, Summary};
use k8s_openapi::api::core::v1::{ContainerImage, Node};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use api::errors::chain;

const INTERVAL: Duration = Duration::from_secs(5);
/// The same limit as a kubelet's, because a Node is read and written often.
const MOST_IMAGES: usize = 50;

/// Keeps the Node's list of images up to date, until `shutdown`.
pub async fn run(client: Client, node: String, images: Arc<Images>, shutdown: CancellationToken) {
    let nodes = Api::<Node>::all(client);
    let mut reported = Vec::new();
    loop {
        let store = images.clone();
        let listed = tokio::task::spawn_blocking(move || store.list()).await;
        let now = listed.ok().and_then(Result::ok);
        let now = now.map_or_else(|| reported.clone(), |listed| described(&listed));
        if now != reported {
            let status = json!({"status": {"images": now}});
            let written = nodes
                .patch_status(&node, &PatchParams::default(), &Patch::Merge(status))
                .await;
            match written {
                Ok(_) => reported = now,
                Err(error) => {
                    tracing::warn!(error = %chain(&error), "cannot report the node's images");
                }
            }
        }
        if shutdown
            .run_until_cancelled(tokio::time::sleep(INTERVAL))
            .await
            .is_none()
        {
            return;
        }
    }
}

/// The largest images, each with its names by tag and by digest.
fn described(images: &[Summary]) -> Vec<ContainerImage> {
    let mut images: Vec<&Summary> = images.iter().collect();
    images.sort_by(|a, b| (b.bytes, &a.id).cmp(&(a.bytes, &b.id)));
    images.truncate(MOST_IMAGES);
    images
        .into_iter()
        .map(|image| ContainerImage {
            names: Some(names(image)),
            size_bytes: i64::try_from(image.bytes).ok(),
        })
        .collect()
}

fn names(image: &Summary) -> Vec<String> {
    let by_digest = |name: &String| {
        let name = Reference::parse(name).ok()?;
        Some(name.with_digest(image.manifest.as_ref()?))
    };
    let mut names: Vec<String> = image.names.iter().filter_map(by_digest).collect();
    names.extend(image.names.iter().cloned());
    names.sort();
    names.dedup();
    if names.is_empty() {
        names.push(image.id.to_string());
    }
    names
}

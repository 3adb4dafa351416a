//! Feeds a cache from the API server for as long as the process lives: lists, watches, and lists anew when the watch is lost.
//! Objects are decoded one by one ([`api::decoding`]), so an object that cannot be decoded does not affect the others.

use api::decoding::Decoded;
use futures::StreamExt;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tracing::{Instrument, info_span, warn};

use crate::cache::Cache;
use crate::cached::Cached;
use crate::trimmed::Trimmed;

/// Follows a kind in all namespaces. Never returns; drop the future to stop.
pub(crate) async fn follow<K: Cached>(client: Client, cache: Cache<K>) {
    let kind = K::kind(&()).into_owned();
    let config = watcher::Config {
        label_selector: cache.label().map(str::to_owned),
        ..watcher::Config::default()
    };
    let span = info_span!("watch", kind);
    let events = watcher(Api::<Decoded<Trimmed<K>>>::all(client), config).default_backoff();
    async {
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => cache.take(event),
                Err(error) => warn!(
                    error = &error as &dyn std::error::Error,
                    "watch interrupted, trying again"
                ),
            }
        }
    }
    .instrument(span)
    .await;
}

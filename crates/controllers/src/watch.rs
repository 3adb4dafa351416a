//! Feeds a cache from the API server for as long as the process lives: lists, watches, and lists anew when the watch is lost.
//! Objects are decoded one by one ([`api::decoding`]): one that cannot be read keeps no other from being cached.

use api::decoding::Decoded;
use futures::StreamExt;
use kube::runtime::watcher;
use kube::{Api, Client};
use tracing::{Instrument, info_span};

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
    let mut events = object_watch::watch(Api::<Decoded<Trimmed<K>>>::all(client), config);
    async {
        while let Some(event) = events.next().await {
            // The cache keeps its objects while the watch fails.
            if let Ok(event) = event {
                cache.take(event);
            }
        }
    }
    .instrument(info_span!("watch", kind))
    .await;
}

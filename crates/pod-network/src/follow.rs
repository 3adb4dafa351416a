//! Follows all objects of a kind, in all namespaces.

use std::future::ready;

use futures::StreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource};
use object_watch::Failure;

/// Passes on each event and failure of a watch. Never returns; drop the future to stop.
pub async fn follow<K>(client: &Client, mut take: impl FnMut(Result<Event<K>, Failure>))
where
    K: Resource<DynamicType = ()>
        + Clone
        + Default
        + serde::de::DeserializeOwned
        + std::fmt::Debug
        + Send
        + 'static,
{
    let api = Api::all(client.clone());
    let events = object_watch::watch_readable(api, watcher::Config::default());
    events
        .for_each(|event| {
            take(event);
            ready(())
        })
        .await;
}

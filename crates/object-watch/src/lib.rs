#![doc = include_str!("../README.md")]
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod backoff;
mod failure;
mod failure_log;
mod retry;
mod watched;

use std::fmt::Debug;
use std::future::ready;

use api::decoding::Decoded;
use api::readable::readable;
use futures::StreamExt;
use futures::stream::BoxStream;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;

pub use failure::Failure;
pub use watched::Watched;

use failure_log::FailureLog;
use retry::Retrying;

/// The events of a watch. The stream does not end. Dropping the future of `next` loses no event.
pub type Events<K> = BoxStream<'static, Result<Event<K>, Failure>>;

/// Follows the objects that `config` selects, and logs failures.
///
/// # Assumptions
/// `K` is a [`Decoded`] kind, or one that any object of the kind can be decoded to. Otherwise one object makes the list fail.
pub fn watch<K>(api: Api<K>, config: watcher::Config) -> Events<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let log = FailureLog::named(name(&api, &config));
    retrying(api, config, Some(log))
}

/// Follows the objects that `config` selects and that can be decoded. Of other objects only the deletion is passed on, with their
/// metadata.
pub fn watch_readable<K>(api: Api<Decoded<K>>, config: watcher::Config) -> Events<K>
where
    K: Resource<DynamicType = ()> + Clone + Default + DeserializeOwned + Debug + Send + 'static,
{
    let events = watch(api, config);
    let events = events.filter_map(|event| {
        ready(match event {
            Ok(event) => readable(event).map(Ok),
            Err(failure) => Some(Err(failure)),
        })
    });
    events.boxed()
}

/// Follows the objects that `config` selects. The caller reports the failures.
pub fn watch_without_log<K>(api: Api<K>, config: watcher::Config) -> Events<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    retrying(api, config, None)
}

fn retrying<K>(api: Api<K>, config: watcher::Config, log: Option<FailureLog>) -> Events<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let open = move || watcher::watcher(api.clone(), config.clone()).boxed();
    Retrying::new(open, log).into_stream().boxed()
}

/// Names a watch in the log: the path of its resource and its selectors.
fn name<K: Resource>(api: &Api<K>, config: &watcher::Config) -> String {
    let selectors = config.label_selector.iter().chain(&config.field_selector);
    let mut name = api.resource_url().to_owned();
    for selector in selectors {
        name.push(' ');
        name.push_str(selector);
    }
    name
}

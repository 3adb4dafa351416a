//! Watches of kinds whose objects may not be decodable, such as those of a newer API server.

use crate::decoding::{Decoded, Unreadable};
use kube::Resource;
use kube::runtime::watcher::Event;

/// Drops the events of objects that cannot be decoded, except deletions: a consumer keeps the last version that could be decoded until
/// the object is deleted.
pub fn readable<K>(event: Event<Decoded<K>>) -> Option<Event<K>>
where
    K: Resource<DynamicType = ()> + Default,
{
    Some(match event {
        Event::Init => Event::Init,
        Event::InitDone => Event::InitDone,
        Event::InitApply(Decoded::Readable(object)) => Event::InitApply(object),
        Event::Apply(Decoded::Readable(object)) => Event::Apply(object),
        Event::Delete(Decoded::Readable(object)) => Event::Delete(object),
        Event::Delete(Decoded::Unreadable(left)) => Event::Delete(shell(*left)),
        Event::InitApply(Decoded::Unreadable(left)) | Event::Apply(Decoded::Unreadable(left)) => {
            warn::<K>(&left);
            return None;
        }
    })
}

/// An object of which only the metadata is known.
pub fn shell<K: Resource + Default>(left: Unreadable) -> K {
    let mut object = K::default();
    *object.meta_mut() = left.metadata;
    object
}

/// Logs that an object cannot be decoded: its name and the field, but not its content.
pub fn warn<K: Resource<DynamicType = ()>>(left: &Unreadable) {
    let (kind, metadata) = (K::kind(&()), &left.metadata);
    tracing::warn!(
        %kind,
        namespace = metadata.namespace.as_deref().unwrap_or_default(),
        name = metadata.name.as_deref().unwrap_or_default(),
        field = left.problem.field,
        "an object cannot be read and is passed over"
    );
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Service;

    use super::*;

    #[test]
    fn of_what_cannot_be_read_only_the_deletion_is_passed_on() {
        let text = r#"{"metadata":{"name":"s","uid":"u"},"spec":{"sessionAffinityConfig":{"clientIP":{"timeoutSeconds":3000000000}}}}"#;
        let decoded = || Decoded::<Service>::from_json(text);
        assert!(readable(Event::Apply(decoded())).is_none());
        assert!(readable(Event::InitApply(decoded())).is_none());
        let Some(Event::Delete(gone)) = readable(Event::Delete(decoded())) else {
            panic!("its deletion is an event");
        };
        assert_eq!(gone.metadata.uid.as_deref(), Some("u"));
    }
}

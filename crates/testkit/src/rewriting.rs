//! A client whose responses a test rewrites, for example to those of another version, or to objects that the server's validation
//! would refuse.

use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, BodyStream, Full, StreamBody};
use kube::Client;
use kube::client::Body;
use tower::{BoxError, service_fn};

/// A client whose responses are rewritten by `change`. The events of a watch are rewritten one by one.
pub fn rewriting(
    client: Client,
    change: impl Fn(&str) -> String + Send + Sync + 'static,
) -> Client {
    let namespace = client.default_namespace().to_owned();
    let change = Arc::new(change);
    let service = service_fn(move |request: Request<Body>| {
        let (client, change) = (client.clone(), Arc::clone(&change));
        async move {
            let query = request.uri().query().unwrap_or_default();
            let is_watch = query.split('&').any(|pair| pair.starts_with("watch="));
            let (head, body) = client.send(request).await?.into_parts();
            let changed = move |bytes: Bytes| Bytes::from(change(&String::from_utf8_lossy(&bytes)));
            let body: UnsyncBoxBody<Bytes, BoxError> = if is_watch {
                let frames = BodyStream::new(body).map(move |frame| {
                    let frame: Frame<Bytes> = frame.map_err(BoxError::from)?;
                    Ok(frame.map_data(&changed))
                });
                StreamBody::new(frames).boxed_unsync()
            } else {
                let whole = changed(body.collect().await?.to_bytes());
                Full::from(whole)
                    .map_err(|never| match never {})
                    .boxed_unsync()
            };
            let mut answer = Response::from_parts(head, body);
            answer.headers_mut().remove(http::header::CONTENT_LENGTH);
            Ok::<_, BoxError>(answer)
        }
    });
    Client::new(service, namespace)
}

/// Replaces every integer 77 in an object by one that does not fit into an `i32`.
pub fn seventy_seven_is_too_large(text: &str) -> String {
    text.replace(":77,", ":7700000000,")
        .replace(":77}", ":7700000000}")
}

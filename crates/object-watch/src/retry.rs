//! Retries a watch: pauses after a failure, and lists again when the resource version has expired.

use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt};
use kube::runtime::watcher::{self, Event};
use tokio::time::Instant;

use crate::backoff::{Attempt, Backoff};
use crate::failure::Failure;
use crate::failure_log::FailureLog;

type Source<K> = BoxStream<'static, watcher::Result<Event<K>>>;

/// A watch, and what its earlier attempts showed.
pub(crate) struct Retrying<K, Open> {
    open: Open,
    source: Source<K>,
    log: Option<FailureLog>,
    backoff: Backoff,
    began: Instant,
    delivered: bool,
    /// A failure was passed on, and the pause after it is due.
    pause: Option<std::time::Duration>,
}

impl<K, Open> Retrying<K, Open>
where
    K: Send + 'static,
    Open: Fn() -> Source<K> + Send + 'static,
{
    pub fn new(open: Open, log: Option<FailureLog>) -> Self {
        Self {
            source: open(),
            open,
            log,
            backoff: Backoff::default(),
            began: Instant::now(),
            delivered: false,
            pause: None,
        }
    }

    pub fn into_stream(self) -> impl Stream<Item = Result<Event<K>, Failure>> + Send {
        stream::unfold(self, |mut watch| async move {
            let item = watch.next().await;
            Some((item, watch))
        })
    }

    async fn next(&mut self) -> Result<Event<K>, Failure> {
        loop {
            if let Some(pause) = self.pause.take() {
                tokio::time::sleep(pause).await;
                (self.began, self.delivered) = (Instant::now(), false);
            }
            let failure = match self.source.next().await {
                Some(Ok(event)) => {
                    self.deliver(&event);
                    return Ok(event);
                }
                Some(Err(error)) => Failure::of(&error),
                None => None,
            };
            let attempt = Attempt {
                lasted: self.began.elapsed(),
                delivered: self.delivered,
            };
            self.pause = Some(self.backoff.pause(attempt, rand::random()));
            if let Some(failure) = failure {
                if let Some(log) = &mut self.log {
                    log.failed(&failure, attempt.lasted);
                }
                return Err(failure);
            }
            // `kube` lists again only if an event of the watch reports the expiry, not if the response to the request does.
            if let Some(log) = &self.log {
                log.expired();
            }
            self.source = (self.open)();
        }
    }

    fn deliver(&mut self, event: &Event<K>) {
        // It precedes the request for the list.
        if matches!(event, Event::Init) {
            return;
        }
        self.delivered = true;
        if let Some(log) = &mut self.log {
            log.worked();
        }
    }
}

#[cfg(test)]
mod tests;

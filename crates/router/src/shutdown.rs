//! Shutdown signals for connections, cheap to poll beside every request.
//!
//! Polling a cancellation token takes a lock that all connections share, on every wake-up of every connection. This type
//! polls the token only after an atomic flag has changed, and once for each waker.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

/// A signal that is triggered once.
#[derive(Debug, Default)]
pub struct ShutdownSignal {
    is_triggered: AtomicBool,
    token: CancellationToken,
}

impl ShutdownSignal {
    pub fn trigger(&self) {
        // Before the wakers are called, so that every woken task sees it.
        self.is_triggered.store(true, Ordering::Release);
        self.token.cancel();
    }

    pub fn token(&self) -> &CancellationToken {
        &self.token
    }

    /// Waits until the signal is triggered.
    pub async fn triggered(&self) {
        let mut waiting = pin!(self.token.cancelled());
        let mut registered: Option<Waker> = None;
        poll_fn(|context| self.poll(context, waiting.as_mut(), &mut registered)).await;
    }

    fn poll(
        &self,
        context: &mut Context<'_>,
        waiting: Pin<&mut WaitForCancellationFuture<'_>>,
        registered: &mut Option<Waker>,
    ) -> Poll<()> {
        if self.is_triggered.load(Ordering::Acquire) {
            return Poll::Ready(());
        }
        if registered
            .as_ref()
            .is_some_and(|waker| waker.will_wake(context.waker()))
        {
            return Poll::Pending;
        }
        *registered = Some(context.waker().clone());
        waiting.poll(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[tokio::test]
    async fn every_waiter_is_woken_by_the_signal() {
        let signal = Arc::new(ShutdownSignal::default());
        let waiting: Vec<_> = (0..3)
            .map(|_| {
                let signal = Arc::clone(&signal);
                tokio::spawn(async move { signal.triggered().await })
            })
            .collect();
        tokio::task::yield_now().await;
        assert!(waiting.iter().all(|task| !task.is_finished()));
        signal.trigger();
        for task in waiting {
            task.await.unwrap();
        }
        signal.triggered().await;
    }
}

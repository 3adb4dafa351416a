//! The moments at which connections are told to come to an end, cheap to wait for beside every request.
//!
//! Asking a cancellation token takes a lock that all connections share, and a connection would do so each time it is woken. Here it
//! asks only after an atomic flag says that something has changed, and once for each waker.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

/// A moment that comes once.
#[derive(Debug, Default)]
pub struct Moment {
    come: AtomicBool,
    token: CancellationToken,
}

impl Moment {
    pub fn set(&self) {
        // Before the wakers are called, so that whoever is woken sees it.
        self.come.store(true, Ordering::Release);
        self.token.cancel();
    }

    pub fn token(&self) -> &CancellationToken {
        &self.token
    }

    /// Waits for the moment.
    pub async fn come(&self) {
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
        if self.come.load(Ordering::Acquire) {
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
    async fn whoever_waits_is_woken_when_the_moment_comes() {
        let moment = Arc::new(Moment::default());
        let waiting: Vec<_> = (0..3)
            .map(|_| {
                let moment = Arc::clone(&moment);
                tokio::spawn(async move { moment.come().await })
            })
            .collect();
        tokio::task::yield_now().await;
        assert!(waiting.iter().all(|task| !task.is_finished()));
        moment.set();
        for task in waiting {
            task.await.unwrap();
        }
        moment.come().await;
    }
}

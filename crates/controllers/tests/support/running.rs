//! Controllers that run in the test's own process.

#![allow(dead_code, reason = "each test binary uses its own part of this")]

use controllers::{Parts, assemble};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub struct Running {
    shutdown: CancellationToken,
    abort: CancellationToken,
    task: JoinHandle<()>,
}

impl Running {
    /// Starts them, and calls `synced` when their caches are complete.
    pub fn start(parts: Parts, synced: impl FnOnce() + Send + 'static) -> Self {
        let (shutdown, abort) = (CancellationToken::new(), CancellationToken::new());
        let lead = std::future::ready(());
        let run = assemble(parts).run(shutdown.clone(), abort.clone(), synced, lead);
        Self {
            shutdown,
            abort,
            task: tokio::spawn(run),
        }
    }

    /// Stops them, and fails if one of them has panicked.
    pub async fn stop(self) {
        self.shutdown.cancel();
        self.ended().await;
    }

    /// Aborts them, like a crash.
    pub async fn kill(self) {
        self.abort.cancel();
        self.ended().await;
    }

    /// Cancelled to abort them.
    pub fn crash(&self) -> CancellationToken {
        self.abort.clone()
    }

    /// Waits until they have ended.
    pub async fn ended(self) {
        self.task.await.expect("controllers do not panic");
    }
}

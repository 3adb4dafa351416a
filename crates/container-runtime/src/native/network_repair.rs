//! Restores the parts of the pod network that another program removes: a pod's link (`ip link del`), the routing rules (`ip rule flush`).

use api::errors::chain;
use pod_network::removal_monitor::{Removal, RemovalMonitor};
use tokio_util::sync::CancellationToken;

use super::NativeRuntime;
use super::recovery::entries;
use crate::PodIdentity;

/// A pod whose link another program removed. Its connections are lost, whether the link was restored or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostLink {
    pub pod: PodIdentity,
    /// `NetworkLinkRestored` or `NetworkLinkLost`.
    pub reason: &'static str,
    pub note: String,
}

impl NativeRuntime {
    /// Repairs the pod network until `shutdown`, and reports each pod whose link was lost.
    pub async fn repair_network(&self, report: impl Fn(LostLink), shutdown: CancellationToken) {
        let names = self.network().layout().names.clone();
        let mut removals = match RemovalMonitor::open(names) {
            Ok(removals) => removals,
            Err(error) => {
                tracing::warn!(error = %chain(&error), "links that others remove are not made again");
                return;
            }
        };
        while let Some(Some(removal)) = shutdown.run_until_cancelled(removals.next()).await {
            match removal {
                Removal::Link(slot) => self.restore_link(slot, &report).await,
                Removal::Rule => {
                    if let Err(error) = self.network().install_rules().await {
                        tracing::error!(error = %chain(&error), "routing rules that isolate pods cannot be restored");
                    }
                }
            }
        }
    }

    async fn restore_link(&self, slot: u32, report: &impl Fn(LostLink)) {
        let (reason, note) = match self.slots().restore_link(slot).await {
            Ok(false) => return,
            Ok(true) => (
                "NetworkLinkRestored",
                "another program removed the pod's network link; it was made again".to_owned(),
            ),
            Err(error) => (
                "NetworkLinkLost",
                format!(
                    "another program removed the pod's network link: {}",
                    chain(&error)
                ),
            ),
        };
        tracing::warn!(slot, "{note}");
        if let Some(pod) = self.pod_of_slot(slot) {
            report(LostLink { pod, reason, note });
        }
    }

    fn pod_of_slot(&self, slot: u32) -> Option<PodIdentity> {
        entries(&self.pods).into_iter().find_map(|pod| {
            let record = self.sandbox_record(&pod)?;
            (record.slot == Some(slot)).then_some(record.spec.identity)
        })
    }
}

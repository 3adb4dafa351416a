//! Puts back what another program takes from the pods' network: a pod's link (`ip link del`), the routing rules (`ip rule flush`).

use tokio_util::sync::CancellationToken;

use super::NativeRuntime;
use super::recovery::entries;
use crate::errors::chain;
use crate::events::{EventSink, Severity};
use crate::network::losses::{Loss, Losses};
use crate::runtime::PodIdentity;

impl NativeRuntime {
    /// Repairs the pods' network until told to stop. A pod whose link was lost gets an event; its connections are lost.
    pub async fn repair_network(&self, events: &EventSink, shutdown: CancellationToken) {
        let names = self.network().layout().names.clone();
        let mut losses = match Losses::open(names) {
            Ok(losses) => losses,
            Err(error) => {
                tracing::warn!(error = %chain(&error), "links that others remove are not made again");
                return;
            }
        };
        while let Some(Some(loss)) = shutdown.run_until_cancelled(losses.next()).await {
            match loss {
                Loss::Link(slot) => self.restore_link(slot, events).await,
                Loss::Rule => {
                    if let Err(error) = self.network().install_rules().await {
                        tracing::error!(error = %chain(&error), "routing rules that isolate pods cannot be restored");
                    }
                }
            }
        }
    }

    async fn restore_link(&self, slot: u32, events: &EventSink) {
        let (severity, reason, note) = match self.slots().restore_link(slot).await {
            Ok(false) => return,
            Ok(true) => (
                Severity::Warning,
                "NetworkLinkRestored",
                "another program removed the pod's network link; it was made again".to_owned(),
            ),
            Err(error) => (
                Severity::Warning,
                "NetworkLinkLost",
                format!(
                    "another program removed the pod's network link: {}",
                    chain(&error)
                ),
            ),
        };
        tracing::warn!(slot, "{note}");
        if let Some(pod) = self.pod_of_slot(slot) {
            events.tell_of_pod(&pod, severity, reason, note);
        }
    }

    fn pod_of_slot(&self, slot: u32) -> Option<PodIdentity> {
        entries(&self.pods).into_iter().find_map(|pod| {
            let record = self.sandbox_record(&pod)?;
            (record.slot == Some(slot)).then_some(record.spec.identity)
        })
    }
}

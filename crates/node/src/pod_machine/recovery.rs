//! Taking over what an earlier run of the node left of a pod.

use jiff::Timestamp;

use super::{Command, PodMachine, ProbeResults};
use crate::pod_lifecycle::{self, ContainerState, Phase, Sandbox};
use crate::runtime::{RecoveredContainer, RecoveredPod};

impl PodMachine {
    pub(super) fn adopt(&mut self, recovered: RecoveredPod, now: Timestamp) {
        self.adopt_freezer(recovered.freezer, now);
        // A pod without its namespaces starts over, as after a reboot; its containers have ended. So does a pod without a started
        // container: the node may have died before the pod's files and volumes were complete. What exists is used again.
        let mut containers = recovered.containers.iter();
        let was_prepared = containers.any(|container| !container.is_of_lost_sandbox);
        if let Some(sandbox) = recovered.sandbox.filter(|_| was_prepared) {
            self.commands.push(Command::AttachNetwork(sandbox.clone()));
            self.commands.push(Command::RefreshVolumes(sandbox.clone()));
            self.sandbox = Sandbox::Ready(sandbox);
        }
        for found in recovered.containers {
            self.adopt_container(found);
        }
    }

    fn adopt_container(&mut self, found: RecoveredContainer) {
        let (name, run) = (found.id.container, found.id.attempt);
        let runs = run + 1;
        let mut state = ContainerState {
            runs,
            lost_runs: if found.is_of_lost_sandbox { runs } else { 0 },
            crashes: found.crashes,
            previous: found.previous,
            image_id: Some(found.started.image_id),
            ..ContainerState::default()
        };
        let is_running = found.termination.is_none();
        match found.termination {
            // What the init container prepared may be lost.
            Some(termination) if found.is_of_lost_sandbox && self.is_init(&name) => {
                state.previous = Some(termination);
            }
            Some(termination) => state.end(termination),
            None => {
                state.phase = Phase::Running {
                    started_at: found.started.started_at,
                }
            }
        }
        self.containers.insert(name.clone(), state);
        if is_running {
            let passed = self.reported_results(&name, run);
            self.container_runs(&name, run, Some(passed));
        }
    }

    fn is_init(&self, container: &str) -> bool {
        let spec = self.pod.spec.iter();
        let mut init = spec.flat_map(|spec| spec.init_containers.iter().flatten());
        init.any(|init| init.name == container && !pod_lifecycle::is_sidecar(init))
    }

    /// Which probes a run had passed when the node stopped, by the status in the API. They count until a probe fails.
    fn reported_results(&self, container: &str, run: u32) -> ProbeResults {
        let status = self.pod.status.as_ref();
        let mut statuses = status.into_iter().flat_map(|status| {
            status
                .container_statuses
                .iter()
                .flatten()
                .chain(status.init_container_statuses.iter().flatten())
        });
        let reported = statuses.find(|status| {
            status.name == container && u32::try_from(status.restart_count) == Ok(run)
        });
        reported.map_or_else(ProbeResults::default, |reported| ProbeResults {
            started: reported.started == Some(true),
            ready: reported.ready,
        })
    }
}

//! Letting a world come to rest: no more faults, and nothing new but what time brings.

use super::tasks::Task;
use super::{Faults, World};

/// The name of every init container.
const INIT: &str = "i";

impl World {
    /// Lets everything come to rest, without faults and without anything new.
    pub fn settle(&mut self) {
        self.faults = Faults::Absent;
        for _ in 0..3 {
            self.rest();
            self.sweep();
        }
        self.rest();
    }

    fn rest(&mut self) {
        for _ in 0..2000 {
            let is_moving = self.operate() || self.watch() || self.work();
            if is_moving || self.pass_probes() || self.complete_init() {
                continue;
            }
            let wakes = self.node.workers.values().filter_map(|one| one.wake_at);
            let recoveries = self.node.operations.iter();
            let recoveries = recoveries.filter_map(|operation| match operation.task {
                Task::Recover { not_before } => Some(not_before),
                _ => None,
            });
            let Some(next) = wakes.chain(recoveries).min() else {
                return;
            };
            self.now = self.now.max(next);
        }
        panic!("the node does not come to rest");
    }

    /// Init containers that run complete. False if there are none.
    fn complete_init(&mut self) -> bool {
        let running = self.runtime.running().into_iter();
        let init: Vec<_> = running
            .filter(|(uid, name, _)| name == INIT && !self.runtime.is_frozen(uid))
            .collect();
        for (uid, container, run) in &init {
            self.runtime.end(uid, container, *run, 0, self.now);
        }
        !init.is_empty()
    }

    /// Every probe that has not passed yet passes. False if all have passed.
    fn pass_probes(&mut self) -> bool {
        let mut passing = Vec::new();
        for (uid, worker) in &mut self.node.workers {
            for (container, (run, stage, passed)) in &mut worker.probes {
                if !*passed {
                    *passed = true;
                    passing.push((uid.clone(), container.clone(), *run, *stage));
                }
            }
        }
        let is_any = !passing.is_empty();
        for (uid, container, run, stage) in passing {
            self.probe(&uid, container, run, stage, true);
        }
        is_any
    }
}

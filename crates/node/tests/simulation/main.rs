//! The node's decisions under random schedules, without root and without containers: the registry of pods and the machine of every pod
//! run against a fake runtime and a fake API, one step at a time.
//!
//! What goes wrong: writes that fail, writes whose answers are lost, slow and failing sandboxes, starts, stops and removals, containers
//! that ignore signals, a node that is killed and finds its containers again, machines that reboot, workers that panic, watches that lag
//! behind and expire, pods that are deleted, deleted by force and created anew under the same name, pods that are frozen and thawed.
//!
//! What must hold at all times: no container is started twice, nothing of a pod is freed or removed while it runs or while the API has
//! the pod, no end of a container is lost, a container is stopped only for a reason. What must hold once everything has come to rest:
//! every pod that should run runs, every pod that should be frozen is, the API's status is the runtime's truth, and nothing is left of pods that are gone.
//!
//! A failure names its seed: `NODE_SIMULATION_SEED=<seed>` replays that schedule alone and prints its steps, `NODE_SIMULATION_SCHEDULES=<number>` runs as
//! many as that.

#![expect(
    clippy::unwrap_used,
    reason = "what a test's helpers cannot do fails the test"
)]

mod api;
mod random;
mod runtime;
mod world;

use std::panic::AssertUnwindSafe;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use ::api::labels::FREEZE;
use k8s_openapi::api::core::v1::{PodCondition, PodSpec};
use serde_json::json;

use world::World;

const SCHEDULES: u64 = 100_000;

const NAMES: [&str; 2] = ["a", "b"];

/// The pods that users create.
static SPECS: LazyLock<Vec<PodSpec>> = LazyLock::new(|| {
    let specs = [
        json!({"restartPolicy": "Always", "containers": [{"name": "c"}]}),
        json!({"restartPolicy": "Never", "containers": [{"name": "c"}]}),
        json!({"restartPolicy": "OnFailure", "initContainers": [{"name": "i"}], "containers": [{"name": "c"}]}),
        json!({"restartPolicy": "Always", "containers": [{
            "name": "c",
            "startupProbe": {"tcpSocket": {"port": 1}},
            "livenessProbe": {"tcpSocket": {"port": 1}},
            "readinessProbe": {"tcpSocket": {"port": 1}},
        }]}),
        json!({"restartPolicy": "Always", "initContainers": [{"name": "s", "restartPolicy": "Always"}], "containers": [{"name": "c"}, {"name": "d"}]}),
    ];
    let specs = specs.into_iter().map(|mut spec| {
        spec["nodeName"] = json!("node");
        serde_json::from_value(spec).unwrap()
    });
    specs.collect()
});

/// A user does something.
fn use_api(world: &mut World) {
    let name = world.random.choose(&NAMES).unwrap();
    let now = world.now;
    match world.random.below(13) {
        0..=3 => {
            let spec = &SPECS[world.random.below(SPECS.len())];
            world.api.create(name, spec);
        }
        4 | 5 => world.api.delete(name, 30, now),
        6 => world.api.delete(name, 1, now),
        7 => world.api.delete(name, 0, now),
        8 => world.api.edit(name, |pod| {
            let annotations = pod.metadata.annotations.get_or_insert_default();
            annotations.insert(FREEZE.to_owned(), "true".to_owned());
        }),
        9 | 10 => world.api.edit(name, |pod| {
            pod.metadata.annotations = None;
        }),
        11 => world.api.edit(name, |pod| {
            let spec = pod.spec.as_mut().unwrap();
            spec.active_deadline_seconds = Some(20);
        }),
        _ => world.api.edit(name, |pod| {
            let conditions = &mut pod.status.get_or_insert_default().conditions;
            conditions.get_or_insert_default().push(PodCondition {
                type_: "example.com/other".to_owned(),
                status: "True".to_owned(),
                ..PodCondition::default()
            });
        }),
    }
}

fn step(world: &mut World) {
    match world.random.below(100) {
        0..=19 => {
            world.watch();
        }
        20..=54 => {
            world.operate();
        }
        55..=79 => {
            world.work();
        }
        80..=86 => use_api(world),
        87..=89 => world.exit(),
        90..=92 => world.report(),
        93..=94 => world.wait(),
        95 => world.sweep(),
        96 => world.restart(),
        97 => world.panic(),
        98 => world.relist(),
        _ => {
            if world.random.percent(30) {
                world.runtime.reboot(world.now);
                world.restart();
            }
        }
    }
}

fn simulate(seed: u64, is_traced: bool) {
    let mut world = World::new(seed, is_traced);
    let spec = &SPECS[world.random.below(SPECS.len())];
    world.api.create("a", spec);
    let steps = 10 + world.random.below(60);
    for _ in 0..steps {
        step(&mut world);
    }
    world.settle();
    world.check_settled();
}

fn number(variable: &str) -> Option<u64> {
    let value = std::env::var(variable).ok()?;
    Some(value.parse().expect("a number"))
}

#[test]
fn pods_converge_without_double_starts_lost_ends_or_leaks() {
    if let Some(seed) = number("NODE_SIMULATION_SEED") {
        return simulate(seed, true);
    }
    let schedules = number("NODE_SIMULATION_SCHEDULES").unwrap_or(SCHEDULES);
    let next = AtomicU64::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= schedules {
                        return;
                    }
                    let simulated =
                        std::panic::catch_unwind(AssertUnwindSafe(|| simulate(seed, false)));
                    if let Err(panic) = simulated {
                        eprintln!("replay with NODE_SIMULATION_SEED={seed}");
                        std::panic::resume_unwind(panic);
                    }
                }
            });
        }
    });
}

//! CPU fairness on a busy machine: throttles CPU-bound pods to `SCHED_IDLE`, so that other pods respond without delay (ADR 28).
//!
//! The kernel protects the time slice of a running process for some milliseconds after another process wakes up, so a CPU-bound
//! pod would delay every response of its neighbours. A pod that recently used more CPU time than it requested, and more than half
//! a CPU, is therefore moved to the scheduling class `SCHED_IDLE` (`cpu.idle` of its cgroup): it runs only while no other process
//! wants the CPU, and is preempted at once. No pod starves: one that gets no CPU time uses little, and returns to the normal class
//! after a few reviews. Two CPU-bound pods get equal time. While a pod is throttled on a full machine, a [`PreemptionTick`] runs on
//! every CPU.

mod preemption_tick;

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::cgroups::Cgroups;
use preemption_tick::PreemptionTick;

/// How often pods are reviewed while the machine is busy.
const INTERVAL: Duration = Duration::from_millis(500);
/// On a machine whose CPUs are idle for less than this part of the time, processes often wait for a CPU.
const FULL_IDLE_PERCENT: u64 = 25;
/// The CPU time that every pod may use without being throttled, in thousandths of a CPU.
const FAIR_MILLI: u64 = 500;

/// Reviews the pods' CPU usage until `shutdown`.
pub async fn run(groups: Cgroups, shutdown: CancellationToken) {
    let mut fairness = CpuFairness::default();
    let mut tick: Option<PreemptionTick> = None;
    loop {
        let pause = tokio::time::sleep(INTERVAL);
        if shutdown.run_until_cancelled(pause).await.is_none() {
            fairness.reset_all_pods(&groups);
            return;
        }
        let machine = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let idle_percent = fairness.idle_percent(Times::parse(&machine));
        let enough_idle = enough_idle_percent(cpus(&machine));
        if idle_percent >= enough_idle && !fairness.any_pod_is_sched_idle() {
            continue;
        }
        let groups = groups.clone();
        let reviewed = tokio::task::spawn_blocking(move || {
            fairness.review(&groups, Instant::now());
            fairness
        });
        match reviewed.await {
            Ok(reviewed) => fairness = reviewed,
            Err(_) => return,
        }
        let is_needed = idle_percent < FULL_IDLE_PERCENT && fairness.any_pod_is_sched_idle();
        tick = is_needed.then(|| tick.take().unwrap_or_else(PreemptionTick::start));
    }
}

/// The idle time above which every process that wakes up finds a free CPU. The kernel looks for one nearby, and on a machine with
/// few CPUs that may be a busy one, so such a machine needs more idle time.
fn enough_idle_percent(cpus: usize) -> u64 {
    const FREE_CPUS_PERCENT: u64 = 125;
    const MOST: u64 = 75;
    let cpus = u64::try_from(cpus).unwrap_or(u64::MAX);
    (FREE_CPUS_PERCENT / cpus.max(1)).clamp(FULL_IDLE_PERCENT, MOST)
}

/// The number of CPUs in `/proc/stat`, which has one line for all CPUs together and one for each.
fn cpus(text: &str) -> usize {
    let lines = text.lines().filter(|line| line.starts_with("cpu"));
    lines.count().saturating_sub(1)
}

/// How the machine's CPUs have spent their time, in the kernel's ticks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Times {
    idle: u64,
    all: u64,
}

impl Times {
    /// From the first line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq.
    fn parse(text: &str) -> Self {
        const COUNTED: usize = 7;
        let line = text.lines().next().unwrap_or_default();
        let fields = line.split_whitespace().skip(1).take(COUNTED);
        let fields: Vec<u64> = fields.filter_map(|field| field.parse().ok()).collect();
        Self {
            idle: fields.iter().skip(3).take(2).sum(),
            all: fields.iter().sum(),
        }
    }
}

/// The last measurement of a pod.
#[derive(Debug, Clone, Copy)]
struct Seen {
    used: Duration,
    at: Instant,
    /// Its usage in thousandths of a CPU, smoothed: a throttled pod uses less at once, and would otherwise be released at the next
    /// review.
    milli: Option<u64>,
    is_sched_idle: bool,
}

#[derive(Debug, Default)]
struct CpuFairness {
    machine: Times,
    pods: HashMap<String, Seen>,
}

impl CpuFairness {
    /// The percentage of idle time since the previous call.
    fn idle_percent(&mut self, now: Times) -> u64 {
        let before = std::mem::replace(&mut self.machine, now);
        let idle = now.idle.saturating_sub(before.idle);
        let all = now.all.saturating_sub(before.all);
        (idle * 100).checked_div(all).unwrap_or(100)
    }

    fn any_pod_is_sched_idle(&self) -> bool {
        self.pods.values().any(|seen| seen.is_sched_idle)
    }

    /// Returns every pod to the normal scheduling class, because nothing reviews them after this.
    fn reset_all_pods(&self, groups: &Cgroups) {
        for (pod, _) in self.pods.iter().filter(|(_, seen)| seen.is_sched_idle) {
            let _ = groups.set_sched_idle(pod, false);
        }
    }

    /// Measures the CPU time that pods used since the previous review, and throttles or releases them.
    fn review(&mut self, groups: &Cgroups, now: Instant) {
        let mut pods = HashMap::new();
        for pod in groups.pods() {
            let Some(used) = groups.cpu_time(&pod) else {
                continue;
            };
            // A smaller counter belongs to a new cgroup with the same name.
            let before = self.pods.get(&pod).filter(|seen| seen.used <= used);
            let (milli, is_sched_idle) = match before {
                None => {
                    // An earlier run of the node may have throttled it.
                    let _ = groups.set_sched_idle(&pod, false);
                    (None, false)
                }
                Some(before) => {
                    let latest = used_milli(used.saturating_sub(before.used), now - before.at);
                    // Saves reading the cgroups of the many pods that use little.
                    let requested = if before.milli.max(Some(latest)) > Some(FAIR_MILLI / 2) {
                        groups.cpu_request_milli(&pod)
                    } else {
                        0
                    };
                    let milli = smoothed(before.milli, latest, requested);
                    let is_sched_idle =
                        should_be_sched_idle(before.is_sched_idle, milli, requested);
                    let is_sched_idle = if is_sched_idle == before.is_sched_idle {
                        is_sched_idle
                    } else {
                        tracing::debug!(
                            pod,
                            milli,
                            is_sched_idle,
                            "changed the scheduling class of a pod"
                        );
                        // A kernel without `cpu.idle` throttles no pod.
                        groups.set_sched_idle(&pod, is_sched_idle).is_ok() && is_sched_idle
                    };
                    (Some(milli), is_sched_idle)
                }
            };
            let seen = Seen {
                used,
                at: now,
                milli,
                is_sched_idle,
            };
            pods.insert(pod, seen);
        }
        self.pods = pods;
    }
}

fn used_milli(used: Duration, during: Duration) -> u64 {
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    micros(used).saturating_mul(1000) / micros(during).max(1)
}

/// The smoothed usage of a pod, from its previous value and the latest measurement. It is at most twice what the pod may use:
/// otherwise a pod that had a large machine to itself would stay throttled long after other pods came.
fn smoothed(before: Option<u64>, latest: u64, requested_milli: u64) -> u64 {
    let milli = before.map_or(latest, |before| (3 * before + latest) / 4);
    milli.min(2 * requested_milli.max(FAIR_MILLI))
}

/// Whether a pod must be throttled, from whether it is and from its usage. A throttled pod is released when it uses at most half of
/// what every pod may use, or no more than it requested (hysteresis).
fn should_be_sched_idle(before: bool, used_milli: u64, requested_milli: u64) -> bool {
    let enough = if before { FAIR_MILLI / 2 } else { FAIR_MILLI };
    used_milli > enough && used_milli > requested_milli
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_that_uses_more_than_it_requested_is_throttled_until_it_uses_little() {
        for (before, used, requested, expected) in [
            (false, 100, 0, false),
            (false, 500, 0, false),
            (false, 501, 0, true),
            (false, 1_900, 2_000, false),
            (false, 2_001, 2_000, true),
            (true, 400, 0, true),
            (true, 250, 0, false),
            (true, 1_900, 2_000, false),
            (true, 2_001, 2_000, true),
        ] {
            let is_sched_idle = should_be_sched_idle(before, used, requested);
            assert_eq!(is_sched_idle, expected, "{before} {used} of {requested}");
        }
        let used = used_milli(Duration::from_millis(750), Duration::from_millis(500));
        assert_eq!(used, 1_500);
    }

    /// The average usage of CPU-bound pods with these requests on two CPUs: pods in the normal class share the CPUs by weight, and
    /// leave next to nothing to the throttled ones.
    fn averages<const PODS: usize>(requests: [u64; PODS]) -> [u64; PODS] {
        const LOOKS: u64 = 400;
        let (mut milli, mut is_sched_idle) = ([None; PODS], [false; PODS]);
        let mut total = [0; PODS];
        for _ in 0..LOOKS {
            let all_are_sched_idle = is_sched_idle.iter().all(|pod| *pod);
            let weight = |pod: usize| match (is_sched_idle[pod], all_are_sched_idle) {
                (false, _) => 10 * requests[pod].max(100),
                (true, true) => 3,
                (true, false) => 0,
            };
            let weights: u64 = (0..PODS).map(weight).sum();
            let used: [u64; PODS] = std::array::from_fn(|pod| 2_000 * weight(pod) / weights);
            for pod in 0..PODS {
                total[pod] += used[pod];
                let now = smoothed(milli[pod], used[pod], requests[pod]);
                milli[pod] = Some(now);
                is_sched_idle[pod] = should_be_sched_idle(is_sched_idle[pod], now, requests[pod]);
            }
        }
        total.map(|total| total / LOOKS)
    }

    #[test]
    fn pods_get_most_of_their_cpu_request_beside_cpu_bound_pods() {
        let [asked, greedy] = averages([1_500, 0]);
        assert!(asked > 1_300 && greedy > 300, "{asked}, {greedy}");
        let [one, two, greedy] = averages([750, 750, 0]);
        assert!(
            one > 650 && two > 650 && greedy > 300,
            "{one}, {two}, {greedy}"
        );
        let [one, two] = averages([0, 0]);
        assert_eq!((one, two), (1_000, 1_000));
    }

    #[test]
    fn a_pod_that_had_a_large_machine_is_throttled_no_longer_than_others() {
        for had in [1_000, 4_000, 64_000] {
            let (mut milli, mut looks) = (smoothed(None, had, 0), 0);
            while should_be_sched_idle(true, milli, 0) {
                (milli, looks) = (smoothed(Some(milli), 0, 0), looks + 1);
            }
            assert_eq!(looks, 5, "{had}");
        }
    }

    #[test]
    fn idle_time_is_measured_since_the_previous_reading() {
        let mut fairness = CpuFairness::default();
        for (line, expected) in [
            ("cpu  100 0 100 750 50 0 0 7 0 0\ncpu0 1 1 1 1\n", 80),
            ("cpu  180 0 100 760 55 5 0 90 0 0\n", 15),
            ("cpu  180 0 100 760 55 5 0 99 0 0\n", 100),
            ("cpu  200 0 110 830 55 5 0 99 0 0\n", 70),
        ] {
            assert_eq!(
                fairness.idle_percent(Times::parse(line)),
                expected,
                "{line}"
            );
        }
    }

    #[test]
    fn a_machine_with_few_cpus_needs_more_idle_time() {
        assert_eq!(cpus("cpu  1 2\ncpu0 1 2\ncpu1 1 2\nintr 7\n"), 2);
        for (cpus, expected) in [(0, 75), (1, 75), (2, 62), (4, 31), (8, 25), (256, 25)] {
            assert_eq!(enough_idle_percent(cpus), expected, "{cpus}");
        }
    }
}

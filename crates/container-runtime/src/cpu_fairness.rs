//! Whose turn it is on a busy machine: a pod that uses much of the processors yields to those that need little.
//!
//! The kernel lets whoever runs go on for some milliseconds before somebody who wakes up gets the processor, so that a pod which
//! computes without end would delay every answer of its neighbours. A pod that has lately used more than it asked for, and more
//! than half a processor, is therefore put into the kernel's idle class: it has all the time that nobody else wants, and gives
//! it back the moment somebody does. Where others leave it nothing it uses little, and is soon like anybody else again: no pod
//! starves, and two that both compute without end share alike. While somebody yields on a full machine, every processor has a [`PreemptionTick`].

mod preemption_tick;

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::cgroups::Cgroups;
use preemption_tick::PreemptionTick;

/// How often pods are looked at while the machine is busy.
const INTERVAL: Duration = Duration::from_millis(500);
/// On a machine that is idle for less than this part of the time, somebody often waits for a processor.
const FULL_IDLE_PERCENT: u64 = 25;
/// What every pod may use without yielding, in thousandths of a processor.
const FAIR_MILLI: u64 = 500;

/// Reviews whose turn it is until told to stop.
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

/// How much of the time a machine is idle when everybody finds a processor free: somebody who wakes up looks for one nearby, and on a
/// machine with few of them that may be the one that is in use.
fn enough_idle_percent(cpus: usize) -> u64 {
    const FREE_CPUS_PERCENT: u64 = 125;
    const MOST: u64 = 75;
    let cpus = u64::try_from(cpus).unwrap_or(u64::MAX);
    (FREE_CPUS_PERCENT / cpus.max(1)).clamp(FULL_IDLE_PERCENT, MOST)
}

/// How many processors the machine has, by `/proc/stat`: a line for all of them, and one for each.
fn cpus(text: &str) -> usize {
    let lines = text.lines().filter(|line| line.starts_with("cpu"));
    lines.count().saturating_sub(1)
}

/// How the machine's processors have spent their time, in the kernel's ticks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Times {
    idle: u64,
    all: u64,
}

impl Times {
    /// From the first line of `/proc/stat`: user, nice, system, idle, waiting for the disk, interrupts.
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

/// What is known of a pod.
#[derive(Debug, Clone, Copy)]
struct Seen {
    used: Duration,
    at: Instant,
    /// What it uses, in thousandths of a processor, smoothed: whoever yields uses less at once, and would no longer yield at the next look.
    milli: Option<u64>,
    is_sched_idle: bool,
}

#[derive(Debug, Default)]
struct CpuFairness {
    machine: Times,
    pods: HashMap<String, Seen>,
}

impl CpuFairness {
    /// How much of the time the machine was idle since this was last asked.
    fn idle_percent(&mut self, now: Times) -> u64 {
        let before = std::mem::replace(&mut self.machine, now);
        let idle = now.idle.saturating_sub(before.idle);
        let all = now.all.saturating_sub(before.all);
        (idle * 100).checked_div(all).unwrap_or(100)
    }

    fn any_pod_is_sched_idle(&self) -> bool {
        self.pods.values().any(|seen| seen.is_sched_idle)
    }

    /// Lets nobody yield: there will be nobody to end it.
    fn reset_all_pods(&self, groups: &Cgroups) {
        for (pod, _) in self.pods.iter().filter(|(_, seen)| seen.is_sched_idle) {
            let _ = groups.set_sched_idle(pod, false);
        }
    }

    /// Compares what pods have used with what they had used before.
    fn review(&mut self, groups: &Cgroups, now: Instant) {
        let mut pods = HashMap::new();
        for pod in groups.pods() {
            let Some(used) = groups.cpu_time(&pod) else {
                continue;
            };
            // A pod may have taken the name of another that was looked at before.
            let before = self.pods.get(&pod).filter(|seen| seen.used <= used);
            let (milli, is_sched_idle) = match before {
                None => {
                    // An earlier run of the node may have made it yield.
                    let _ = groups.set_sched_idle(&pod, false);
                    (None, false)
                }
                Some(before) => {
                    let latest = used_milli(used.saturating_sub(before.used), now - before.at);
                    // Most pods use little, and need not be looked up.
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
                        tracing::debug!(pod, milli, is_sched_idle, "the cpus are shared anew");
                        // Where the kernel has no such class, everybody is alike.
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

/// What a pod uses, given what was thought before and what was seen last. More than twice what it may use is not remembered: one
/// that had a large machine to itself would yield for long after others came.
fn smoothed(before: Option<u64>, latest: u64, requested_milli: u64) -> u64 {
    let milli = before.map_or(latest, |before| (3 * before + latest) / 4);
    milli.min(2 * requested_milli.max(FAIR_MILLI))
}

/// Whether a pod is to yield, given whether it does and what it has used. One that does goes on until it uses half of what every pod
/// may, or no more than it asked for.
fn should_be_sched_idle(before: bool, used_milli: u64, requested_milli: u64) -> bool {
    let enough = if before { FAIR_MILLI / 2 } else { FAIR_MILLI };
    used_milli > enough && used_milli > requested_milli
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_uses_more_than_it_asked_for_yields_until_it_uses_little() {
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

    /// What pods that all want everything get of two processors on average, by what they asked for: those that do not yield share by weight,
    /// and leave those that do next to nothing.
    fn averages<const PODS: usize>(requests: [u64; PODS]) -> [u64; PODS] {
        const LOOKS: u64 = 400;
        let (mut milli, mut is_sched_idle) = ([None; PODS], [false; PODS]);
        let mut total = [0; PODS];
        for _ in 0..LOOKS {
            let all_yield = is_sched_idle.iter().all(|is_sched_idle| *is_sched_idle);
            let weight = |pod: usize| match (is_sched_idle[pod], all_yield) {
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
    fn beside_others_who_want_everything_pods_have_most_of_what_they_asked_for() {
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
    fn whoever_had_a_large_machine_yields_no_longer_than_others() {
        for had in [1_000, 4_000, 64_000] {
            let (mut milli, mut looks) = (smoothed(None, had, 0), 0);
            while should_be_sched_idle(true, milli, 0) {
                (milli, looks) = (smoothed(Some(milli), 0, 0), looks + 1);
            }
            assert_eq!(looks, 5, "{had}");
        }
    }

    #[test]
    fn a_machine_is_as_idle_as_it_was_since_it_was_last_looked_at() {
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
    fn a_machine_with_few_processors_needs_more_of_them_idle() {
        assert_eq!(cpus("cpu  1 2\ncpu0 1 2\ncpu1 1 2\nintr 7\n"), 2);
        for (cpus, expected) in [(0, 75), (1, 75), (2, 62), (4, 31), (8, 25), (256, 25)] {
            assert_eq!(enough_idle_percent(cpus), expected, "{cpus}");
        }
    }
}

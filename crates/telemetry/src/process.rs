//! The standard process metrics, with the names that Prometheus client libraries use, read from `/proc`.

use std::fmt::Write;
use std::fs;

/// The metrics of this process in the Prometheus text format. Values that the operating system does not provide are omitted.
pub fn render() -> String {
    let mut text = String::new();
    for metric in metrics().into_iter().flatten() {
        let Metric {
            name,
            kind,
            help,
            value,
        } = metric;
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}"
        );
    }
    crate::panics::render(&mut text);
    text
}

struct Metric {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    value: f64,
}

#[expect(
    clippy::cast_precision_loss,
    reason = "bytes and ticks of a process are far below 2^53"
)]
fn metrics() -> [Option<Metric>; 8] {
    let stat = Stat::read();
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    let page = rustix::param::page_size() as f64;
    let gauge = |name, help, value: Option<f64>| {
        let kind = "gauge";
        value.map(|value| Metric {
            name,
            kind,
            help,
            value,
        })
    };
    let stat_field = |index: usize| stat.as_ref().and_then(|stat| stat.field(index));
    let cpu_time = stat_field(UTIME)
        .zip(stat_field(STIME))
        .map(|(user, system)| (user + system) / ticks);
    let started = stat_field(STARTTIME)
        .zip(boot_time())
        .map(|(after_boot, boot)| boot + after_boot / ticks);
    [
        cpu_time.map(|value| Metric {
            name: "process_cpu_seconds_total",
            kind: "counter",
            help: "Total user and system CPU time spent in seconds.",
            value,
        }),
        gauge(
            "process_resident_memory_bytes",
            "Resident memory size in bytes.",
            stat_field(RSS).map(|pages| pages * page),
        ),
        gauge(
            "process_virtual_memory_bytes",
            "Virtual memory size in bytes.",
            stat_field(VSIZE),
        ),
        gauge(
            "process_start_time_seconds",
            "Start time of the process since unix epoch in seconds.",
            started,
        ),
        gauge(
            "process_open_fds",
            "Number of open file descriptors.",
            fs::read_dir("/proc/self/fd")
                .ok()
                .map(|open| open.count() as f64),
        ),
        gauge(
            "process_max_fds",
            "Maximum number of open file descriptors.",
            rustix::process::getrlimit(rustix::process::Resource::Nofile)
                .current
                .map(|limit| limit as f64),
        ),
        gauge(
            "process_threads",
            "Number of OS threads in the process.",
            stat_field(THREADS),
        ),
        gauge(
            "process_virtual_memory_max_bytes",
            "Maximum amount of virtual memory available in bytes.",
            Some(
                rustix::process::getrlimit(rustix::process::Resource::As)
                    .current
                    .map_or(-1.0, |limit| limit as f64),
            ),
        ),
    ]
}

// Indexes of fields in /proc/self/stat, counted from the third field, which follows the name.
const UTIME: usize = 11;
const STIME: usize = 12;
const THREADS: usize = 17;
const STARTTIME: usize = 19;
const VSIZE: usize = 20;
const RSS: usize = 21;

struct Stat(String);

impl Stat {
    fn read() -> Option<Self> {
        fs::read_to_string("/proc/self/stat").ok().map(Self)
    }

    fn field(&self, index: usize) -> Option<f64> {
        // The second field is a name in parentheses, which may contain any characters.
        let (_, fields) = self.0.rsplit_once(')')?;
        fields.split_ascii_whitespace().nth(index)?.parse().ok()
    }
}

/// The boot time of the machine, in seconds since the Unix epoch.
fn boot_time() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    let line = stat.lines().find_map(|line| line.strip_prefix("btime "))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_process_metric_is_present_and_plausible() {
        let text = render();
        let value = |name: &str| -> f64 {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let line = line.unwrap_or_else(|| panic!("no {name} in\n{text}"));
            line.trim().parse().unwrap()
        };
        assert!(value("process_resident_memory_bytes ") > 100_000.0);
        assert!(value("process_virtual_memory_bytes ") >= value("process_resident_memory_bytes "));
        assert!(value("process_open_fds ") >= 3.0);
        assert!(value("process_max_fds ") >= value("process_open_fds "));
        assert!(value("process_threads ") >= 1.0);
        assert!(value("process_cpu_seconds_total ") >= 0.0);
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap();
        let age = now.as_secs_f64() - value("process_start_time_seconds ");
        assert!((-2.0..86_400.0).contains(&age), "{age}");
    }
}

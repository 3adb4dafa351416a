//! Other ways to start a confined process: fork and exec, bubblewrap, runc.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use super::pods::Distribution;

/// Another way to start a confined process.
#[derive(Debug, Clone)]
pub struct Peer {
    pub name: &'static str,
    pub start_to_exit: Distribution,
    /// The ratio of its median to ours.
    pub ratio: f64,
}

/// Measures the peers that are installed.
pub fn measure(count: usize, own_ms: f64) -> Vec<Peer> {
    let mut found = Vec::new();
    let mut add = |name: &'static str, sample: Option<Vec<Duration>>| {
        if let Some(sample) = sample {
            let start_to_exit = Distribution::of(sample);
            found.push(Peer {
                name,
                start_to_exit,
                ratio: start_to_exit.p50_ms / own_ms,
            });
        }
    };
    add(
        "fork and exec",
        time(count, || Command::new("/usr/bin/true")),
    );
    add(
        "bubblewrap",
        time(count, || {
            let mut command = Command::new("bwrap");
            command.args([
                "--ro-bind",
                "/usr",
                "/usr",
                "--symlink",
                "usr/lib",
                "/lib",
                "--symlink",
                "usr/lib64",
                "/lib64",
            ]);
            command.args([
                "--proc",
                "/proc",
                "--dev",
                "/dev",
                "--unshare-all",
                "/usr/bin/true",
            ]);
            command
        }),
    );
    add("runc", runc(count));
    found
}

fn time(count: usize, command: impl Fn() -> Command) -> Option<Vec<Duration>> {
    (0..count)
        .map(|_| {
            let began = Instant::now();
            let mut command = command();
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            command
                .status()
                .ok()
                .filter(std::process::ExitStatus::success)
                .map(|_| began.elapsed())
        })
        .collect()
}

/// runc with a bundle of the machine's own programs, read-only.
fn runc(count: usize) -> Option<Vec<Duration>> {
    let bundle = std::env::temp_dir().join(format!("agent-sandbox-bench-{}", std::process::id()));
    std::fs::create_dir_all(&bundle).ok()?;
    let sample = runc_in(&bundle, count);
    let _ = std::fs::remove_dir_all(&bundle);
    sample
}

fn runc_in(bundle: &Path, count: usize) -> Option<Vec<Duration>> {
    Command::new("runc")
        .arg("spec")
        .current_dir(bundle)
        .status()
        .ok()
        .filter(std::process::ExitStatus::success)?;
    let path = bundle.join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).ok()?).ok()?;
    config["process"]["terminal"] = json!(false);
    config["process"]["args"] = json!(["/usr/bin/true"]);
    // Like ours, the container has only the programs of this machine.
    std::fs::create_dir(bundle.join("rootfs")).ok()?;
    let mounts = config["mounts"].as_array_mut()?;
    // If both versions of cgroups are mounted, runc fails at its own mount of them.
    mounts.retain(|mount| mount["type"] != "cgroup");
    mounts.extend(["/usr", "/bin", "/lib", "/lib64"].map(
        |path| json!({"destination": path, "source": path, "type": "bind", "options": ["rbind", "ro"]}),
    ));
    std::fs::write(&path, config.to_string()).ok()?;
    time(count, || {
        let mut command = Command::new("runc");
        command
            .args(["run", "--bundle"])
            .arg(bundle)
            .arg(format!("bench-{}", std::process::id()));
        command
    })
}

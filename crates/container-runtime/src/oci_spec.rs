//! OCI bundles for other runtimes (`runc`, `runsc`), and the command lines of those runtimes. Pure.
//!
//! The shim builds the container's root with every volume and device, as for the native runtime, and starts the other runtime in the
//! pod's namespaces. The other runtime only starts the processes, confines them and mounts `/proc`.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use shim_protocol::{Entrance, Launch, Outside, Process, ResourceLimit, User};

use super::handlers::Driver;
use super::seccomp;
use super::slots::OUT_OF_MEMORY_SCORE;

const VERSION: &str = "1.0.2";
/// The `PATH` of another runtime's program.
const PROGRAM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// All capabilities in the pod's own user namespace: another runtime creates mounts and namespaces there.
const EVERY_CAPABILITY: u64 = (1 << 41) - 1;

/// Describes how `driver`, whose program is at `program`, creates the container of this request. `volumes` are the paths of the pod's
/// mounts.
pub fn outside(
    launch: &Launch,
    driver: Driver,
    program: &Path,
    identifier: String,
    volumes: Vec<PathBuf>,
) -> Outside {
    let staged = match driver {
        // The root is complete already. A `/dev` in the bundle keeps runc from creating its own.
        Driver::Runc => vec![PathBuf::from("/dev")],
        // gVisor caches the root file system, so mounts that others change are listed separately. It has its own `/sys`.
        Driver::Runsc => volumes,
    };
    let mut call = vec![program.display().to_string()];
    call.push(format!("--root={}", launch.stage.join("state").display()));
    if driver == Driver::Runsc {
        // gVisor uses the network namespace and the cgroup in which it is started: the pod's.
        call.extend(["--network=host", "--ignore-cgroups"].map(str::to_owned));
    }
    let with = |words: &[&str]| {
        let words = words.iter().map(|word| (*word).to_owned());
        call.iter().cloned().chain(words).collect::<Vec<String>>()
    };
    let configuration = configuration(launch, driver, &staged);
    let stage = launch.stage.display().to_string();
    let pid_file = launch.stage.join("pid").display().to_string();
    let run = [
        "run",
        "--pid-file",
        &pid_file,
        "--bundle",
        &stage,
        &identifier,
    ];
    Outside {
        process: Process {
            arguments: with(&run),
            environment: vec![("PATH".to_owned(), PROGRAM_PATH.to_owned())],
            working_directory: "/".to_owned(),
            user: User {
                uid: 0,
                gid: 0,
                groups: Vec::new(),
            },
            capabilities: EVERY_CAPABILITY,
            entrance: Some(Entrance {
                exec: with(&["exec", "--process"]),
                state: with(&["state", &identifier]),
                process: configuration["process"].to_string(),
                directory: launch.stage.clone(),
                identifier,
            }),
            ..launch.process.clone()
        },
        configuration: configuration.to_string(),
        staged,
    }
}

fn configuration(launch: &Launch, driver: Driver, staged: &[PathBuf]) -> Value {
    let process = &launch.process;
    let environment: Vec<String> = process
        .environment
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    let capabilities = capability_names(process.capabilities);
    // A user other than root has none until it executes a program that grants some. gVisor would not drop them by itself.
    let own = if process.user.uid == 0 {
        capabilities.clone()
    } else {
        Vec::new()
    };
    let mut mounts = vec![
        json!({"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]}),
    ];
    mounts.extend(staged.iter().enumerate().map(|(index, target)| {
        let source = launch.stage.join("staged").join(index.to_string());
        json!({"destination": target, "type": "bind", "source": source, "options": ["rbind"]})
    }));
    let mut linux = json!({
        // The network, IPC and user namespaces are the pod's, in which the runtime is started.
        "namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "uts"}, {"type": "cgroup"}],
        "maskedPaths": launch.masked_paths,
        "readonlyPaths": launch.read_only_paths,
    });
    if driver == Driver::Runc {
        // gVisor does not pass system calls to the host kernel.
        linux["seccomp"] = seccomp::oci_profile();
    }
    json!({
        "ociVersion": VERSION,
        "hostname": launch.hostname,
        "process": {
            "terminal": process.terminal,
            "user": {"uid": process.user.uid, "gid": process.user.gid, "additionalGids": process.user.groups},
            "args": process.arguments,
            "env": environment,
            "cwd": process.working_directory,
            "capabilities": {
                "bounding": capabilities,
                "effective": own,
                "permitted": own,
                "inheritable": [],
                "ambient": [],
            },
            "rlimits": process.limits.iter().filter_map(limit).collect::<Vec<_>>(),
            "noNewPrivileges": process.no_new_privileges,
            "oomScoreAdj": OUT_OF_MEMORY_SCORE,
        },
        // The shim has made it read-only already if it has to be.
        "root": {"path": launch.stage.join("root"), "readonly": false},
        "mounts": mounts,
        "linux": linux,
    })
}

fn limit(limit: &ResourceLimit) -> Option<Value> {
    let name = match limit.resource {
        libc::RLIMIT_NOFILE => "RLIMIT_NOFILE",
        libc::RLIMIT_CORE => "RLIMIT_CORE",
        _ => return None,
    };
    Some(json!({"type": name, "soft": limit.soft, "hard": limit.hard}))
}

fn capability_names(set: u64) -> Vec<String> {
    crate::capabilities::ALLOWED_CAPABILITIES
        .iter()
        .filter(|(_, number)| set & (1_u64 << number) != 0)
        .map(|(name, _)| format!("CAP_{name}"))
        .collect()
}

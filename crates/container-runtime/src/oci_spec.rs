//! Bundles that other runtimes make containers from (OCI runtime specification), and the calls of those runtimes. Pure.
//!
//! The container's root, with every volume and device in it, is built by the shim as for the native runtime, and the other
//! runtime is started in the pod's namespaces. What is left to it is what only it can do: processes, their confinement, and
//! `/proc`.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use shim_protocol::{Entrance, Launch, Outside, Process, ResourceLimit, User};

use super::handlers::Driver;
use super::seccomp;
use super::slots::OUT_OF_MEMORY_SCORE;

const VERSION: &str = "1.0.2";
/// What another runtime's program may need of the machine.
const PROGRAM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// All capabilities, over the pod's own namespaces: another runtime makes mounts and namespaces in them.
const EVERY_CAPABILITY: u64 = (1 << 41) - 1;

/// Has `driver`, whose program is at `program`, make the container that the native runtime would make by this request.
/// `volumes` are the paths at which the pod has mounts.
pub fn outside(
    launch: &Launch,
    driver: Driver,
    program: &Path,
    identifier: String,
    volumes: Vec<PathBuf>,
) -> Outside {
    let staged = match driver {
        // Everything is in its root already. That it is given `/dev` keeps it from making one.
        Driver::Runc => vec![PathBuf::from("/dev")],
        // It keeps what it knows of its root to itself, and must be told what others change. It has a `/sys` of its own.
        Driver::Runsc => volumes,
    };
    let mut call = vec![program.display().to_string()];
    call.push(format!("--root={}", launch.stage.join("state").display()));
    if driver == Driver::Runsc {
        // The pod's network is the one it is started in, and its limits are those of the agent's control group.
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
    // Another user than root has them only once a program gives them to it. gVisor would not take them away by itself.
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
        // Network, IPC and users are the pod's: the runtime is started in them.
        "namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "uts"}, {"type": "cgroup"}],
        "maskedPaths": launch.masked_paths,
        "readonlyPaths": launch.read_only_paths,
    });
    if driver == Driver::Runc {
        // The other does not let system calls through in the first place.
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
        // Where it is to be read-only, it is sealed already.
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

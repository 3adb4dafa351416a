//! The bundle configuration that other runtimes make containers from (OCI runtime specification). Pure.
//!
//! The container's root, with every volume and device in it, is built by the shim as for the native runtime. What is left
//! to the other runtime is what only it can do: processes, their confinement, and `/proc`.

use serde_json::{Value, json};
use shim_protocol::{Launch, ResourceLimit};

const VERSION: &str = "1.0.2";

/// The configuration for a container that the native runtime would start by this request.
pub fn of_launch(launch: &Launch, root: &str) -> Value {
    let process = &launch.process;
    let environment: Vec<String> = process
        .environment
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    let capabilities = capability_names(process.capabilities);
    let mapping = json!([{
        "containerID": 0,
        "hostID": launch.identities.base,
        "size": launch.identities.count,
    }]);
    json!({
        "ociVersion": VERSION,
        "process": {
            "terminal": process.terminal,
            "user": {"uid": process.user.uid, "gid": process.user.gid, "additionalGids": process.user.groups},
            "args": process.arguments,
            "env": environment,
            "cwd": process.working_directory,
            "capabilities": {
                "bounding": capabilities,
                "effective": capabilities,
                "permitted": capabilities,
                "inheritable": [],
                "ambient": capabilities,
            },
            "rlimits": process.limits.iter().filter_map(limit).collect::<Vec<_>>(),
            "noNewPrivileges": true,
            "oomScoreAdj": launch.out_of_memory_score,
        },
        "root": {"path": root, "readonly": launch.root.read_only},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]}],
        "linux": {
            // Network, IPC and host name are the pod's: the runtime is started in them.
            "namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "user"}, {"type": "cgroup"}],
            "uidMappings": mapping,
            "gidMappings": mapping,
            "maskedPaths": launch.masked_paths,
            "readonlyPaths": launch.read_only_paths,
        },
    })
}

/// A container that runs one program of its root, for a trial.
pub fn probe(program: &str, argument: &str) -> Value {
    json!({
        "ociVersion": VERSION,
        "process": {"user": {"uid": 0, "gid": 0}, "args": [program, argument], "env": ["PATH=/"], "cwd": "/", "noNewPrivileges": true},
        "root": {"path": "rootfs", "readonly": true},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}]},
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
    crate::container_spec::ALLOWED_CAPABILITIES
        .iter()
        .filter(|(_, number)| set & (1_u64 << number) != 0)
        .map(|(name, _)| format!("CAP_{name}"))
        .collect()
}

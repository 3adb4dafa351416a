//! Gives an unprivileged user's program root privileges over its own namespaces, and over nothing else.
//!
//! The program gets new user, mount and network namespaces. They map only the user's own UID and GID, as
//! root. Open descriptors, including listening sockets, stay unchanged.

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use rustix::mount::MountPropagationFlags;
use rustix::thread::UnshareFlags;

use crate::failure::{During, Failure};
use crate::syscalls;

/// Executes the program named by `arguments`.
pub fn run(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let Some(program) = arguments.next() else {
        eprintln!("usage: agent-sandbox-shim rootless PROGRAM [ARGUMENT]…");
        return ExitCode::from(2);
    };
    let failure = match enter() {
        Ok(()) => Failure::new(
            "starting again in a user namespace",
            Command::new(program).args(arguments).exec(),
        ),
        Err(failure) => failure,
    };
    eprintln!(
        "error: without root, sandboxes need user namespaces: {failure}; run as root instead"
    );
    ExitCode::FAILURE
}

fn enter() -> Result<(), Failure> {
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    let flags = UnshareFlags::NEWUSER | UnshareFlags::NEWNS | UnshareFlags::NEWNET;
    syscalls::unshare(flags).during("making user, mount and network namespaces")?;
    let maps = [
        // Without this, a process could drop a group and so gain access to files that deny it to that group.
        ("/proc/self/setgroups", "deny".to_owned()),
        ("/proc/self/uid_map", format!("0 {} 1", user.as_raw())),
        ("/proc/self/gid_map", format!("0 {} 1", group.as_raw())),
    ];
    for (path, value) in maps {
        fs::write(path, value).during(path)?;
    }
    rustix::mount::mount_change(
        "/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )
    .during("making mounts private")?;
    syscalls::bring_loopback_up().during("bringing the loopback interface up")
}

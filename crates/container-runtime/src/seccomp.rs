//! The seccomp filter of containers: an allow-list of system calls, compiled to BPF programs.
//!
//! Three programs are installed, and the kernel applies the strictest result. The first allows the listed calls and returns `ENOSYS`
//! for all others, so that programs which probe for a newer call fall back. The second returns `EPERM` for known, forbidden calls, as
//! other runtimes do; of two errors, that of the program installed later counts. The third, installed last, returns success for calls
//! that are skipped. The profile for other runtimes (OCI) is made from the same lists.

use std::collections::BTreeMap;

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use serde_json::{Value, json};

#[derive(Debug, thiserror::Error)]
pub enum SeccompError {
    #[error("the seccomp filter does not support this CPU architecture")]
    UnknownArchitecture,
    #[error("compiling the seccomp filter")]
    Compile(#[source] seccompiler::BackendError),
}

/// Programs in the order in which they are installed, as the kernel's array of instructions in native byte order.
pub fn default_profile() -> Result<Vec<Vec<u8>>, SeccompError> {
    let architecture = TargetArch::try_from(std::env::consts::ARCH)
        .map_err(|_| SeccompError::UnknownArchitecture)?;
    let compile = |rules, otherwise, matched| -> Result<Vec<u8>, SeccompError> {
        let filter = SeccompFilter::new(rules, otherwise, matched, architecture)
            .map_err(SeccompError::Compile)?;
        let program: BpfProgram = filter.try_into().map_err(SeccompError::Compile)?;
        Ok(program
            .iter()
            .flat_map(|instruction| {
                let mut bytes = [0; 8];
                bytes[..2].copy_from_slice(&instruction.code.to_ne_bytes());
                bytes[2] = instruction.jt;
                bytes[3] = instruction.jf;
                bytes[4..].copy_from_slice(&instruction.k.to_ne_bytes());
                bytes
            })
            .collect())
    };
    Ok(vec![
        compile(allowed(), errno(libc::ENOSYS), SeccompAction::Allow)?,
        compile(forbidden()?, SeccompAction::Allow, errno(libc::EPERM))?,
        compile(of(SKIPPED), SeccompAction::Allow, errno(0))?,
    ])
}

/// The same profile in the form of an OCI bundle. There a call is either allowed or refused under conditions, so the conditions are
/// inverted.
pub fn oci_profile() -> Value {
    let exceptional = [
        "clone",
        "socket",
        "ioctl",
        "personality",
        "prctl",
        "sched_setscheduler",
    ];
    let names = |calls: &[Call]| -> Vec<&'static str> {
        let names = calls
            .iter()
            .map(|(_, name)| name.trim_start_matches("SYS_"));
        names.filter(|name| !exceptional.contains(name)).collect()
    };
    let skipped = names(SKIPPED);
    let mut allowed = names(ALLOWED);
    allowed.retain(|name| !skipped.contains(name));
    allowed.extend(names(ALLOWED_BY_ARCHITECTURE));
    let allow = |name: &str, operator: &str, argument: u8, value: i64| {
        json!({"names": [name], "action": "SCMP_ACT_ALLOW",
            "args": [{"index": argument, "value": value, "op": operator}]})
    };
    let namespaces = NAMESPACE_FLAGS.iter().fold(0, |all, flag| all | flag);
    let mut calls = vec![
        json!({"names": allowed, "action": "SCMP_ACT_ALLOW"}),
        json!({"names": names(FORBIDDEN), "action": "SCMP_ACT_ERRNO", "errnoRet": libc::EPERM}),
        json!({"names": skipped, "action": "SCMP_ACT_ERRNO", "errnoRet": 0}),
        json!({"names": ["clone"], "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": namespaces, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]}),
        json!({"names": ["sched_setscheduler"], "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 1, "value": libc::SCHED_RESET_ON_FORK, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]}),
        allow("prctl", "SCMP_CMP_NE", 0, PR_SCHED_CORE),
        // The format has one condition per argument. The other request, TIOCLINUX, is for virtual consoles, which no container has.
        allow(
            "ioctl",
            "SCMP_CMP_NE",
            1,
            i64::try_from(libc::TIOCSTI).unwrap_or_default(),
        ),
    ];
    calls.extend(SOCKET_FAMILIES.map(|family| allow("socket", "SCMP_CMP_EQ", 0, family.into())));
    calls.extend(PERSONALITIES.map(|value| allow("personality", "SCMP_CMP_EQ", 0, value)));
    json!({"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": libc::ENOSYS, "syscalls": calls})
}

fn errno(number: i32) -> SeccompAction {
    SeccompAction::Errno(number.unsigned_abs())
}

/// A system call by number and name.
type Call = (c_long, &'static str);

macro_rules! calls {
    ($($name:ident),* $(,)?) => { &[$((libc::$name, stringify!($name))),*] };
}

type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

/// Flags of `clone` and `unshare` that make namespaces.
const NAMESPACE_FLAGS: [i32; 8] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
    0x80, // CLONE_NEWTIME
];

const SOCKET_FAMILIES: [i32; 4] = [
    libc::AF_UNIX,
    libc::AF_INET,
    libc::AF_INET6,
    libc::AF_NETLINK,
];

/// Core scheduling: reserves a CPU core for a process, so that no other process runs on its sibling threads.
const PR_SCHED_CORE: i64 = 62;

/// The allowed arguments of `personality`: the plain Linux personality, and the query of the current one.
const PERSONALITIES: [i64; 2] = [0, 0xffff_ffff];

fn condition(
    argument: u8,
    operator: SeccompCmpOp,
    value: i64,
) -> Result<SeccompCondition, SeccompError> {
    SeccompCondition::new(
        argument,
        SeccompCmpArgLen::Dword,
        operator,
        value.unsigned_abs(),
    )
    .map_err(SeccompError::Compile)
}

fn rule(conditions: Vec<SeccompCondition>) -> Result<SeccompRule, SeccompError> {
    SeccompRule::new(conditions).map_err(SeccompError::Compile)
}

/// Rules without conditions.
fn of(calls: &[Call]) -> Rules {
    calls.iter().map(|(call, _)| (*call, Vec::new())).collect()
}

/// Calls that succeed without effect. `sync` writes back the dirty pages of all file systems of the machine, including those of other
/// tenants and of the API's store, and cannot fail. `syncfs` does the same for one file system; it can fail, so it returns `ENOSYS`.
/// `fsync`, `fdatasync` and `O_SYNC` work as usual (ADR 52).
const SKIPPED: &[Call] = calls![SYS_sync];

fn allowed() -> Rules {
    let calls = ALLOWED.iter().chain(ALLOWED_BY_ARCHITECTURE);
    calls.map(|(call, _)| (*call, Vec::new())).collect()
}

fn forbidden() -> Result<Rules, SeccompError> {
    let mut rules: Rules = FORBIDDEN
        .iter()
        .map(|(call, _)| (*call, Vec::new()))
        .collect();
    let mut clone = Vec::new();
    for flag in NAMESPACE_FLAGS {
        let flag = i64::from(flag);
        clone.push(rule(vec![condition(
            0,
            SeccompCmpOp::MaskedEq(flag.unsigned_abs()),
            flag,
        )?])?);
    }
    rules.insert(libc::SYS_clone, clone);
    let foreign = SOCKET_FAMILIES
        .iter()
        .map(|family| condition(0, SeccompCmpOp::Ne, i64::from(*family)))
        .collect::<Result<Vec<_>, _>>()?;
    rules.insert(libc::SYS_socket, vec![rule(foreign)?]);
    // TIOCSTI injects input into the process's own terminal: an escape if the terminal is shared with a shell outside.
    let mut ioctl = Vec::new();
    for request in [libc::TIOCSTI, libc::TIOCLINUX] {
        ioctl.push(rule(vec![condition(
            1,
            SeccompCmpOp::Eq,
            i64::try_from(request).unwrap_or_default(),
        )?])?);
    }
    rules.insert(libc::SYS_ioctl, ioctl);
    let personality = PERSONALITIES
        .into_iter()
        .map(|value| condition(0, SeccompCmpOp::Ne, value))
        .collect::<Result<Vec<_>, _>>()?;
    rules.insert(libc::SYS_personality, vec![rule(personality)?]);
    // SCHED_RESET_ON_FORK would give children the kernel's default time slice, thirty times that of a container.
    let reset_on_fork = i64::from(libc::SCHED_RESET_ON_FORK);
    let reset_on_fork = condition(
        1,
        SeccompCmpOp::MaskedEq(reset_on_fork.unsigned_abs()),
        reset_on_fork,
    )?;
    rules.insert(
        libc::SYS_sched_setscheduler,
        vec![rule(vec![reset_on_fork])?],
    );
    let core = condition(0, SeccompCmpOp::Eq, PR_SCHED_CORE)?;
    rules.insert(libc::SYS_prctl, vec![rule(vec![core])?]);
    Ok(rules)
}

/// Calls that change the machine, bypass the container's namespaces, or have often been used for container escapes.
const FORBIDDEN: &[Call] = calls![
    SYS_acct,
    SYS_add_key,
    SYS_adjtimex,
    SYS_bpf,
    SYS_clock_adjtime,
    SYS_clock_settime,
    SYS_delete_module,
    SYS_fanotify_init,
    SYS_finit_module,
    SYS_fsconfig,
    SYS_fsmount,
    SYS_fsopen,
    SYS_fspick,
    SYS_init_module,
    SYS_io_uring_enter,
    SYS_io_uring_register,
    SYS_io_uring_setup,
    SYS_kcmp,
    SYS_kexec_file_load,
    SYS_kexec_load,
    SYS_keyctl,
    SYS_lookup_dcookie,
    SYS_mbind,
    SYS_migrate_pages,
    SYS_mount,
    SYS_mount_setattr,
    SYS_move_mount,
    SYS_move_pages,
    SYS_name_to_handle_at,
    SYS_nfsservctl,
    SYS_open_by_handle_at,
    SYS_open_tree,
    SYS_perf_event_open,
    SYS_pivot_root,
    SYS_quotactl,
    SYS_reboot,
    SYS_request_key,
    SYS_sched_setattr,
    SYS_set_mempolicy,
    SYS_setdomainname,
    SYS_sethostname,
    SYS_setns,
    SYS_settimeofday,
    SYS_swapoff,
    SYS_swapon,
    SYS_syslog,
    SYS_umount2,
    SYS_unshare,
    SYS_userfaultfd,
    SYS_vhangup,
];

#[cfg(target_arch = "x86_64")]
const ALLOWED_BY_ARCHITECTURE: &[Call] = calls![
    SYS_access,
    SYS_alarm,
    SYS_arch_prctl,
    SYS_chmod,
    SYS_chown,
    SYS_creat,
    SYS_dup2,
    SYS_epoll_create,
    SYS_epoll_ctl_old,
    SYS_epoll_wait,
    SYS_epoll_wait_old,
    SYS_eventfd,
    SYS_fork,
    SYS_futimesat,
    SYS_getdents,
    SYS_getpgrp,
    SYS_inotify_init,
    SYS_lchown,
    SYS_link,
    SYS_lstat,
    SYS_mkdir,
    SYS_mknod,
    SYS_open,
    SYS_pause,
    SYS_pipe,
    SYS_poll,
    SYS_readlink,
    SYS_rename,
    SYS_rmdir,
    SYS_select,
    SYS_signalfd,
    SYS_stat,
    SYS_symlink,
    SYS_time,
    SYS_unlink,
    SYS_ustat,
    SYS_utime,
    SYS_utimes,
    SYS_vfork,
];

#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_BY_ARCHITECTURE: &[Call] = &[];

const ALLOWED: &[Call] = calls![
    SYS_accept,
    SYS_accept4,
    SYS_bind,
    SYS_brk,
    SYS_capget,
    SYS_capset,
    SYS_chdir,
    SYS_chroot,
    SYS_clock_getres,
    SYS_clock_gettime,
    SYS_clock_nanosleep,
    SYS_clone,
    SYS_close,
    SYS_close_range,
    SYS_connect,
    SYS_copy_file_range,
    SYS_dup,
    SYS_dup3,
    SYS_epoll_create1,
    SYS_epoll_ctl,
    SYS_epoll_pwait,
    SYS_epoll_pwait2,
    SYS_eventfd2,
    SYS_execve,
    SYS_execveat,
    SYS_exit,
    SYS_exit_group,
    SYS_faccessat,
    SYS_faccessat2,
    SYS_fadvise64,
    SYS_fallocate,
    SYS_fchdir,
    SYS_fchmod,
    SYS_fchmodat,
    SYS_fchmodat2,
    SYS_fchown,
    SYS_fchownat,
    SYS_fcntl,
    SYS_fdatasync,
    SYS_fgetxattr,
    SYS_flistxattr,
    SYS_flock,
    SYS_fremovexattr,
    SYS_fsetxattr,
    SYS_fstat,
    SYS_fstatfs,
    SYS_fsync,
    SYS_ftruncate,
    SYS_futex,
    SYS_futex_waitv,
    SYS_get_mempolicy,
    SYS_get_robust_list,
    SYS_getcpu,
    SYS_getcwd,
    SYS_getdents64,
    SYS_getegid,
    SYS_geteuid,
    SYS_getgid,
    SYS_getgroups,
    SYS_getitimer,
    SYS_getpeername,
    SYS_getpgid,
    SYS_getpid,
    SYS_getppid,
    SYS_getpriority,
    SYS_getrandom,
    SYS_getresgid,
    SYS_getresuid,
    SYS_getrlimit,
    SYS_getrusage,
    SYS_getsid,
    SYS_getsockname,
    SYS_getsockopt,
    SYS_gettid,
    SYS_gettimeofday,
    SYS_getuid,
    SYS_getxattr,
    SYS_inotify_add_watch,
    SYS_inotify_init1,
    SYS_inotify_rm_watch,
    SYS_ioctl,
    SYS_ioprio_get,
    SYS_ioprio_set,
    SYS_kill,
    SYS_landlock_add_rule,
    SYS_landlock_create_ruleset,
    SYS_landlock_restrict_self,
    SYS_lgetxattr,
    SYS_linkat,
    SYS_listen,
    SYS_listxattr,
    SYS_llistxattr,
    SYS_lremovexattr,
    SYS_lseek,
    SYS_lsetxattr,
    SYS_madvise,
    SYS_membarrier,
    SYS_memfd_create,
    SYS_memfd_secret,
    SYS_mincore,
    SYS_mkdirat,
    SYS_mknodat,
    SYS_mlock,
    SYS_mlock2,
    SYS_mlockall,
    SYS_mmap,
    SYS_mprotect,
    SYS_mq_getsetattr,
    SYS_mq_notify,
    SYS_mq_open,
    SYS_mq_timedreceive,
    SYS_mq_timedsend,
    SYS_mq_unlink,
    SYS_mremap,
    SYS_mseal,
    SYS_msgctl,
    SYS_msgget,
    SYS_msgrcv,
    SYS_msgsnd,
    SYS_msync,
    SYS_munlock,
    SYS_munlockall,
    SYS_munmap,
    SYS_nanosleep,
    SYS_newfstatat,
    SYS_openat,
    SYS_openat2,
    SYS_personality,
    SYS_pidfd_getfd,
    SYS_pidfd_open,
    SYS_pidfd_send_signal,
    SYS_pipe2,
    SYS_pkey_alloc,
    SYS_pkey_free,
    SYS_pkey_mprotect,
    SYS_ppoll,
    SYS_prctl,
    SYS_pread64,
    SYS_preadv,
    SYS_preadv2,
    SYS_prlimit64,
    SYS_process_madvise,
    SYS_process_mrelease,
    SYS_process_vm_readv,
    SYS_process_vm_writev,
    SYS_pselect6,
    SYS_ptrace,
    SYS_pwrite64,
    SYS_pwritev,
    SYS_pwritev2,
    SYS_read,
    SYS_readahead,
    SYS_readlinkat,
    SYS_readv,
    SYS_recvfrom,
    SYS_recvmmsg,
    SYS_recvmsg,
    SYS_remap_file_pages,
    SYS_removexattr,
    SYS_renameat,
    SYS_renameat2,
    SYS_restart_syscall,
    SYS_rseq,
    SYS_rt_sigaction,
    SYS_rt_sigpending,
    SYS_rt_sigprocmask,
    SYS_rt_sigqueueinfo,
    SYS_rt_sigreturn,
    SYS_rt_sigsuspend,
    SYS_rt_sigtimedwait,
    SYS_rt_tgsigqueueinfo,
    SYS_sched_get_priority_max,
    SYS_sched_get_priority_min,
    SYS_sched_getaffinity,
    SYS_sched_getattr,
    SYS_sched_getparam,
    SYS_sched_getscheduler,
    SYS_sched_rr_get_interval,
    SYS_sched_setaffinity,
    SYS_sched_setparam,
    SYS_sched_setscheduler,
    SYS_sched_yield,
    SYS_seccomp,
    SYS_semctl,
    SYS_semget,
    SYS_semop,
    SYS_semtimedop,
    SYS_sendfile,
    SYS_sendmmsg,
    SYS_sendmsg,
    SYS_sendto,
    SYS_set_robust_list,
    SYS_set_tid_address,
    SYS_setfsgid,
    SYS_setfsuid,
    SYS_setgid,
    SYS_setgroups,
    SYS_setitimer,
    SYS_setpgid,
    SYS_setpriority,
    SYS_setregid,
    SYS_setresgid,
    SYS_setresuid,
    SYS_setreuid,
    SYS_setrlimit,
    SYS_setsid,
    SYS_setsockopt,
    SYS_setuid,
    SYS_setxattr,
    SYS_shmat,
    SYS_shmctl,
    SYS_shmdt,
    SYS_shmget,
    SYS_shutdown,
    SYS_sigaltstack,
    SYS_signalfd4,
    SYS_socket,
    SYS_socketpair,
    SYS_splice,
    SYS_statfs,
    SYS_statx,
    SYS_symlinkat,
    SYS_sync,
    SYS_sync_file_range,
    SYS_sysinfo,
    SYS_tee,
    SYS_tgkill,
    SYS_timer_create,
    SYS_timer_delete,
    SYS_timer_getoverrun,
    SYS_timer_gettime,
    SYS_timer_settime,
    SYS_timerfd_create,
    SYS_timerfd_gettime,
    SYS_timerfd_settime,
    SYS_times,
    SYS_tkill,
    SYS_truncate,
    SYS_umask,
    SYS_uname,
    SYS_unlinkat,
    SYS_utimensat,
    SYS_vmsplice,
    SYS_wait4,
    SYS_waitid,
    SYS_write,
    SYS_writev,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_call_is_both_allowed_and_forbidden() {
        let allowed = allowed();
        for (call, name) in FORBIDDEN {
            assert!(
                !allowed.contains_key(call),
                "system call {name} is in both lists"
            );
        }
    }

    #[test]
    fn the_bundle_profile_names_every_call_once_and_none_without_its_condition() {
        let profile = oci_profile();
        let mut unconditional = Vec::new();
        let mut conditional = std::collections::BTreeSet::new();
        for entry in profile["syscalls"].as_array().unwrap() {
            let names = entry["names"].as_array().unwrap();
            let names = names.iter().map(|name| name.as_str().unwrap().to_owned());
            if entry.get("args").is_some() {
                conditional.extend(names);
            } else {
                unconditional.extend(names);
            }
        }
        let distinct: std::collections::BTreeSet<_> = unconditional.iter().cloned().collect();
        assert_eq!(distinct.len(), unconditional.len());
        assert!(distinct.is_disjoint(&conditional));
        let conditional: Vec<_> = conditional.iter().map(String::as_str).collect();
        assert_eq!(
            conditional,
            [
                "clone",
                "ioctl",
                "personality",
                "prctl",
                "sched_setscheduler",
                "socket"
            ]
        );
        for call in ["read", "execve", "mount", "unshare"] {
            assert!(distinct.contains(call), "{call}");
        }
        assert_eq!(profile["defaultErrnoRet"], libc::ENOSYS);
    }

    #[test]
    fn aio_contexts_of_the_machine_cannot_be_exhausted() {
        let profile = oci_profile().to_string();
        for (call, name) in calls![SYS_io_setup, SYS_io_submit] {
            assert!(!allowed().contains_key(call), "{name}");
            let name = format!("\"{}\"", name.trim_start_matches("SYS_"));
            assert!(!profile.contains(&name), "{name} in the bundle's profile");
        }
    }

    #[test]
    fn the_profile_compiles_to_programs_the_kernel_accepts_in_size() {
        let programs = default_profile().unwrap();
        assert_eq!(programs.len(), 3);
        for program in programs {
            assert_eq!(program.len() % 8, 0);
            assert!(program.len() / 8 < 4096, "longer than the kernel's limit");
        }
    }

    /// The result of a BPF program for a call without arguments.
    fn answer(program: &[u8], call: c_long) -> u32 {
        let word = |at: u32| match at {
            0 => u32::try_from(call).unwrap(),
            4 => match std::env::consts::ARCH {
                "x86_64" => 0xc000_003e,
                "aarch64" => 0xc000_00b7,
                other => panic!("no audit number of {other} here"),
            },
            _ => 0,
        };
        let (mut at, mut accumulator) = (0, 0);
        loop {
            let code = u16::from_ne_bytes(program[at * 8..at * 8 + 2].try_into().unwrap());
            let (yes, no) = (program[at * 8 + 2], program[at * 8 + 3]);
            let value = u32::from_ne_bytes(program[at * 8 + 4..at * 8 + 8].try_into().unwrap());
            let jump = |met: bool| usize::from(if met { yes } else { no });
            at += 1;
            match code {
                0x20 => accumulator = word(value),
                0x54 => accumulator &= value,
                0x05 => at += value as usize,
                0x15 => at += jump(accumulator == value),
                0x25 => at += jump(accumulator > value),
                0x35 => at += jump(accumulator >= value),
                0x45 => at += jump(accumulator & value != 0),
                0x06 => return value,
                other => panic!("instruction {other:#x} is not known here"),
            }
        }
    }

    /// The result of all programs: an error precedes a permission, and of several errors that of the program installed last counts.
    fn verdict(call: c_long) -> Option<u32> {
        const REFUSED: u32 = 0x0005_0000;
        let programs = default_profile().unwrap();
        let answers = programs.iter().rev().map(|program| answer(program, call));
        let mut refusals = answers.filter(|answer| answer & 0xffff_0000 == REFUSED);
        refusals.next().map(|answer| answer & 0xffff)
    }

    #[test]
    fn sync_does_not_write_back_files_of_other_tenants() {
        let refused = |number: i32| Some(number.unsigned_abs());
        for (call, expected) in [
            (libc::SYS_sync, Some(0)),
            (libc::SYS_syncfs, refused(libc::ENOSYS)),
            (libc::SYS_fsync, None),
            (libc::SYS_fdatasync, None),
            (libc::SYS_sync_file_range, None),
            (libc::SYS_mount, refused(libc::EPERM)),
            (libc::SYS_read, None),
        ] {
            assert_eq!(verdict(call), expected, "system call {call}");
        }
    }
}

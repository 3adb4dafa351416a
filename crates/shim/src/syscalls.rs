//! System calls that no safe crate wraps. Every `unsafe` block of the launch path is here or in `agent::spawn`.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::process::Pid;
use rustix::thread::UnshareFlags;

/// Which side of a clone or fork the caller is on.
#[derive(Debug)]
pub enum Side {
    Parent(Pid),
    Child,
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Asks the kernel to page a range of another process's memory out.
pub fn page_out(process: &OwnedFd, start: usize, length: usize) -> io::Result<()> {
    let range = libc::iovec {
        iov_base: std::ptr::without_provenance_mut(start),
        iov_len: length,
    };
    // SAFETY: the kernel reads one `iovec`, which lives until the call returns. It advises on memory of another process: no memory of
    // this one is touched.
    check(unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            process.as_raw_fd(),
            &raw const range,
            1_usize,
            libc::MADV_PAGEOUT,
            0_u32,
        )
    })
    .map(drop)
}

/// Clones this process with new namespaces, as a child of this process's own parent.
pub fn clone_sibling(namespaces: u64) -> io::Result<Side> {
    let parent = u64::try_from(libc::CLONE_PARENT).expect("a positive flag");
    clone_with(namespaces | parent, 0)
}

/// Clones this process with new namespaces, as its child.
pub fn clone_child(namespaces: u64) -> io::Result<Side> {
    clone_with(
        namespaces,
        u64::try_from(libc::SIGCHLD).expect("a positive number"),
    )
}

/// As `clone_child`, with namespaces that belong to another user than root. Resources in a user namespace
/// (inotify instances, pending signals, message queues, locked memory) also count against its owner, whose limits are those of
/// one user of the machine.
pub fn clone_child_for(owner: u32, namespaces: u64) -> io::Result<Side> {
    set_effective_user(owner)?;
    // The capabilities dropped with the user are still permitted; some machines forbid other users to create user namespaces.
    let side = raise_permitted_capabilities().and_then(|()| clone_child(namespaces));
    if !matches!(side, Ok(Side::Child)) {
        set_effective_user(0)?;
    }
    side
}

fn set_effective_user(uid: u32) -> io::Result<()> {
    const AS_IT_IS: libc::c_long = -1;
    // SAFETY: no pointer is passed; raw system calls act on this, the only thread.
    check(unsafe { libc::syscall(libc::SYS_setresuid, AS_IT_IS, uid, AS_IT_IS) }).map(drop)
}

fn raise_permitted_capabilities() -> io::Result<()> {
    let permitted = rustix::thread::capabilities(None)?.permitted;
    let sets = rustix::thread::CapabilitySets {
        effective: permitted,
        permitted,
        inheritable: rustix::thread::CapabilitySet::empty(),
    };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

fn clone_with(flags: u64, exit_signal: u64) -> io::Result<Side> {
    // SAFETY: an all-zero `clone_args` is valid: every pointer in it is optional.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = flags;
    arguments.exit_signal = exit_signal;
    // SAFETY: without CLONE_VM the child gets a copy of this single-threaded process and keeps its stack, as with fork.
    let result = check(unsafe {
        libc::syscall(
            libc::SYS_clone3,
            &raw const arguments,
            std::mem::size_of::<libc::clone_args>(),
        )
    })?;
    match i32::try_from(result).ok().and_then(Pid::from_raw) {
        Some(pid) => Ok(Side::Parent(pid)),
        None => Ok(Side::Child),
    }
}

/// Sets the scheduler's time slice for this process and its descendants. Kernels before 6.12 ignore it.
pub fn set_time_slice(slice: std::time::Duration) -> io::Result<()> {
    const THIS_PROCESS: libc::pid_t = 0;
    const NO_FLAGS: libc::c_uint = 0;
    let size = u32::try_from(std::mem::size_of::<libc::sched_attr>()).expect("a small structure");
    // SAFETY: an all-zero `sched_attr` is a valid value of that plain C structure.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most `size` bytes into the structure.
    check(unsafe {
        libc::syscall(
            libc::SYS_sched_getattr,
            THIS_PROCESS,
            &raw mut attributes,
            size,
            NO_FLAGS,
        )
    })?;
    attributes.sched_runtime = u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX);
    // SAFETY: the structure says its own size and outlives the call, which only reads it.
    check(unsafe {
        libc::syscall(
            libc::SYS_sched_setattr,
            THIS_PROCESS,
            &raw const attributes,
            NO_FLAGS,
        )
    })
    .map(drop)
}

/// Moves this process into new namespaces.
pub fn unshare(flags: UnshareFlags) -> io::Result<()> {
    // SAFETY: none of the shim's callers passes a flag that unshares the descriptor table.
    unsafe { rustix::thread::unshare_unsafe(flags) }.map_err(io::Error::from)
}

/// Forks this single-threaded process.
pub fn fork() -> io::Result<Side> {
    // SAFETY: the shim never has a second thread, so the child may run any code.
    let pid = check(libc::c_long::from(unsafe { libc::fork() }))?;
    match i32::try_from(pid).ok().and_then(Pid::from_raw) {
        Some(pid) => Ok(Side::Parent(pid)),
        None => Ok(Side::Child),
    }
}

/// Changes attributes of a mount, optionally with an ID mapping from a user namespace.
pub fn mount_set_attributes(
    mount: BorrowedFd<'_>,
    recursive: bool,
    set: u64,
    user_namespace: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    // SAFETY: an all-zero `mount_attr` is valid.
    let mut attributes: libc::mount_attr = unsafe { std::mem::zeroed() };
    attributes.attr_set = set;
    if let Some(namespace) = user_namespace {
        attributes.attr_set |= libc::MOUNT_ATTR_IDMAP;
        attributes.userns_fd =
            u64::try_from(namespace.as_raw_fd()).expect("descriptors are positive");
    }
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is a NUL-terminated literal, and the struct outlives the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attributes,
            std::mem::size_of::<libc::mount_attr>(),
        )
    })
    .map(drop)
}

/// Makes `.` the root and stacks the old one on it.
pub fn pivot_root_here() -> io::Result<()> {
    // SAFETY: both paths are NUL-terminated literals.
    check(unsafe { libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) }).map(drop)
}

/// Leaves the inherited session keyring for a fresh, empty one.
pub fn join_new_session_keyring() -> io::Result<()> {
    const JOIN_SESSION_KEYRING: libc::c_long = 1;
    // SAFETY: a null name asks for an anonymous keyring; no other argument is read.
    check(unsafe {
        libc::syscall(
            libc::SYS_keyctl,
            JOIN_SESSION_KEYRING,
            std::ptr::null::<libc::c_char>(),
        )
    })
    .map(drop)
}

/// Installs one compiled seccomp program on this thread, permanently.
pub fn install_seccomp(program: &[libc::sock_filter]) -> io::Result<()> {
    let description = libc::sock_fprog {
        len: u16::try_from(program.len())
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?,
        filter: program.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel copies the program during the call and does not write to it.
    check(unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            0,
            &raw const description,
        )
    })
    .map(drop)
}

/// Parses a seccomp program in the node's file format: the kernel's array, in native byte order.
pub fn parse_seccomp(bytes: &[u8]) -> Option<Vec<libc::sock_filter>> {
    let (instructions, rest) = bytes.as_chunks::<8>();
    rest.is_empty().then(|| {
        instructions
            .iter()
            .map(|&[a, b, jt, jf, k0, k1, k2, k3]| libc::sock_filter {
                code: u16::from_ne_bytes([a, b]),
                jt,
                jf,
                k: u32::from_ne_bytes([k0, k1, k2, k3]),
            })
            .collect()
    })
}

/// Sets the real, effective and saved UID and GID of this process, and its supplementary groups.
pub fn become_user(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    // SAFETY: the slice outlives the call; raw system calls act on this, the only thread.
    let set = check(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) });
    match set {
        // If the node runs without root, groups cannot be changed, and none are requested.
        Err(error) if groups.is_empty() && error.raw_os_error() == Some(libc::EPERM) => {}
        other => drop(other?),
    }
    // SAFETY: no pointer is passed.
    check(unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) })?;
    // SAFETY: no pointer is passed.
    check(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) }).map(drop)
}

/// Brings `lo` up in this process's network namespace.
pub fn bring_loopback_up() -> io::Result<()> {
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        None,
    )?;
    // SAFETY: an all-zero `ifreq` is a valid value of that plain C structure.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (place, byte) in request.ifr_name.iter_mut().zip(b"lo") {
        *place = libc::c_char::try_from(*byte).unwrap_or_default();
    }
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(libc::IFF_UP).unwrap_or_default();
    // SAFETY: the descriptor is open and the structure outlives the call, which only reads it.
    let result = unsafe {
        libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCSIFFLAGS as _,
            &raw const request,
        )
    };
    check(result.into()).map(drop)
}

/// Drops every capability that is not in `keep` from the bounding set.
pub fn bound_capabilities(keep: u64) -> io::Result<()> {
    for capability in 0..64 {
        if keep & (1 << capability) != 0 {
            continue;
        }
        // SAFETY: prctl with an integer argument.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } < 0 {
            let error = io::Error::last_os_error();
            // The first number past the kernel's last capability ends the list.
            return if error.raw_os_error() == Some(libc::EINVAL) {
                Ok(())
            } else {
                Err(error)
            };
        }
    }
    Ok(())
}

/// Makes `keep` the effective and permitted sets, and clears the inheritable and ambient ones: a program that another user executes
/// must not get capabilities that its file does not grant.
pub fn set_capabilities(keep: u64) -> io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    #[repr(C)]
    struct Sets {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    const VERSION_3: u32 = 0x2008_0522;
    let half =
        |shift: u32| u32::try_from((keep >> shift) & 0xffff_ffff).expect("masked to 32 bits");
    let header = Header {
        version: VERSION_3,
        pid: 0,
    };
    let sets = [0, 32].map(|shift| Sets {
        effective: half(shift),
        permitted: half(shift),
        inheritable: 0,
    });
    // SAFETY: version 3 reads one header and two sets, which is what is passed.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw const header, sets.as_ptr()) })?;
    // SAFETY: prctl with integer arguments.
    check(libc::c_long::from(unsafe {
        libc::prctl(
            libc::PR_CAP_AMBIENT,
            libc::PR_CAP_AMBIENT_CLEAR_ALL,
            0,
            0,
            0,
        )
    }))
    .map(drop)
}

/// Forbids this process and its descendants to gain privileges by executing a file (`no_new_privs`).
pub fn forbid_new_privileges() -> io::Result<()> {
    // SAFETY: prctl with integer arguments.
    check(libc::c_long::from(unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    }))
    .map(drop)
}

/// Makes this process undumpable, which hides its memory and descriptors from its own user.
pub fn forbid_inspection() -> io::Result<()> {
    // SAFETY: prctl with integer arguments.
    check(libc::c_long::from(unsafe {
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0)
    }))
    .map(drop)
}

pub fn set_limit(resource: u32, soft: u64, hard: u64) -> io::Result<()> {
    let limit = libc::rlimit {
        rlim_cur: soft,
        rlim_max: hard,
    };
    // SAFETY: the struct outlives the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_prlimit64,
            0,
            resource,
            &raw const limit,
            std::ptr::null_mut::<libc::rlimit>(),
        )
    })
    .map(drop)
}

/// Moves `descriptors` to 3, 4, 5, … in order and closes everything above them; 0 to 2 become `/dev/null`.
pub fn arrange_descriptors(null: OwnedFd, descriptors: Vec<OwnedFd>) -> io::Result<()> {
    const FREE: RawFd = 64;
    let mut raised = Vec::with_capacity(descriptors.len());
    for descriptor in &descriptors {
        // SAFETY: duplicates an open descriptor to a number that is not owned.
        let number = check(libc::c_long::from(unsafe {
            libc::fcntl(descriptor.as_raw_fd(), libc::F_DUPFD, FREE)
        }))?;
        raised.push(RawFd::try_from(number).expect("a descriptor fits"));
    }
    for standard in 0..3 {
        // SAFETY: replaces a standard stream; nothing else in the shim refers to it by ownership.
        check(libc::c_long::from(unsafe {
            libc::dup2(null.as_raw_fd(), standard)
        }))?;
    }
    // The owned numbers are reused or closed by number below.
    std::mem::forget(descriptors);
    std::mem::forget(null);
    let mut next = 3;
    for number in raised {
        // SAFETY: both numbers are open or free; their owners were forgotten above.
        check(libc::c_long::from(unsafe { libc::dup2(number, next) }))?;
        next += 1;
    }
    close_from(next)
}

/// Closes every descriptor from `first` on.
pub fn close_from(first: RawFd) -> io::Result<()> {
    // SAFETY: called only if nothing above `first` is used again.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, 0) }).map(drop)
}

/// Takes ownership of a descriptor that this process inherited.
pub fn inherited(number: RawFd) -> OwnedFd {
    // SAFETY: the agent calls this once per number its launcher arranged, and nothing else owns them.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    let _ = rustix::io::fcntl_setfd(descriptor.as_fd(), rustix::io::FdFlags::CLOEXEC);
    descriptor
}

/// Replaces this process by the program in `file`, under another name. Returns only on failure.
pub fn execute_file(file: BorrowedFd<'_>, name: &CStr) -> io::Error {
    let arguments = [name.as_ptr(), std::ptr::null()];
    let environment = [std::ptr::null::<libc::c_char>()];
    // SAFETY: both arrays are NULL-terminated and their strings NUL-terminated.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            file.as_raw_fd(),
            c"".as_ptr(),
            arguments.as_ptr(),
            environment.as_ptr(),
            libc::AT_EMPTY_PATH,
        );
    }
    io::Error::last_os_error()
}

/// The program, arguments and environment of an `execve`.
#[derive(Debug)]
pub struct ChildImage<'a> {
    pub path: &'a CStr,
    /// NULL-terminated.
    pub arguments: &'a [*const libc::c_char],
    /// NULL-terminated.
    pub environment: &'a [*const libc::c_char],
}

/// Replaces this process by a program. Returns only on failure.
pub fn execute(image: &ChildImage<'_>) -> io::Error {
    // SAFETY: the caller built NULL-terminated arrays of strings that it still borrows.
    unsafe {
        libc::execve(
            image.path.as_ptr(),
            image.arguments.as_ptr(),
            image.environment.as_ptr(),
        )
    };
    io::Error::last_os_error()
}

/// Gives a forked child default signal handling and three standard streams, and closes all other descriptors but `keep`.
pub fn prepare_child(
    streams: [BorrowedFd<'_>; 3],
    keep: BorrowedFd<'_>,
    controlling_terminal: bool,
) -> io::Result<()> {
    // SAFETY: plain calls on this process's own state; `set` is initialised by sigemptyset before use.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut());
        for signal in 1..32 {
            libc::signal(signal, libc::SIG_DFL);
        }
        libc::setsid();
    }
    for (number, stream) in streams.iter().enumerate() {
        let number = RawFd::try_from(number).expect("three streams");
        // SAFETY: the streams are open and above 2; the numbers are this process's own standard streams.
        check(libc::c_long::from(unsafe {
            libc::dup2(stream.as_raw_fd(), number)
        }))?;
    }
    if controlling_terminal {
        // SAFETY: the ioctl takes an integer.
        check(libc::c_long::from(unsafe {
            libc::ioctl(0, libc::TIOCSCTTY, 0)
        }))?;
    }
    // SAFETY: raises `keep` out of the way and closes the rest; nothing but `keep` is used before execve.
    unsafe {
        let first = libc::c_uint::try_from(keep.as_raw_fd()).expect("descriptors are positive");
        if first > 3 {
            check(libc::syscall(libc::SYS_close_range, 3, first - 1, 0))?;
        }
        check(libc::syscall(
            libc::SYS_close_range,
            first + 1,
            libc::c_uint::MAX,
            0,
        ))?;
    }
    Ok(())
}

/// Blocks every signal that the agent handles, and returns a signalfd for them.
pub fn signal_descriptor(signals: &[i32]) -> io::Result<OwnedFd> {
    // SAFETY: `set` is initialised by sigemptyset; the returned descriptor is new and unowned.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for &signal in signals {
            libc::sigaddset(&raw mut set, signal);
        }
        check(libc::c_long::from(libc::sigprocmask(
            libc::SIG_BLOCK,
            &raw const set,
            std::ptr::null_mut(),
        )))?;
        let number = check(libc::c_long::from(libc::signalfd(
            -1,
            &raw const set,
            libc::SFD_CLOEXEC | libc::SFD_NONBLOCK,
        )))?;
        Ok(OwnedFd::from_raw_fd(
            RawFd::try_from(number).expect("a descriptor fits"),
        ))
    }
}

/// Reads the pending signal numbers from a signalfd.
pub fn pending_signals(descriptor: BorrowedFd<'_>) -> Vec<i32> {
    let mut signals = Vec::new();
    let mut record = [0_u8; std::mem::size_of::<libc::signalfd_siginfo>()];
    while let Ok(length) = rustix::io::read(descriptor, &mut record) {
        if length < record.len() {
            break;
        }
        // The signal's number is the record's first field.
        let number = u32::from_ne_bytes([record[0], record[1], record[2], record[3]]);
        signals.extend(i32::try_from(number));
    }
    signals
}

/// Sends a signal to a process, or to a process group if `pid` is negative.
pub fn send_signal(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: no pointer is passed.
    check(libc::c_long::from(unsafe { libc::kill(pid, signal) })).map(drop)
}

//! Escapes and attacks from inside a container of the native runtime. Each attempt must fail with the error of the mechanism that is
//! meant to stop it.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on says so by panicking"
)]

mod support;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::Api;
use kube::api::PostParams;
use serde_json::json;
use support::{Machine, Privilege};
use testkit::eventually;

/// Calls Linux directly and prints the error's name, or "ok".
const PRELUDE: &str = r#"
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *arguments)
    return "ok" if result >= 0 else errno.errorcode.get(ctypes.get_errno(), "?")
def attempt(work):
    try:
        work()
        return "ok"
    except OSError as problem:
        return errno.errorcode.get(problem.errno, "?")
"#;

async fn python(machine: &Machine, pod: &Pod, code: &str) -> String {
    let script = format!("{PRELUDE}\n{code}");
    let (status, out, err) = machine.exec(pod, &["python3", "-c", &script]).await;
    assert_eq!(status, 0, "the attempt itself broke: {err}");
    out.trim().to_owned()
}

async fn confined(machine: &Machine, privilege: Privilege) -> Pod {
    let spec = json!({"containers": [{"name": "c", "image": "host", "command": ["sleep", "1000"],
        "securityContext": privilege.security_context()}]});
    machine.create("p", spec).await;
    machine.ready("p").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_cannot_access_or_change_the_machine() {
    let machine = Machine::start().await;
    for privilege in Privilege::BOTH {
        machine_is_out_of_reach(&machine, privilege).await;
    }
    machine.finish().await;
}

async fn machine_is_out_of_reach(machine: &Machine, privilege: Privilege) {
    let pod = confined(machine, privilege).await;
    let secret = std::env::temp_dir().join(format!("confinement-{}", std::process::id()));
    std::fs::write(&secret, "secret").unwrap();
    let secret_path = secret.display();
    let own_pid = std::process::id();
    let sysrq = if std::path::Path::new("/proc/sysrq-trigger").exists() {
        "EROFS"
    } else {
        "ENOENT"
    };
    let attempts = [
        ("a file of the machine by its path", format!("print(attempt(lambda: open('{secret_path}')))"), "ENOENT"),
        ("the machine's password file", "print('root:x:0:0:root:/root:/bin/bash' in open('/etc/passwd').read() and not os.path.exists('/etc/shadow'))".to_owned(), "True"),
        ("home directories", "print(os.listdir('/root'), os.listdir('/home'), os.listdir('/var/lib'))".to_owned(), "[] [] []"),
        ("the root of PID 1", "print(attempt(lambda: os.listdir('/proc/1/root')))".to_owned(), "EACCES"),
        ("PID 1's descriptors", "print(attempt(lambda: os.readlink('/proc/1/fd/4')))".to_owned(), "EACCES"),
        ("a symlink out", format!("os.symlink('{secret_path}', '/tmp/link'); print(attempt(lambda: open('/tmp/link')))"), "ENOENT"),
        ("open_by_handle_at", "print(call(304, -100, None, 0))".to_owned(), "EPERM"),
        ("name_to_handle_at", "print(call(303, -100, b'/', None, None, 0))".to_owned(), "EPERM"),
        ("mount", "print(call(165, b'none', b'/tmp', b'tmpfs', 0, None))".to_owned(), "EPERM"),
        ("umount", "print(call(166, b'/proc/keys', 0))".to_owned(), "EPERM"),
        ("the new mount calls", "print(call(430, b'tmpfs', 0), call(428, -100, b'/', 1))".to_owned(), "EPERM EPERM"),
        ("pivot_root", "print(call(155, b'/', b'/'))".to_owned(), "EPERM"),
        ("loading a module", "print(call(175, None, 0, b''), call(313, 0, b'', 0))".to_owned(), "EPERM EPERM"),
        ("a new user namespace", "print(call(272, 0x10000000))".to_owned(), "EPERM"),
        ("a clone with a new user namespace", "print(call(56, 0x10000000 | 17, None, None, None, None))".to_owned(), "EPERM"),
        ("clone3, whose flags a filter cannot read", "print(call(435, None, 0))".to_owned(), "ENOSYS"),
        ("entering a namespace", "f = os.open('/proc/self/ns/net', 0); print(call(308, f, 0))".to_owned(), "EPERM"),
        ("the kernel's keyrings", "print(call(248, b'user', b'k', b'v', 1, -3), call(250, 0, -3, 0), call(249, b'user', b'k', None, 0))".to_owned(), "EPERM EPERM EPERM"),
        ("bpf", "print(call(321, 0, None, 0))".to_owned(), "EPERM"),
        ("perf_event_open", "print(call(298, None, 0, -1, -1, 0))".to_owned(), "EPERM"),
        ("io_uring", "print(call(425, 1, None))".to_owned(), "EPERM"),
        ("userfaultfd", "print(call(323, 0))".to_owned(), "EPERM"),
        ("making a device", "print(attempt(lambda: os.mknod('/tmp/kmsg', 0o20600, os.makedev(1, 11))))".to_owned(), "EPERM"),
        ("the kernel's log", "print(os.path.exists('/dev/kmsg'), call(103, 3, None, 0))".to_owned(), "False EPERM"),
        ("devices of the machine", "print(sorted(set(os.listdir('/dev')) - {'null','zero','full','random','urandom','tty','fd','stdin','stdout','stderr','ptmx','pts','shm','mqueue','termination-log'}))".to_owned(), "[]"),
        ("kernel settings", "print(attempt(lambda: open('/proc/sys/kernel/hostname', 'w')))".to_owned(), "EROFS"),
        ("sysrq", "print(attempt(lambda: open('/proc/sysrq-trigger', 'w')))".to_owned(), sysrq),
        ("kernel memory", "print(os.path.getsize('/proc/kcore') if os.path.exists('/proc/kcore') else 0)".to_owned(), "0"),
        ("cgroup files", "print(os.path.exists('/sys/fs/cgroup'), os.listdir('/sys'))".to_owned(), "False ['devices']"),
        ("writing to /sys", "print(attempt(lambda: open('/sys/x', 'w')), attempt(lambda: open('/sys/devices/system/cpu/online', 'w')))".to_owned(), "EROFS EROFS"),
        ("writing to /usr", "print(attempt(lambda: open('/usr/bin/x', 'w')))".to_owned(), "EROFS"),
        ("signalling a process of the machine", format!("print(attempt(lambda: os.kill({own_pid}, 9)))"), "ESRCH"),
        ("tracing a process of the machine", format!("print(call(101, 16, {own_pid}, None, None))"), "ESRCH"),
        ("tracing the agent", "print(call(101, 16, 1, None, None))".to_owned(), "EPERM"),
        ("the agent's memory", "print(attempt(lambda: open('/proc/1/mem', 'rb')))".to_owned(), "EACCES"),
        ("the agent's binary", "print(attempt(lambda: open('/proc/1/exe', 'wb')))".to_owned(), "EACCES"),
        ("sandboxd's binary", "print(attempt(lambda: open('/opt/agent-sandbox/bin/sandboxd', 'r+b')))".to_owned(), "EROFS"),
        ("raw packets", "import socket; print(attempt(lambda: socket.socket(17, 3, 0)), attempt(lambda: socket.socket(2, 3, 1)))".to_owned(), "EPERM EPERM"),
        ("sockets of virtual machines", "import socket; print(attempt(lambda: socket.socket(40, 1, 0)))".to_owned(), "EPERM"),
        ("the time", "print(call(227, 0, b'\\0' * 16))".to_owned(), "EPERM"),
        // Kernels before 6.12 have no custom time slices and report none.
        ("longer time slices", "a = ctypes.create_string_buffer(48); print(call(315, 0, a, 48, 0), int.from_bytes(a.raw[24:32], 'little') in (0, 100000), call(314, 0, a, 0))".to_owned(), "ok True EPERM"),
        ("longer time slices for its children", "p = ctypes.c_int(0); print(call(144, 0, 0x40000000, ctypes.byref(p)), call(144, 0, 0, ctypes.byref(p)))".to_owned(), "EPERM ok"),
        ("a core of its own", "print(call(157, 62, 1, 0, 0, 0))".to_owned(), "EPERM"),
        ("contexts for asynchronous I/O", "c = ctypes.c_ulong(0); print(call(206, 1, ctypes.byref(c)))".to_owned(), "ENOSYS"),
        ("the host's name", "print(call(170, b'x', 1))".to_owned(), "EPERM"),
        ("tracing the agent as another user", "attempt(lambda: os.setuid(1000)); print(call(101, 16, 1, None, None))".to_owned(), "EPERM"),
        ("the agent's memory, by a call", "b = ctypes.create_string_buffer(8); v = (ctypes.c_uint64 * 2)(ctypes.addressof(b), 8); print(call(311, 1, ctypes.byref(v), ctypes.c_long(1), ctypes.byref(v), ctypes.c_long(1), ctypes.c_long(0)))".to_owned(), "EPERM"),
        ("a descriptor of the agent", "f = libc.syscall(434, 1, 0); print(f >= 0, call(438, f, 4, 0))".to_owned(), "True EPERM"),
        ("killing and stopping the agent", "print(attempt(lambda: os.kill(1, 9)), attempt(lambda: os.kill(1, 19)), open('/proc/1/stat').read().split()[2] != 'T')".to_owned(), "ok ok True"),
        ("the agent's score when memory runs out", "print(attempt(lambda: open('/proc/1/oom_score_adj', 'w')))".to_owned(), "EROFS"),
        ("owners of the machine's programs", "print(attempt(lambda: os.chown('/usr/bin/env', 0, 0)))".to_owned(), "EROFS"),
        ("the mode of a device", "print(attempt(lambda: os.chmod('/dev/null', 0o600)), attempt(lambda: os.chown('/dev/null', 0, 0)))".to_owned(), "EPERM EPERM"),
        ("capabilities that it was not given", "h = (ctypes.c_uint32 * 2)(0x20080522, 0); d = (ctypes.c_uint32 * 6)(1 << 21, 1 << 21, 0, 0, 0, 0); print(call(126, h, d))".to_owned(), "EPERM"),
        ("capabilities that a file would give", "open('/tmp/f', 'w').close(); print(attempt(lambda: os.setxattr('/tmp/f', 'security.capability', bytes.fromhex('0100000200040000000000000000000000000000'))))".to_owned(), "EPERM"),
        ("mounts that bring devices", "print([line.split()[4] for line in open('/proc/self/mountinfo') if 'nodev' not in line.split()[5].split(',') and not line.split()[4].startswith('/dev') and ' - devtmpfs ' not in line and line.split()[3] != '/null'])".to_owned(), "[]"),
    ];
    // Only the container's own layer may contain set-user-ID programs, and only where privilege escalation is allowed.
    let suid = "print([line.split()[4] for line in open('/proc/self/mountinfo') if 'nosuid' not in line.split()[5].split(',')])";
    // Inside its pod it may become every user, or none.
    let users = "print(attempt(lambda: os.setgroups([1])), attempt(lambda: os.setgid(1000)), attempt(lambda: os.setuid(1000)))";
    let (expected_suid, expected_users) = match privilege {
        Privilege::Usual => ("['/']", "ok ok ok"),
        Privilege::None => ("[]", "EPERM EPERM EPERM"),
    };
    let attempts = attempts.into_iter().chain([
        ("programs that set a user", suid.to_owned(), expected_suid),
        ("becoming another user", users.to_owned(), expected_users),
    ]);
    let mut failures = Vec::new();
    for (what, code, expected) in attempts {
        let answer = python(machine, &pod, &code).await;
        if answer != expected {
            failures.push(format!("{what}: expected {expected}, got {answer}"));
        }
    }
    std::fs::remove_file(&secret).unwrap();
    assert!(failures.is_empty(), "{privilege:?}: {failures:#?}");
    machine.delete("p").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_exec_is_confined_exactly_like_the_command() {
    let machine = Machine::start().await;
    for privilege in Privilege::BOTH {
        exec_is_confined_like_the_command(&machine, privilege).await;
    }
    machine.finish().await;
}

async fn exec_is_confined_like_the_command(machine: &Machine, privilege: Privilege) {
    let pod = confined(machine, privilege).await;
    let no_new_privileges = u8::from(privilege == Privilege::None);
    let expected = format!(
        "capabilities, no_new_privileges = '{}', '{no_new_privileges}'",
        privilege.capabilities()
    );
    let code = r"
def facts(pid):
    status = dict(line.split(':', 1) for line in open(f'/proc/{pid}/status'))
    wanted = ['CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb', 'NoNewPrivs', 'Seccomp', 'Seccomp_filters', 'Uid', 'Gid', 'Groups']
    return {key: status[key].strip() for key in wanted}
names = ['cgroup', 'ipc', 'mnt', 'net', 'pid', 'user', 'uts']
spaces = lambda pid: [os.readlink(f'/proc/{pid}/ns/{name}') for name in names]
mine, command = facts('self'), facts(2)
assert mine == command == facts(1), (mine, command, facts(1))
assert spaces('self') == spaces(2)
assert mine['CapPrm'] == mine['CapEff'] == mine['CapBnd'] == capabilities, mine
assert int(mine['CapInh'], 16) == int(mine['CapAmb'], 16) == 0, mine
assert mine['NoNewPrivs'] == no_new_privileges and mine['Seccomp'] == '2' and mine['Seccomp_filters'] == '4', mine
descriptors = {number: os.readlink(f'/proc/self/fd/{number}') for number in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{number}')}
kinds = {number: target.split(':')[0] for number, target in descriptors.items()}
assert set(kinds) <= {'0', '1', '2', '3'}, descriptors
assert kinds['0'] == '/dev/null' and kinds['1'] == kinds['2'] == 'pipe', descriptors
print(' '.join(spaces('self')))
";
    let inside = python(machine, &pod, &format!("{expected}\n{code}")).await;
    for (name, link) in ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"]
        .iter()
        .zip(inside.split(' '))
    {
        let outside = std::fs::read_link(format!("/proc/self/ns/{name}")).unwrap();
        assert_ne!(
            outside.display().to_string(),
            link,
            "the {name} namespace is the machine's"
        );
    }
    machine.delete("p").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_pods_have_disjoint_uid_ranges_and_cannot_access_each_other() {
    let machine = Machine::start().await;
    for name in ["one", "two"] {
        let spec = json!({"containers": [{"name": "c", "image": "host",
            "readinessProbe": {"httpGet": {"path": "/", "port": 8888}}}]});
        machine.create(name, spec).await;
    }
    let (one, two) = (machine.ready("one").await, machine.ready("two").await);
    let range = "print(open('/proc/self/uid_map').read().split()[1])";
    assert_ne!(
        python(&machine, &one, range).await,
        python(&machine, &two, range).await
    );
    let other = two.status.as_ref().unwrap().pod_ip.clone().unwrap();
    let gateway = machine.runtime().node_address();
    let connect = |address: &str, port: u16, seconds: f32| {
        format!(
            "import socket\ns = socket.socket()\ns.settimeout({seconds})\ntry:\n    s.connect(('{address}', {port}))\n    print('connected')\nexcept OSError as problem:\n    print(type(problem).__name__)"
        )
    };
    assert_eq!(
        python(&machine, &one, &connect("127.0.0.1", 8888, 60.0)).await,
        "connected"
    );
    assert_ne!(
        python(&machine, &one, &connect(&other, 8888, 0.5)).await,
        "connected"
    );
    let listener = std::net::TcpListener::bind((gateway, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    assert_ne!(
        python(&machine, &one, &connect(&gateway.to_string(), port, 0.5)).await,
        "connected"
    );
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_symlink_race_makes_the_node_give_host_files_to_a_pods_group() {
    use std::os::unix::fs::MetadataExt;
    let machine = Machine::start().await;
    let stop = tokio_util::sync::CancellationToken::new();
    let data_dir = machine.config.data_dir.canonicalize().unwrap();
    tokio::spawn(machine_control_plane::volume_provisioner::run(
        machine.client.clone(),
        data_dir,
        stop.clone(),
    ));
    let claim = json!({"metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}});
    let claim: PersistentVolumeClaim = serde_json::from_value(claim).unwrap();
    Api::namespaced(machine.client.clone(), "t")
        .create(&PostParams::default(), &claim)
        .await
        .unwrap();
    let outside = tempfile::tempdir().unwrap();
    let files: Vec<_> = (0..10)
        .map(|index| outside.path().join(index.to_string()))
        .collect();
    for file in &files {
        std::fs::write(file, "").unwrap();
    }
    let look = || {
        let paths = files.iter().map(std::path::PathBuf::as_path);
        let found = paths.chain([outside.path()]).map(std::fs::metadata);
        found
            .map(|found| found.map(|found| (found.mode(), found.gid())).unwrap())
            .collect::<Vec<_>>()
    };
    let before = look();
    // Directories and symlinks to the machine's files are swapped all the time.
    let swap = format!(
        r"
import ctypes, os
libc = ctypes.CDLL(None)
pairs = [(b'd%d' % n, b'l%d' % n) for n in range(300)]
for directory, link in pairs:
    os.mkdir(directory); os.symlink('{}', link)
    for n in range(10): open(directory + b'/%d' % n, 'w').close()
open('/tmp/swapping', 'w').close()
while True:
    for directory, link in pairs: assert libc.renameat2(-100, directory, -100, link, 2) == 0
",
        outside.path().display()
    );
    let pod = |command: &[&str], group: u32| {
        json!({"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "securityContext": {"fsGroup": group},
            "containers": [{"name": "c", "image": "host", "command": command, "workingDir": "/data",
                "volumeMounts": [{"name": "v", "mountPath": "/data"}]}],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]})
    };
    machine
        .create("swapper", pod(&["python3", "-c", &swap], 0))
        .await;
    let swapper = machine.ready("swapper").await;
    eventually("the swapping to begin", || async {
        let (code, ..) = machine
            .exec(&swapper, &["test", "-e", "/tmp/swapping"])
            .await;
        (code == 0).then_some(())
    })
    .await;
    for group in 3000..3006 {
        let name = format!("group-{group}");
        machine.create(&name, pod(&["true"], group)).await;
        machine.phase(&name, "Succeeded").await;
    }
    assert_eq!(look(), before);
    let swapper = machine.pod("swapper").await.status.unwrap();
    assert_eq!(swapper.phase.as_deref(), Some("Running"), "it swapped on");
    stop.cancel();
    machine.finish().await;
}

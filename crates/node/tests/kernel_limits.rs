//! Kernel limits that all pods and the machine share: one pod cannot exhaust them, and cannot affect others through shared files or
//! through its own agent. Each attack runs beside a harmless pod.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on says so by panicking"
)]

mod support;

use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use support::Machine;
use testkit::eventually;

/// A pod whose container runs a Python script.
fn script(code: &str) -> Value {
    json!({"restartPolicy": "Never", "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "c", "image": "host", "command": ["python3", "-c", code]}]})
}

async fn calm(machine: &Machine) -> Pod {
    let spec =
        json!({"containers": [{"name": "c", "image": "host", "command": ["sleep", "1000"]}]});
    machine.create("calm", spec).await;
    machine.ready("calm").await
}

/// The output of a Python script in a pod.
async fn python(machine: &Machine, pod: &Pod, code: &str) -> String {
    let code = format!("{PRELUDE}\n{code}");
    let (status, out, err) = machine.exec(pod, &["python3", "-c", &code]).await;
    assert_eq!(status, 0, "the script itself broke: {err}");
    out.trim().to_owned()
}

/// Calls Linux directly and returns the error's name, or "ok".
const PRELUDE: &str = r#"
import ctypes, errno, os, sys, time
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
def take_all(take):
    taken = []
    while True:
        try: taken.append(take())
        except OSError as problem: return taken, errno.errorcode.get(problem.errno, "?")
def inotify():
    number = libc.inotify_init1(0)
    if number < 0: raise OSError(ctypes.get_errno(), "inotify")
    return number
def as_each_user(take):
    "Takes all there is as several users of the pod, which all hold it, and says how much that is and what ended it."
    total = 0
    for user in (0, 1000, 1001):
        read, write = os.pipe()
        if os.fork() == 0:
            os.setuid(user)
            count, problem = take()
            os.write(write, f'{count} {problem}'.encode())
            time.sleep(1000)
        count, problem = os.read(read, 100).decode().split()
        total += int(count)
    return f'{total} {problem}'
def put(name, text):
    open(name + ".part", "w").write(text); os.rename(name + ".part", name)
def wait_for(name):
    while not os.path.exists(name): time.sleep(0.01)
"#;

/// Starts a hostile pod. Returns what it wrote to `/tmp/result`.
async fn attack(machine: &Machine, name: &str, code: &str) -> (Pod, String) {
    machine
        .create(name, script(&format!("{PRELUDE}\n{code}")))
        .await;
    let pod = machine.ready(name).await;
    let result = result(machine, &pod).await;
    (pod, result)
}

async fn result(machine: &Machine, pod: &Pod) -> String {
    eventually("the attack to be over", || async {
        let (code, out, _) = machine.exec(pod, &["cat", "/tmp/result"]).await;
        (code == 0).then_some(out)
    })
    .await
}

fn setting(name: &str) -> u64 {
    let text = std::fs::read_to_string(Path::new("/proc/sys").join(name)).unwrap();
    text.trim().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn inotify_instances_run_out_only_for_the_pod_that_takes_them() {
    let machine = Machine::start().await;
    let calm = calm(&machine).await;
    let take = "
def take():
    taken, problem = take_all(inotify)
    return len(taken), problem
put('/tmp/result', as_each_user(take))
time.sleep(1000)";
    let (_, found) = attack(&machine, "greedy", take).await;
    let (count, problem) = found.split_once(' ').unwrap();
    assert_eq!(problem, "EMFILE");
    let most = setting("fs/inotify/max_user_instances");
    assert!(
        count.parse::<u64>().unwrap() <= most,
        "{count} of {most} for all users of the pod together"
    );
    let own = python(
        &machine,
        &calm,
        "print(attempt(lambda: [inotify() for _ in range(16)]))",
    );
    assert_eq!(own.await, "ok", "another pod has instances of its own");
    let flags = rustix::fs::inotify::CreateFlags::CLOEXEC;
    let of_machine: Result<Vec<_>, _> = (0..8).map(|_| rustix::fs::inotify::init(flags)).collect();
    assert!(of_machine.is_ok(), "root on the machine too");
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pending_signals_run_out_only_for_the_pod_that_queues_them() {
    let machine = Machine::start().await;
    let calm = calm(&machine).await;
    // Each timer takes a pending signal, of which a user has a limited number (RLIMIT_SIGPENDING).
    let timers = "
import resource
resource.setrlimit(resource.RLIMIT_SIGPENDING, (resource.getrlimit(resource.RLIMIT_SIGPENDING)[1],) * 2)
def take():
    slot, count, answer = ctypes.c_int(), 0, 'ok'
    while answer == 'ok':
        answer = call(222, 0, None, ctypes.byref(slot)); count += answer == 'ok'
    return count, answer
limit = resource.getrlimit(resource.RLIMIT_SIGPENDING)[1]
put('/tmp/result', f'{limit} {as_each_user(take)}')
time.sleep(1000)";
    let (_, found) = attack(&machine, "greedy", timers).await;
    let found: Vec<&str> = found.split(' ').collect();
    assert_eq!(found[2], "EAGAIN");
    let number = |text: &str| text.parse::<u64>().unwrap();
    assert!(
        number(found[1]) <= number(found[0]),
        "{found:?}: for all users of the pod together"
    );
    let own = "slot = ctypes.c_int(); print(call(222, 0, None, ctypes.byref(slot)))";
    assert_eq!(python(&machine, &calm, own).await, "ok");
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn terminals_run_out_only_for_the_pod_that_opens_them() {
    let machine = Machine::start().await;
    let calm = calm(&machine).await;
    let take = "taken, problem = take_all(lambda: os.open('/dev/ptmx', os.O_RDWR))\nput('/tmp/result', f'{len(taken)} {problem}')\ntime.sleep(1000)";
    let (_, found) = attack(&machine, "greedy", take).await;
    let (count, problem) = found.split_once(' ').unwrap();
    assert_eq!(problem, "ENOSPC");
    let all = setting("kernel/pty/max") - setting("kernel/pty/reserve");
    let pods = u64::from(machine.config.maximum_pods);
    let taken: u64 = count.parse().unwrap();
    assert!(
        taken * pods <= all,
        "{pods} pods that take {taken} each exceed the machine's {all}"
    );
    let own = "taken = [os.open('/dev/ptmx', os.O_RDWR) for _ in range(8)]; print(len(taken))";
    assert_eq!(python(&machine, &calm, own).await, "8");
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_pod_cannot_open_half_of_the_files_the_machine_allows() {
    let machine = Machine::start().await;
    let calm = calm(&machine).await;
    let limit = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[1])";
    let files: u64 = python(&machine, &calm, limit).await.parse().unwrap();
    assert!(files >= 1024, "{files} files are too few for a program");
    let processes = machine.config.default_process_limit;
    let all = setting("fs/file-max");
    assert!(
        files * processes <= all / 2,
        "{processes} processes with {files} files each, of {all}"
    );
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_pods_together_leave_the_machine_process_identifiers() {
    let machine = Machine::start().await;
    let group = container_runtime::cgroup(&machine.config.data_dir.canonicalize().unwrap());
    let candidates = ["pids", "unified", ""].map(|hierarchy| {
        Path::new("/sys/fs/cgroup")
            .join(hierarchy)
            .join(&group)
            .join("pids.max")
    });
    let file = candidates.iter().find(|path| path.exists()).unwrap();
    let limit: u64 = std::fs::read_to_string(file)
        .unwrap()
        .trim()
        .parse()
        .expect("a number, not `max`");
    let all = setting("kernel/pid_max").min(setting("kernel/threads-max"));
    assert!(limit <= all / 4 * 3, "{limit} of {all}");
    // The limit of one pod is a small part of it, so that it does not starve other pods.
    assert!(
        machine.config.default_process_limit * 16 <= limit,
        "{limit}"
    );
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_container_changes_the_limits_or_the_priority_of_its_agent() {
    let machine = Machine::start().await;
    let calm = calm(&machine).await;
    let spec = json!({"shareProcessNamespace": true, "containers": [{"name": "c", "image": "host",
        "securityContext": {"capabilities": {"add": ["SYS_NICE"]}}, "command": ["sleep", "1000"]}]});
    machine.create("sharing", spec).await;
    let sharing = machine.ready("sharing").await;
    // The agent is the parent of every command that is run in the container.
    let attempts = r"
limit = (ctypes.c_uint64 * 2)(0, 0)
zero = ctypes.c_int(0)
mask = ctypes.c_uint64(1)
agents = {1, os.getppid()}
for agent in agents:
    found = {
        'prlimit': call(302, agent, 7, limit, None),
        'prlimit, upper half of the register set': call(302, ctypes.c_long(agent | 1 << 32), 7, limit, None),
        'sched_setaffinity': call(203, agent, 8, ctypes.byref(mask)),
        'sched_setscheduler': call(144, agent, 5, ctypes.byref(zero)),
        'sched_setparam': call(142, agent, ctypes.byref(zero)),
        'setpriority of the process': call(141, 0, agent, 19),
        'setpriority of the group': call(141, 1, agent, 19),
        'setpriority of the user': call(141, 2, os.getuid(), 19),
        'ioprio_set of the process': call(251, 1, agent, 3 << 13),
        'ioprio_set of the group': call(251, 2, agent, 3 << 13),
        'ioprio_set of the user': call(251, 3, os.getuid(), 3 << 13),
    }
    wrong = {key: value for key, value in found.items() if value != 'EPERM'}
    assert not wrong, (agent, wrong)
own = os.getppid()
adjust = attempt(lambda: open(f'/proc/{own}/oom_score_adj', 'w').write('1000'))
assert adjust in ('EROFS', 'EACCES'), adjust
adjust = attempt(lambda: open(f'/proc/{own}/task/{own}/oom_score_adj', 'w').write('1000'))
assert adjust in ('EROFS', 'EACCES'), adjust
adjust = attempt(lambda: open('/proc/1/oom_score_adj', 'w').write('1000'))
assert adjust in ('EROFS', 'EACCES'), adjust
allowed = {
    'prlimit': call(302, 0, 7, None, limit),
    'sched_setaffinity': call(203, 0, 8, ctypes.byref(ctypes.c_uint64(0xffffffff))),
    'sched_setscheduler': call(144, 0, 0, ctypes.byref(zero)),
    'setpriority': call(141, 0, 0, 5),
    'ioprio_set': call(251, 1, 0, 2 << 13 | 7),
}
assert set(allowed.values()) == {'ok'}, allowed
print('done')
";
    for pod in [&calm, &sharing] {
        assert_eq!(python(&machine, pod, attempts).await, "done");
        // It still runs commands.
        assert_eq!(python(&machine, pod, "print(1)").await, "1");
    }
    machine.finish().await;
}

/// The value of a field in a file of `/proc/<pid>`.
fn line_of(pid: i32, file: &str, name: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap().trim().to_owned()
}

fn user_of(pid: i32) -> u32 {
    let line = line_of(pid, "status", "Uid:");
    line.split_whitespace().next().unwrap().parse().unwrap()
}

fn descriptors_of(pid: i32) -> u64 {
    let line = line_of(pid, "limits", "Max open files");
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// The CPU time of a process, in ticks.
fn ticks(pid: i32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, rest) = text.rsplit_once(')').unwrap();
    let fields: Vec<&str> = rest.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_without_descriptors_neither_spins_nor_misses_the_end_of_its_command() {
    use std::os::unix::process::CommandExt;
    let machine = Machine::start().await;
    let code = format!("{PRELUDE}\nwait_for('/tmp/end')\ntime.sleep(1)");
    machine.create("starved", script(&code)).await;
    let pod = machine.ready("starved").await;
    let directory = machine.config.data_dir.join("pods");
    let directory = directory.join(pod.metadata.uid.clone().unwrap());
    let state = std::fs::read(directory.join("containers/c/0/state.json")).unwrap();
    let state: Value = serde_json::from_slice(&state).unwrap();
    let agent = i32::try_from(state["pid"].as_i64().unwrap()).unwrap();
    let (user, before) = (user_of(agent), descriptors_of(agent));
    let limit = |files: u64| {
        // As the container's own user: root may lack the capability to do this to others.
        std::process::Command::new("prlimit")
            .args(["--pid", &agent.to_string()])
            .arg(format!("--nofile={files}:{before}"))
            .uid(user)
            .gid(user)
            .status()
            .unwrap()
            .success()
    };
    assert!(limit(0));
    let ticks_before = ticks(agent);
    // It gets a request for which it has no free descriptor, and cannot even poll.
    let asked = machine.exec(&pod, &["true"]);
    let asked = tokio::time::timeout(std::time::Duration::from_secs(2), asked).await;
    assert!(asked.is_err(), "there was no descriptor for a connection");
    let spent = ticks(agent) - ticks_before;
    assert!(spent < 50, "{spent} ticks of 10 ms in two seconds");
    assert!(limit(before));
    let (code, ..) = machine.exec(&pod, &["touch", "/tmp/end"]).await;
    assert_eq!(code, 0, "exec works again");
    // On a very slow machine it may have ended by now, which is correct, too.
    limit(0);
    machine.phase("starved", "Succeeded").await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_cannot_watch_or_lock_programs_of_other_pods_or_the_machine() {
    let machine = Machine::start().await;
    let calm = calm(&machine).await;
    let spy = r"
import fcntl, struct
PATHS = ('/usr/bin', '/usr/bin/env', '/opt/agent-sandbox/bin/sandboxd')
watch = inotify()
os.set_blocking(watch, False)
descriptors = [libc.inotify_add_watch(watch, path.encode(), 0xfff) for path in PATHS]
assert min(descriptors) >= 0, descriptors
held = [os.open(path, os.O_RDONLY) for path in PATHS]
for one in held: fcntl.flock(one, fcntl.LOCK_EX)
def events():
    data = b''
    while True:
        try: data += os.read(watch, 1 << 16)
        except BlockingIOError: break
    while data:
        descriptor, _, _, length = struct.unpack_from('iIII', data)
        yield descriptor, data[16:16 + length].rstrip(bytes(1)); data = data[16 + length:]
list(events())
put('/tmp/result', 'locked')
wait_for('/tmp/look')
# Commands of its own pod it may see; none of them is `env`.
put('/tmp/seen', str(any(one in descriptors[1:] or name == b'env' for one, name in events())))
time.sleep(1000)
";
    let (pod, _) = attack(&machine, "spy", spy).await;
    let lock = "
import fcntl
take = lambda path: attempt(lambda: fcntl.flock(os.open(path, 0), fcntl.LOCK_EX | fcntl.LOCK_NB))
print(*map(take, ('/usr/bin', '/usr/bin/env', '/opt/agent-sandbox/bin/sandboxd')))";
    let others = python(&machine, &calm, lock).await;
    let program = std::fs::File::open("/usr/bin/env").unwrap();
    let of_machine = program.try_lock().is_ok();
    drop(program);
    let (code, ..) = machine.exec(&calm, &["env", "true"]).await;
    python(&machine, &pod, "open('/tmp/look', 'w').close()").await;
    let seen = eventually("the spy to look", || async {
        let (code, out, _) = machine.exec(&pod, &["cat", "/tmp/seen"]).await;
        (code == 0).then_some(out)
    })
    .await;
    assert_eq!(
        (others.as_str(), of_machine, code, seen.as_str()),
        ("ok ok ok", true, 0, "False"),
        "locks of another pod, of the machine, a command of another pod, whether it was seen"
    );
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_the_machines_devices_reach_no_pod() {
    let machine = Machine::start().await;
    let listen = r"
import socket
events = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15)
events.bind((0, 1))
events.setblocking(False)
put('/tmp/result', 'listens')
wait_for('/tmp/look')
try: seen = events.recv(4096).split(b'\0')[0].decode()
except BlockingIOError: seen = 'nothing'
put('/tmp/seen', seen)
time.sleep(1000)
";
    let (pod, _) = attack(&machine, "listener", listen).await;
    // The kernel delivers to every listener before the write returns.
    std::fs::write("/sys/devices/system/cpu/cpu0/uevent", "change").unwrap();
    python(&machine, &pod, "open('/tmp/look', 'w').close()").await;
    let seen = eventually("the pod to look", || async {
        let (code, out, _) = machine.exec(&pod, &["cat", "/tmp/seen"]).await;
        (code == 0).then_some(out)
    })
    .await;
    assert_eq!(seen, "nothing");
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mounts_of_a_container_do_not_show_the_host_path_of_its_root() {
    let machine = Machine::start().await;
    let calm = calm(&machine).await;
    let (_, mounts, _) = machine.exec(&calm, &["cat", "/proc/self/mountinfo"]).await;
    let data_dir = machine.config.data_dir.canonicalize().unwrap();
    let data_dir = data_dir.display().to_string();
    // Files that the node mounts into `/etc` are bind mounts of its own files, whose paths the kernel shows.
    let known = [
        "/etc/hosts",
        "/etc/hostname",
        "/etc/resolv.conf",
        "/dev/termination-log",
    ];
    let telling: Vec<&str> = mounts
        .lines()
        .filter(|line| {
            let mut fields = line.split(' ');
            let (root, point) = (fields.nth(3).unwrap(), fields.next().unwrap());
            let of_machine = line.contains(&data_dir) || root.starts_with("/usr");
            of_machine && !known.contains(&point)
        })
        .collect();
    assert!(telling.is_empty(), "{telling:#?}");
    machine.finish().await;
}

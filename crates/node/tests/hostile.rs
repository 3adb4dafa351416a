//! Hostile containers: each is contained, its status reports what happened, and the node and a neighbour continue.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on says so by panicking"
)]

mod support;

use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Pod};
use kube::Api;
use kube::api::ListParams;
use serde_json::{Value, json};
use support::internet::{Internet, on_own_network};
use support::{Machine, Privilege, SmallDisk};
use testkit::eventually;

/// A hostile container, as root with the default capabilities.
fn hostile(script: &str, resources: &Value) -> Value {
    json!({"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "host",
        "command": ["python3", "-c", script], "resources": resources}]})
}

fn hostile_with(privilege: Privilege, script: &str, resources: &Value) -> Value {
    let mut spec = hostile(script, resources);
    spec["containers"][0]["securityContext"] = privilege.security_context();
    spec
}

/// A neighbour pod that is started before the attack.
async fn neighbour(machine: &Machine) -> Pod {
    let spec = json!({"containers": [{"name": "c", "image": "host", "ports": [{"containerPort": 8888}],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8888}, "periodSeconds": 1}}]});
    machine.create("neighbour", spec).await;
    machine.ready("neighbour").await
}

/// Asserts that the neighbour runs commands, and the node starts pods, during the attack.
async fn life_goes_on(machine: &Machine, neighbour: &Pod) {
    let (code, out, err) = machine.exec(neighbour, &["echo", "alive"]).await;
    assert_eq!((code, out.as_str()), (0, "alive\n"), "{err}");
    let spec = json!({"restartPolicy": "Never", "containers": [{"name": "c", "image": "host", "command": ["true"]}]});
    machine.create("newcomer", spec).await;
    machine.phase("newcomer", "Succeeded").await;
    machine.delete("newcomer").await;
}

fn end(pod: &Pod) -> (String, i32) {
    let statuses = pod.status.clone().unwrap().container_statuses.unwrap();
    let end = statuses[0].state.clone().unwrap().terminated.unwrap();
    (end.reason.unwrap(), end.exit_code)
}

fn reason(pod: &Pod) -> (Option<String>, Option<String>) {
    let status = pod.status.clone().unwrap();
    (status.reason, status.message)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_bomb_fills_its_own_pod_and_no_other() {
    let machine = Machine::start().await;
    let neighbour = neighbour(&machine).await;
    // Every process starts more and stays. If it may, each becomes another user, because some limits are per user.
    let bomb = r"
import os, time
def attempt(work):
    try: work()
    except OSError: pass
failed = 0
while failed < 50:
    try:
        if os.fork() == 0: failed = 0; attempt(lambda: os.setuid(os.getpid()))
    except OSError:
        failed += 1; attempt(lambda: os.mkdir('/tmp/full')); time.sleep(0.1)
time.sleep(1000)
";
    for privilege in Privilege::BOTH {
        // Enough memory for all processes, so that the limit of their number stops the bomb.
        let limits = json!({"limits": {"memory": "1Gi", "cpu": "500m"}});
        machine
            .create("bomb", hostile_with(privilege, bomb, &limits))
            .await;
        let pod = machine.ready("bomb").await;
        let full = machine
            .config
            .data_dir
            .join("pods")
            .join(pod.metadata.uid.clone().unwrap());
        let full = full.join("containers/c/0/upper/tmp/full");
        let over = || async {
            let status = machine.pod("bomb").await.status.unwrap();
            let ended = status.phase.as_deref() == Some("Failed");
            (full.exists() || ended).then_some(())
        };
        eventually("the pod to be full", over).await;
        life_goes_on(&machine, &neighbour).await;
        machine.delete("bomb").await;
    }
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_memory_bomb_is_oom_killed_and_its_status_says_so() {
    let machine = Machine::start().await;
    let neighbour = neighbour(&machine).await;
    let bomb = "x = []\nwhile True: x.append(bytearray(4 << 20))";
    for privilege in Privilege::BOTH {
        let limits = json!({"limits": {"memory": "64Mi"}});
        machine
            .create("bomb", hostile_with(privilege, bomb, &limits))
            .await;
        let pod = machine.phase("bomb", "Failed").await;
        assert_eq!(end(&pod), ("OOMKilled".to_owned(), 137), "{privilege:?}");
        machine.delete("bomb").await;
    }
    // Files in memory count as well.
    let mut shared = hostile(
        "f = open('/dev/shm/x', 'wb')\nwhile True: f.write(bytes(1 << 20))",
        &json!({"limits": {"memory": "32Mi"}}),
    );
    shared["volumes"] = json!([{"name": "m", "emptyDir": {"medium": "Memory"}}]);
    machine.create("shared", shared).await;
    let pod = machine.phase("shared", "Failed").await;
    assert!(
        ["OOMKilled", "Error"].contains(&end(&pod).0.as_str()),
        "{:?}",
        end(&pod)
    );
    life_goes_on(&machine, &neighbour).await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_exceeds_a_disk_limit_is_evicted_and_its_space_is_freed() {
    // However full the disk of the machine is.
    let disk = SmallDisk::new(c"size=2g");
    let machine = Machine::start_with(|config| {
        config.data_dir = disk.path().join("data");
        config.storage_check = Duration::from_millis(100);
    })
    .await;
    let neighbour = neighbour(&machine).await;
    let fill = "import time\nf = open('/data/x', 'wb')\nfor _ in range(64): f.write(bytes(1 << 20)); f.flush()\ntime.sleep(1000)";
    let mut volume = hostile(fill, &json!({}));
    volume["volumes"] = json!([{"name": "data", "emptyDir": {"sizeLimit": "8Mi"}}]);
    volume["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    machine.create("volume", volume).await;
    let layer = fill.replace("/data/x", "/tmp/x");
    machine
        .create(
            "layer",
            hostile(&layer, &json!({"limits": {"ephemeral-storage": "8Mi"}})),
        )
        .await;
    let logs = "import sys\nwhile True: sys.stdout.write('x' * 1000 + '\\n')";
    machine
        .create(
            "logs",
            hostile(
                logs,
                &json!({"limits": {"ephemeral-storage": "8Mi", "cpu": "500m"}}),
            ),
        )
        .await;
    let message = fill.replace("/data/x", "/dev/termination-log");
    machine
        .create(
            "message",
            hostile(&message, &json!({"limits": {"ephemeral-storage": "8Mi"}})),
        )
        .await;
    let mut before = hostile("pass", &json!({}));
    before["initContainers"] =
        hostile(&layer, &json!({"limits": {"ephemeral-storage": "8Mi"}}))["containers"].clone();
    before["initContainers"][0]["name"] = json!("init");
    machine.create("before", before).await;
    for (name, message) in [
        (
            "message",
            "Container c exceeded its local ephemeral storage limit \"8Mi\". ",
        ),
        (
            "before",
            "Container init exceeded its local ephemeral storage limit \"8Mi\". ",
        ),
        (
            "volume",
            "Usage of EmptyDir volume \"data\" exceeds the limit \"8Mi\". ",
        ),
        (
            "layer",
            "Container c exceeded its local ephemeral storage limit \"8Mi\". ",
        ),
        (
            "logs",
            "Container c exceeded its local ephemeral storage limit \"8Mi\". ",
        ),
    ] {
        let pod = machine.phase(name, "Failed").await;
        assert_eq!(
            reason(&pod),
            (Some("Evicted".to_owned()), Some(message.to_owned())),
            "{name}"
        );
    }
    let uid = machine.pod("volume").await.metadata.uid.unwrap();
    let directory = machine
        .config
        .data_dir
        .join("pods")
        .join(uid)
        .join("volumes");
    eventually("the space to be given back", || async {
        (!directory.exists()).then_some(())
    })
    .await;
    // Events are written after the status.
    let events = Api::<Event>::namespaced(machine.client.clone(), "t");
    let count = eventually("an event of each eviction", || async {
        let evictions = events.list(&ListParams::default()).await.unwrap();
        let count = evictions
            .iter()
            .filter(|event| event.reason.as_deref() == Some("Evicted"))
            .count();
        (count >= 5).then_some(count)
    })
    .await;
    assert_eq!(count, 5);
    life_goes_on(&machine, &neighbour).await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_open_files_count_against_the_limits_of_their_pod() {
    let disk = SmallDisk::new(c"size=2g");
    let machine = Machine::start_with(|config| {
        config.data_dir = disk.path().join("data");
        config.storage_check = Duration::from_millis(100);
    })
    .await;
    let neighbour = neighbour(&machine).await;
    let limited = json!({"limits": {"ephemeral-storage": "8Mi"}});
    let open = "import os, time\nf = open('/tmp/x', 'wb'); os.unlink('/tmp/x')\nfor _ in range(64): f.write(bytes(1 << 20)); f.flush()\ntime.sleep(1000)";
    machine.create("open", hostile(open, &limited)).await;
    // Held only by a mapping. Python's own module would keep a copy of the descriptor.
    let mapped = r"
import ctypes, os, time
f = open('/tmp/x', 'w+b'); f.write(bytes(64 << 20)); f.flush()
mmap = ctypes.CDLL(None).mmap
mmap.restype = ctypes.c_void_p
mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
held = mmap(None, 64 << 20, 3, 1, f.fileno(), 0)
f.close(); os.unlink('/tmp/x')
time.sleep(1000)
";
    machine.create("mapped", hostile(mapped, &limited)).await;
    let mut volume = hostile(&open.replace("/tmp/x", "/data/x"), &json!({}));
    volume["volumes"] = json!([{"name": "data", "emptyDir": {"sizeLimit": "8Mi"}}]);
    volume["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    machine.create("volume", volume).await;
    // Files in memory do not count as disk usage.
    let memory = "import os, time\nf = os.memfd_create('m'); os.write(f, bytes(32 << 20))\ng = open('/dev/shm/x', 'wb'); g.write(bytes(32 << 20)); os.unlink('/dev/shm/x')\ntime.sleep(1000)";
    machine.create("memory", hostile(memory, &limited)).await;
    let container = "Container c exceeded its local ephemeral storage limit \"8Mi\". ";
    for (name, message) in [
        ("open", container),
        ("mapped", container),
        (
            "volume",
            "Usage of EmptyDir volume \"data\" exceeds the limit \"8Mi\". ",
        ),
    ] {
        let pod = machine.phase(name, "Failed").await;
        assert_eq!(
            reason(&pod),
            (Some("Evicted".to_owned()), Some(message.to_owned())),
            "{name}"
        );
    }
    let memory = machine.pod("memory").await;
    let phase = memory.status.and_then(|status| status.phase);
    assert_eq!(phase.as_deref(), Some("Running"));
    life_goes_on(&machine, &neighbour).await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_fills_the_disk_with_deleted_files_is_evicted_before_others() {
    let disk = SmallDisk::new(c"size=300m");
    let machine = Machine::start_with(|config| {
        config.data_dir = disk.path().join("data");
        config.storage_check = Duration::from_millis(100);
    })
    .await;
    // Has more in regular files than the other.
    let honest = "import time\nf = open('/tmp/x', 'wb'); f.write(bytes(16 << 20)); f.flush()\ntime.sleep(1000)";
    machine.create("honest", hostile(honest, &json!({}))).await;
    let honest = machine.ready("honest").await;
    let fill = r"
import os, time
f = open('/tmp/x', 'wb'); os.unlink('/tmp/x')
while True:
    try:
        f.write(bytes(1 << 20)); f.flush()
    except OSError: time.sleep(0.01)
";
    machine.create("fill", hostile(fill, &json!({}))).await;
    let pod = machine.phase("fill", "Failed").await;
    assert_eq!(reason(&pod).0.as_deref(), Some("Evicted"));
    life_goes_on(&machine, &honest).await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_exhausts_the_inodes_is_evicted() {
    let disk = SmallDisk::new(c"nr_inodes=6000,size=400m");
    let machine = Machine::start_with(|config| {
        config.data_dir = disk.path().join("data");
        config.storage_check = Duration::from_millis(100);
    })
    .await;
    let neighbour = neighbour(&machine).await;
    let crowd = r"
import os, time
os.mkdir('/tmp/d')
n = 0
while True:
    try:
        open(f'/tmp/d/{n}', 'w').close(); n += 1
    except OSError: time.sleep(0.01)
";
    machine.create("crowd", hostile(crowd, &json!({}))).await;
    let pod = machine.phase("crowd", "Failed").await;
    let (reason, message) = reason(&pod);
    assert_eq!(reason.as_deref(), Some("Evicted"));
    assert!(message.unwrap().contains("inodes"));
    life_goes_on(&machine, &neighbour).await;
    let runs = machine
        .pod("neighbour")
        .await
        .status
        .unwrap()
        .container_statuses
        .unwrap()[0]
        .restart_count;
    assert_eq!(runs, 0, "the neighbour was left alone");
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn open_files_run_out_only_for_the_pod_that_opens_them() {
    let machine = Machine::start().await;
    let neighbour = neighbour(&machine).await;
    let exhaust = r"
import os, time, errno
held, code = [], 0
while not code:
    try: held.append(os.open('/dev/null', 0))
    except OSError as problem: code = problem.errno
for one in held[:8]: os.close(one)
open('/tmp/result', 'w').write(errno.errorcode[code]); time.sleep(1000)
";
    machine
        .create("greedy", hostile(exhaust, &json!({"limits": {"cpu": "1"}})))
        .await;
    let pod = machine.ready("greedy").await;
    let found = eventually("the descriptors to run out", || async {
        let (code, out, _) = machine.exec(&pod, &["cat", "/tmp/result"]).await;
        (code == 0 && !out.is_empty()).then_some(out)
    })
    .await;
    assert_eq!(found, "EMFILE");
    life_goes_on(&machine, &neighbour).await;
    machine.finish().await;
}

/// The number that a line of a log ends with.
fn number(line: &str) -> Option<u64> {
    line.rsplit(' ').next()?.parse().ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_logs_is_rotated_away_and_can_still_be_read() {
    let machine = Machine::start_with(|config| {
        // However slow the machine is, a rotated file is nearly full.
        config.log_maximum_bytes = (13 << 20) + 1;
        config.log_maximum_files = 3;
    })
    .await;
    let neighbour = neighbour(&machine).await;
    let flood =
        "import itertools, sys\nfor n in itertools.count(): sys.stdout.write(f'{n:01000}\\n')";
    machine
        .create("flood", hostile(flood, &json!({"limits": {"cpu": "300m"}})))
        .await;
    let pod = machine.ready("flood").await;
    let directory = machine
        .config
        .data_dir
        .join("pods")
        .join(pod.metadata.uid.clone().unwrap());
    let directory = directory.join("containers/c");
    let files = || {
        let entries = support::entries(&directory).into_iter();
        let logs = entries.filter(|path| {
            let name = path.file_name().unwrap().to_string_lossy();
            name.contains(".log") && !name.ends_with(".next")
        });
        logs.map(|path| std::fs::metadata(path).map_or(0, |found| found.len()))
            .collect::<Vec<u64>>()
    };
    eventually("the log to be rotated twice", || async {
        (files().len() == 3).then_some(())
    })
    .await;
    life_goes_on(&machine, &neighbour).await;
    // The shim stops a file at its own limit, however late the node rotates it.
    assert!(
        files().iter().all(|size| *size <= 16 << 20),
        "{:?}",
        files()
    );
    assert!(files().len() <= 3);
    let id = container_runtime::ContainerId {
        pod: pod.metadata.uid.clone().unwrap(),
        container: "c".into(),
        attempt: 0,
    };
    let log = |name: &str| std::fs::read_to_string(directory.join(name)).unwrap_or_default();
    eventually(
        "a file to be filled and the next to go on where it ends",
        || async {
            let (full, next) = (log("0.log.2"), log("0.log.1"));
            let (last, first) = (full.lines().last()?, next.lines().next()?);
            let is_full = full.len() > 13 << 20;
            (is_full && number(first)? == number(last)? + 1).then_some(())
        },
    )
    .await;
    // Just after a rotation there may be fewer lines in the newest file.
    eventually("the last three lines", || async {
        let (sender, mut receiver) = tokio::sync::mpsc::channel(16);
        let options = container_runtime::logs::LogOptions {
            tail_lines: Some(3),
            ..Default::default()
        };
        // Lines written meanwhile are included, and may exceed the range between the two.
        let streaming = container_runtime::logs::stream(machine.runtime(), &id, options, sender);
        let reading = async {
            let mut lines = Vec::new();
            while let Some(line) = receiver.recv().await {
                lines.push(line.len());
            }
            lines
        };
        let (streamed, lines) = tokio::join!(streaming, reading);
        streamed.unwrap();
        (lines == [1001; 3]).then_some(())
    })
    .await;
    machine.finish().await;
}

/// The average number of CPUs that a pod's processes use over some seconds, from their own measurement.
async fn cpus_used(machine: &Machine, pod: &Pod, seconds: u32) -> f64 {
    let measure = r"
import os, sys, time
def used(): return sum(sum(map(int, open(f'/proc/{p}/stat').read().rsplit(')', 1)[1].split()[11:13])) for p in os.listdir('/proc') if p.isdigit())
a, t = used(), time.monotonic(); time.sleep(int(sys.argv[1]))
print((used() - a) / os.sysconf('SC_CLK_TCK') / (time.monotonic() - t))
";
    let seconds = seconds.to_string();
    let command = ["python3", "-c", measure, &seconds];
    let (code, out, err) = machine.exec(pod, &command).await;
    assert_eq!(code, 0, "{err}");
    out.trim().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cpu_hog_is_throttled_to_its_limit_and_its_pod_says_so() {
    let machine =
        Machine::start_with(|config| config.cpu_throttling_interval = Duration::from_millis(500))
            .await;
    let neighbour = neighbour(&machine).await;
    let hog = "import os\n[os.fork() for _ in range(3)]\nwhile True: pass";
    machine
        .create("hog", hostile(hog, &json!({"limits": {"cpu": "200m"}})))
        .await;
    let pod = machine.ready("hog").await;
    let used = cpus_used(&machine, &pod, 2).await;
    assert!(used < 0.45, "uses {used} CPUs with a limit of 0.2");
    let throttled = |pod: &Pod| {
        let conditions = pod
            .status
            .iter()
            .flat_map(|status| status.conditions.iter().flatten());
        conditions
            .filter(|condition| condition.type_ == "CPUThrottled" && condition.status == "True")
            .find_map(|condition| condition.message.clone())
    };
    let pod = machine
        .pod_with("hog", "throttled", |pod| throttled(pod).is_some())
        .await;
    let message = throttled(&pod).unwrap();
    assert!(message.contains("container c (limit 200m)"), "{message}");
    machine.has_event("hog", "CPUThrottled", "limit 200m").await;
    assert!(throttled(&machine.pod("neighbour").await).is_none());
    life_goes_on(&machine, &neighbour).await;
    machine.finish().await;
}

/// The number of pods whose cgroup is in SCHED_IDLE.
fn sched_idle_pods(machine: &Machine) -> usize {
    let group = container_runtime::cgroup(&machine.config.data_dir);
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let mounts = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    let pods = mounts.flat_map(|mount| std::fs::read_dir(format!("{mount}/{group}")));
    pods.flatten()
        .flatten()
        .filter_map(|pod| std::fs::read_to_string(pod.path().join("cpu.idle")).ok())
        .filter(|idle| idle.trim() == "1")
        .count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cpu_bound_pod_is_throttled_to_sched_idle_until_it_stops() {
    let machine = Machine::start().await;
    let neighbour = neighbour(&machine).await;
    let hog = "import os, time\nfor _ in range(2 * os.cpu_count()):\n    if os.fork() == 0:\n        while not os.path.exists('/tmp/enough'): pass\n        os._exit(0)\ntime.sleep(1000)";
    machine.create("hog", hostile(hog, &json!({}))).await;
    let pod = machine.ready("hog").await;
    let are_idle = |count: usize| {
        let machine = &machine;
        async move { (sched_idle_pods(machine) == count).then_some(()) }
    };
    eventually("only the hog to be throttled", || are_idle(1)).await;
    life_goes_on(&machine, &neighbour).await;
    let (code, _, err) = machine.exec(&pod, &["touch", "/tmp/enough"]).await;
    assert_eq!(code, 0, "{err}");
    eventually("it to be in the normal class", || are_idle(0)).await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_gets_its_cpu_request_beside_a_cpu_bound_pod() {
    const WINDOW_SECONDS: u32 = 4;
    let machine = Machine::start().await;
    let hog = "import os\nfor _ in range(os.cpu_count()):\n    if os.fork() == 0: break\nwhile True: pass";
    let cpus = std::thread::available_parallelism().unwrap().get();
    let most = format!("{}m", cpus * 750);
    let asked = json!({"requests": {"cpu": most}});
    machine.create("asked", hostile(hog, &asked)).await;
    machine.create("greedy", hostile(hog, &json!({}))).await;
    let (asked, greedy) = (machine.ready("asked").await, machine.ready("greedy").await);
    eventually("three quarters for the one who asked for them", || async {
        let (asked, greedy) = tokio::join!(
            cpus_used(&machine, &asked, WINDOW_SECONDS),
            cpus_used(&machine, &greedy, WINDOW_SECONDS)
        );
        // Equal time would be a half.
        (asked / (asked + greedy) > 0.65 && greedy > 0.0).then_some(())
    })
    .await;
    machine.finish().await;
}

#[test]
fn a_flood_of_connections_stops_at_the_pods_limit() {
    on_own_network(|| async {
        let _internet = Internet::beside_machine().await;
        let machine = Machine::start().await;
        let neighbour = neighbour(&machine).await;
        // Each datagram to another port is a connection in the conntrack table.
        let flood = r"
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for port in range(1, 20000):
    try: s.sendto(b'x', ('203.0.113.1', port))
    except OSError: pass
open('/tmp/done', 'w').close(); time.sleep(1000)
";
        machine.create("flood", hostile(flood, &json!({}))).await;
        let pod = machine.ready("flood").await;
        eventually("the flood to be over", || async {
            let (code, ..) = machine.exec(&pod, &["test", "-e", "/tmp/done"]).await;
            (code == 0).then_some(())
        })
        .await;
        let count = std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count").unwrap();
        let count: u32 = count.trim().parse().unwrap();
        assert!(
            (1000..6000).contains(&count),
            "{count} connections are known"
        );
        life_goes_on(&machine, &neighbour).await;
        machine.finish().await;
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_very_deep_directory_tree_is_removed_with_its_pod() {
    let machine = Machine::start().await;
    let deep = r"
import os, time
for _ in range(2000):
    os.mkdir('directory'); os.chdir('directory')
open('/tmp/done', 'w').close(); time.sleep(1000)
";
    let mut spec = hostile(deep, &json!({}));
    spec["containers"][0]["workingDir"] = json!("/tmp");
    machine.create("deep", spec).await;
    let pod = machine.ready("deep").await;
    eventually("the tree to be made", || async {
        let (code, ..) = machine.exec(&pod, &["test", "-e", "/tmp/done"]).await;
        (code == 0).then_some(())
    })
    .await;
    machine.delete("deep").await;
    machine.finish().await;
}

/// A server on this machine's loopback that answers every HTTP request, and counts its clients.
async fn service_of_the_machine() -> (u16, std::sync::Arc<std::sync::atomic::AtomicUsize>) {
    use tokio::io::AsyncWriteExt;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let clients = std::sync::Arc::<std::sync::atomic::AtomicUsize>::default();
    let counted = clients.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
            let _ = stream.write_all(answer).await;
        }
    });
    (port, clients)
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_and_hooks_that_name_a_host_do_not_reach_the_machines_loopback() {
    let machine = Machine::start().await;
    let (port, clients) = service_of_the_machine().await;
    let loopback = json!({"host": "127.0.0.1", "port": port});
    let by_name = json!({"host": "localhost", "port": port});
    let probe = |kind: &str, action: &Value| json!({kind: action, "periodSeconds": 1, "failureThreshold": 1});
    let pod = |extra: Value| {
        let mut container = json!({"name": "c", "image": "host", "command": ["sleep", "1000"]});
        let fields = extra.as_object().unwrap().clone();
        container.as_object_mut().unwrap().extend(fields);
        json!({"terminationGracePeriodSeconds": 0, "containers": [container]})
    };
    let attacks = [
        (
            "http",
            pod(json!({"readinessProbe": probe("httpGet", &loopback)})),
            "Unhealthy",
        ),
        (
            "name",
            pod(json!({"readinessProbe": probe("httpGet", &by_name)})),
            "Unhealthy",
        ),
        (
            "tcp",
            pod(json!({"livenessProbe": probe("tcpSocket", &loopback)})),
            "Unhealthy",
        ),
        (
            "hook",
            pod(json!({"lifecycle": {"postStart": {"httpGet": loopback}}})),
            "FailedPostStartHook",
        ),
    ];
    for (name, spec, _) in &attacks {
        machine.create(name, spec.clone()).await;
    }
    // The pod reaches its own loopback, so a probe of it passes.
    let mut own = pod(
        json!({"readinessProbe": probe("httpGet", &json!({"host": "127.0.0.1", "port": 8000}))}),
    );
    own["containers"][0]["command"] = json!([
        "python3",
        "-m",
        "http.server",
        "--bind",
        "127.0.0.1",
        "8000"
    ]);
    machine.create("own", own).await;
    machine.ready("own").await;
    for (name, _, event) in &attacks {
        machine.has_event(name, event, "").await;
    }
    assert_eq!(clients.load(std::sync::atomic::Ordering::SeqCst), 0);
    machine.finish().await;
}

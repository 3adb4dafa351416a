"""`agent-sandbox node` as the second node of a cluster whose first has a kubelet: its own machine by network, its label, its taint, its
RuntimeClass. Claims land on it, and kubectl reaches them through kube-apiserver."""

import json
import os
import statistics
import subprocess
import tempfile
import time
import urllib.request

import cluster
import whole
from checks import check, kubectl, run_checks, until
from cluster import AGENT_SANDBOX, CONTROL_PLANE, apply, claim, get, gone, pool, pool_is_full, ready
from whole import CHART, RELEASE, helm, runtime_template, values

SPACE = "second-node"
NODE, ADDRESS, PODS = "node-two", "10.99.0.3", "10.245.0.0/16"
LABEL = ("node.agents.x-k8s.io/runtime", "agent-sandbox")
state = {}


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


def make_machine():
    """A network namespace with a link to the first node: what a second machine is to the network."""
    ip("netns", "add", NODE)
    ip("link", "add", "two0", "type", "veth", "peer", "name", "eth0", "netns", NODE)
    ip("link", "set", "two0", "up")
    ip("route", "add", f"{ADDRESS}/32", "dev", "two0", "src", "10.99.0.2")
    ip("route", "add", PODS, "via", ADDRESS, "dev", "two0", "onlink")
    for command in (
        ("link", "set", "lo", "up"),
        ("address", "add", f"{ADDRESS}/24", "dev", "eth0"),
        ("link", "set", "eth0", "up"),
        ("route", "add", "default", "via", "10.99.0.2"),
    ):
        ip("-n", NODE, *command)
    subprocess.run(["nsenter", f"--net=/run/netns/{NODE}", "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)


def start_node():
    file = lambda name: os.path.join(CONTROL_PLANE, name)  # noqa: E731
    key, value = LABEL
    return cluster.Process(
        "node",
        f"--net=/run/netns/{NODE}",
        AGENT_SANDBOX,
        "node",
        f"--kubeconfig={file(f'{NODE}.kubeconfig')}",
        f"--node-name={NODE}",
        f"--data-dir={state['data']}",
        f"--listen={ADDRESS}:10250",
        f"--client-ca-file={file('ca.crt')}",
        f"--tls-cert-file={file(f'{NODE}-serving.crt')}",
        f"--tls-private-key-file={file(f'{NODE}-serving.key')}",
        f"--pod-cidr={PODS}",
        f"--node-labels={key}={value}",
        f"--register-with-taints={key}={value}:NoSchedule",
        program="nsenter",
    )


def taken(name, pool_name):
    apply(claim(name, SPACE, warmPoolRef={"name": pool_name}))
    return ready("sandboxclaim", name, SPACE)["status"]["sandbox"]["name"]


@check
def the_chart_permits_the_node_to_join():
    helm("upgrade", RELEASE, CHART, "--reuse-values", *values("--set=node.enabled=true", f"--set=node.names={{{NODE}}}"))
    cluster.namespace(SPACE)
    make_machine()
    home = tempfile.mkdtemp(prefix="node-", dir=CONTROL_PLANE)
    # Where `image load` looks for the node's images.
    state["data"] = f"{home}/node"
    os.mkdir(state["data"], 0o700)
    load = [AGENT_SANDBOX, "image", "load", os.environ["ARCHIVE_PYTHON_RUNTIME"], "--name", whole.RUNTIME, "--data-dir", home]
    subprocess.run(load, check=True, stdout=subprocess.DEVNULL)
    state["node"] = start_node()
    until(lambda: whole.node_is("True", NODE), "the second node to be Ready")
    found = get("node", NODE, "default")
    taints = [taint for taint in found["spec"].get("taints", []) if taint["key"] == LABEL[0]]
    assert taints == [{"key": LABEL[0], "value": LABEL[1], "effect": "NoSchedule"}], found["spec"]
    assert found["metadata"]["labels"][LABEL[0]] == LABEL[1]
    enforced = lambda: cluster.condition(get("node", NODE, "default"), "NetworkPolicyEnforced").get("status") == "True"  # noqa: E731
    until(enforced, "the node to enforce policies")


@check
def pods_of_the_runtime_class_land_on_it_and_others_do_not():
    apply(
        [
            runtime_template("fast", SPACE, pod={"runtimeClassName": LABEL[1]}),
            runtime_template("ordinary", SPACE),
            pool("fast", SPACE, "fast", 2),
            pool("ordinary", SPACE, "ordinary", 1),
        ]
    )
    for name, node in (("fast", NODE), ("ordinary", cluster.NODE)):
        pool_is_full(name, SPACE)
        state[name] = taken(name, name)
        assert get("pod", state[name], SPACE)["spec"]["nodeName"] == node, name


@check
def kubectl_reaches_it_through_the_api_server():
    name = state["fast"]
    assert kubectl("exec", name, "-n", SPACE, "--", "sh", "-c", "echo out; hostname") == f"out\n{name}\n"
    assert "serving" in kubectl("logs", name, "-n", SPACE)
    with tempfile.NamedTemporaryFile("w", dir=CONTROL_PLANE) as file:
        file.write("copied")
        file.flush()
        os.chmod(file.name, 0o644)
        kubectl("cp", file.name, f"{SPACE}/{name}:/tmp/copy")
    assert kubectl("exec", name, "-n", SPACE, "--", "cat", "/tmp/copy") == "copied"
    port = cluster.free_port()
    forward = subprocess.Popen(["kubectl", "port-forward", f"pod/{name}", f"{port}:8888", "-n", SPACE], stdout=subprocess.DEVNULL)
    try:

        def answers():
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
                    return answer.status == 200
            except OSError:
                return False

        until(answers, "an answer through the forwarded port")
    finally:
        forward.terminate()
        forward.wait()


@check
def the_router_on_the_first_node_reaches_it_and_other_pods_do_not():
    request = urllib.request.Request(
        f"{cluster.start_router()}/execute",
        data=json.dumps({"command": "python3 -c 'print(6*7)'"}).encode(),
        headers={"X-Sandbox-ID": state["fast"], "X-Sandbox-Namespace": SPACE, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert json.load(answer)["stdout"] == "42\n"
    address = get("pod", state["fast"], SPACE)["status"]["podIP"]
    dial = f"import socket; socket.create_connection(({address!r}, 8888), 3); print('connected')"
    apply(whole.pod("stranger", SPACE, image=whole.RUNTIME))
    whole.pod_ready("stranger", SPACE)
    said = kubectl("exec", "stranger", "-n", SPACE, "--", "sh", "-c", f'python3 -c "{dial}" 2>&1 | tail -1')
    assert "connected" not in said, said


@check
def a_suspended_sandbox_comes_back_on_it():
    kubectl("patch", "sandbox", state["fast"], "-n", SPACE, "--type=merge", "-p", '{"spec":{"operatingMode":"Suspended"}}')
    gone("pod", state["fast"], SPACE)
    kubectl("patch", "sandbox", state["fast"], "-n", SPACE, "--type=merge", "-p", '{"spec":{"operatingMode":"Running"}}')
    ready("sandbox", state["fast"], SPACE)
    assert get("pod", state["fast"], SPACE)["spec"]["nodeName"] == NODE


@check
def a_restart_of_the_node_leaves_its_pods_running():
    before = get("pod", state["fast"], SPACE)
    state["node"].end()
    state["node"] = start_node()

    def answers():
        try:
            return kubectl("exec", state["fast"], "-n", SPACE, "--", "echo", "there") == "there\n"
        except AssertionError:
            return False

    until(answers, "the node to answer")
    after = get("pod", state["fast"], SPACE)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0, after["status"]


@check
def cold_starts_on_both_nodes_in_one_run():
    """No bound is tested: the figures are for docs/benchmarks.md."""
    took = {"kubelet": [], "agent-sandbox node": []}
    for number in range(8):
        for where, template in (("kubelet", "ordinary"), ("agent-sandbox node", "fast")):
            pod = get("sandboxtemplate", template, SPACE)["spec"]["podTemplate"]
            name = f"cold-{template}-{number}"
            sandbox = cluster.thing("Sandbox", name, SPACE, {"podTemplate": pod})
            begin = time.monotonic()
            apply(sandbox)
            kubectl("wait", "--for=condition=Ready", f"sandbox/{name}", "-n", SPACE, "--timeout=120s")
            took[where].append(time.monotonic() - begin)
            kubectl("delete", "sandbox", name, "-n", SPACE, "--timeout=120s")
            gone("pod", name, SPACE)
    for where, seconds in took.items():
        print(f"        {where}: median {statistics.median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f} s", flush=True)


@check
def the_node_gives_the_machine_back():
    kubectl("delete", "namespace", SPACE, "--timeout=200s")
    state["node"].end()
    subprocess.run([AGENT_SANDBOX, "reset", "--data-dir", state["data"]], stdout=subprocess.DEVNULL, check=True)
    kubectl("delete", "node", NODE)
    helm("upgrade", RELEASE, CHART, "--reuse-values", *values("--set=node.enabled=false"))
    assert not get("clusterrolebinding", "agent-sandbox-node", "default")
    ip("link", "delete", "two0")
    ip("netns", "delete", NODE)


run_checks()

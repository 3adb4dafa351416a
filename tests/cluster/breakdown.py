"""What breaks on a whole cluster while sandboxes run: the kubelet and containerd restart, the node is lost, the leader dies, the API server
restarts. Running sandboxes are not touched, claims are met, and no sandbox is held by two claims."""

import os
import signal
import time

import cluster
import whole
from checks import check, kubectl, run_checks, until
from cluster import SYSTEM, apply, claim, get, is_ready, items, pool, pool_is_full, ready
from whole import node_is, part, restart, runtime_template

SPACE = "breakdown"
BURST = 16
state = {}


def fate(name):
    pod = get("pod", name, SPACE)
    return pod["metadata"]["uid"], [one["restartCount"] for one in pod["status"]["containerStatuses"]]


def answers(name):
    try:
        return kubectl("exec", name, "-n", SPACE, "--", "cat", "/tmp/mark") == "mine\n"
    except AssertionError:
        return False


def unharmed():
    """The claimed sandbox is Ready, its pod is the same one, and its files are there."""
    until(lambda: is_ready(get("sandbox", state["sandbox"], SPACE)) and answers(state["sandbox"]), "the sandbox to answer")
    assert fate(state["sandbox"]) == state["fate"], (fate(state["sandbox"]), state["fate"])


def burst(name, disturb):
    """Claims in waves, with a disturbance after the first; all are met, each by a sandbox of its own."""
    names = [f"{name}-{number}" for number in range(BURST)]
    begin = time.monotonic()
    accepted = lambda things: until(lambda: _applies(things), "claims to be accepted")  # noqa: E731
    accepted([claim(one, SPACE, warmPoolRef={"name": "warm"}) for one in names[:4]])
    disturb()
    accepted([claim(one, SPACE, warmPoolRef={"name": "warm"}) for one in names[4:]])

    def met():
        try:
            return {one["metadata"]["name"] for one in items("sandboxclaims", SPACE) if is_ready(one)} >= set(names)
        except AssertionError:
            return False

    until(met, f"{BURST} claims to be met")
    print(f"        {BURST} claims were met within {time.monotonic() - begin:.1f} s", flush=True)
    holders = cluster.assert_exclusive(SPACE)
    assert len([one for one in holders.values() if one in names]) == BURST
    kubectl("delete", "sandboxclaims", *names, "-n", SPACE, "--timeout=200s")
    pool_is_full("warm", SPACE)


def _applies(things):
    try:
        return apply(things)
    except AssertionError:
        return False


@check
def a_sandbox_is_claimed():
    cluster.namespace(SPACE)
    soon = [
        {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
        for taint in ("unreachable", "not-ready")
    ]
    apply([runtime_template("plain", SPACE, pod={"tolerations": soon}), pool("warm", SPACE, "plain", 4)])
    pool_is_full("warm", SPACE)
    apply(claim("mine", SPACE, warmPoolRef={"name": "warm"}))
    state["sandbox"] = ready("sandboxclaim", "mine", SPACE)["status"]["sandbox"]["name"]
    kubectl("exec", state["sandbox"], "-n", SPACE, "--", "sh", "-c", "echo mine > /tmp/mark")
    pool_is_full("warm", SPACE)
    state["fate"] = fate(state["sandbox"])


@check
def the_kubelet_is_restarted():
    restart("kubelet", signal.SIGKILL)
    unharmed()
    burst("kubelet", lambda: None)


@check
def containerd_is_restarted():
    restart("containerd", signal.SIGKILL)
    unharmed()
    burst("containerd", lambda: None)


@check
def the_leading_controller_is_killed_in_a_burst():
    def kill():
        holder = get("lease", "a3317529.agent-sandbox.x-k8s.io", SYSTEM)["spec"]["holderIdentity"]
        leader = next(pod for pod in items("pods", SYSTEM) if holder.startswith(pod["metadata"]["name"]))
        # Without a warning: deleting the pod would let the controller release its lease.
        for process in whole.processes(leader["metadata"]["uid"], "agent-sandbox"):
            os.kill(process, signal.SIGKILL)

    burst("killed", kill)
    unharmed()
    whole.rolled_out("agent-sandbox-controller")


@check
def the_api_server_is_restarted_in_a_burst():
    burst("api", lambda: restart("kube-apiserver", signal.SIGKILL))
    unharmed()


@check
def the_pods_of_a_lost_node_are_replaced_when_it_is_back():
    kubelet = part("kubelet")
    os.kill(kubelet, signal.SIGSTOP)
    try:
        until(lambda: not node_is("True"), "the node to be lost")
        until(lambda: not is_ready(get("sandbox", state["sandbox"], SPACE)), "the sandbox not to be Ready any more")
        until(lambda: get("pod", state["sandbox"], SPACE)["metadata"].get("deletionTimestamp"), "the pod to be evicted")
    finally:
        os.kill(kubelet, signal.SIGCONT)
    until(lambda: node_is("True"), "the node to be back")
    new = lambda: (pod := get("pod", state["sandbox"], SPACE)) and pod["metadata"]["uid"] != state["fate"][0] and is_ready(pod)  # noqa: E731
    until(new, "the sandbox to have another pod")
    ready("sandbox", state["sandbox"], SPACE)
    ready("sandboxclaim", "mine", SPACE)
    pool_is_full("warm", SPACE)
    whole.rolled_out("agent-sandbox-controller")
    whole.rolled_out("coredns", "kube-system")


@check
def nothing_is_left():
    kubectl("delete", "namespace", SPACE, "--timeout=200s")


run_checks()

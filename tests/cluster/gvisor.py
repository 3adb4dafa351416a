"""Sandboxes in gVisor: a RuntimeClass that a kubelet hands to containerd, and containerd to runsc."""

import json
import urllib.request

import cluster
from checks import check, kubectl, run_checks
from cluster import apply, claim, get, pool, pool_is_full, ready
from whole import runtime_template

SPACE = "gvisor"
state = {}


@check
def a_pool_of_gvisor_fills_and_a_claim_takes_from_it():
    cluster.namespace(SPACE)
    runtime_class = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "gvisor"}, "handler": "runsc"}
    apply([runtime_class, runtime_template("kernel", SPACE, pod={"runtimeClassName": "gvisor"}), pool("kernel", SPACE, "kernel", 1)])
    pool_is_full("kernel", SPACE)
    apply(claim("mine", SPACE, warmPoolRef={"name": "kernel"}))
    state["sandbox"] = ready("sandboxclaim", "mine", SPACE)["status"]["sandbox"]["name"]
    assert get("pod", state["sandbox"], SPACE)["spec"]["runtimeClassName"] == "gvisor"


@check
def its_commands_run_on_another_kernel():
    said = kubectl("exec", state["sandbox"], "-n", SPACE, "--", "dmesg")
    assert "gVisor" in said, said


@check
def the_router_runs_commands_in_it():
    request = urllib.request.Request(
        f"{cluster.start_router()}/execute",
        data=json.dumps({"command": "python3 -c 'print(6*7)'"}).encode(),
        headers={"X-Sandbox-ID": state["sandbox"], "X-Sandbox-Namespace": SPACE, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["stdout"] == "42\n"


@check
def nothing_is_left():
    kubectl("delete", "namespace", SPACE, "--timeout=180s")
    kubectl("delete", "runtimeclass", "gvisor")


run_checks()

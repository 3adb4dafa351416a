"""Claims with volumes: suspended and resumed, with their files, on volumes that the cluster binds."""

import os
import subprocess

import cluster
from checks import check, kubectl, run_checks, until
from cluster import CONTROL_PLANE, apply, claim, get, gone, items, pool, pool_is_full, ready
from whole import runtime_template

SPACE = "volumes"
state = {}


def volume(name):
    path = f"{CONTROL_PLANE}/volumes/{name}"
    os.makedirs(path, exist_ok=True)
    # The runtime's image has a user of its own, and nothing changes the owner of a hostPath.
    os.chmod(path, 0o777)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "by-hand",
            "hostPath": {"path": path},
        },
    }


def run(*arguments):
    """Our command line, with the cluster's administrator as its user."""
    result = subprocess.run([cluster.AGENT_SANDBOX, *arguments, "-n", SPACE], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, f"{arguments}: {result.stdout} {result.stderr}"
    return result.stdout


def execute(command):
    return kubectl("exec", state["sandbox"], "-n", SPACE, "--", "sh", "-c", command)


@check
def a_claim_has_a_volume_of_its_own():
    cluster.namespace(SPACE)
    claimed = {"accessModes": ["ReadWriteOnce"], "storageClassName": "by-hand", "resources": {"requests": {"storage": "1Gi"}}}
    apply(
        [
            *(volume(f"volume-{number}") for number in range(4)),
            runtime_template(
                "workspace",
                SPACE,
                container={"volumeMounts": [{"name": "workspace", "mountPath": "/app"}]},
                volumeClaimTemplates=[{"metadata": {"name": "workspace"}, "spec": claimed}],
            ),
            pool("workspace", SPACE, "workspace", 1),
        ]
    )
    pool_is_full("workspace", SPACE)
    apply(claim("mine", SPACE, warmPoolRef={"name": "workspace"}))
    state["sandbox"] = ready("sandboxclaim", "mine", SPACE)["status"]["sandbox"]["name"]
    execute("echo kept > /app/note; echo lost > /tmp/note")


@check
def its_files_survive_a_suspension_and_the_rest_does_not():
    before = get("pod", state["sandbox"], SPACE)["metadata"]["uid"]
    run("suspend", "mine")
    gone("pod", state["sandbox"], SPACE)
    suspended = lambda: cluster.condition(get("sandbox", state["sandbox"], SPACE), "Suspended").get("status") == "True"  # noqa: E731
    until(suspended, "the sandbox to be suspended")
    run("resume", "mine")
    ready("sandbox", state["sandbox"], SPACE)
    assert get("pod", state["sandbox"], SPACE)["metadata"]["uid"] != before
    assert execute("cat /app/note; cat /tmp/note 2>/dev/null || true") == "kept\n"


@check
def the_volume_claim_goes_with_the_claim():
    kubectl("delete", "sandboxclaim", "mine", "-n", SPACE)
    gone("sandbox", state["sandbox"], SPACE)
    pool_is_full("workspace", SPACE)
    until(lambda: len(items("pvc", SPACE)) == 1, "only the pool's volume claim to be left")


@check
def nothing_is_left():
    kubectl("delete", "namespace", SPACE, "--timeout=180s")
    kubectl("delete", "pv", "--all", "--timeout=180s")


run_checks()

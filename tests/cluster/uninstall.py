"""Uninstalling leaves nothing of the installation, and deleting the definitions nothing of the sandboxes."""

import json

import cluster
from checks import check, kubectl, run_checks, until
from cluster import SYSTEM, apply, get, pool, pool_is_full
from whole import RELEASE, helm, runtime_template

SPACE = "last"
CLUSTER_KINDS = ("clusterroles", "clusterrolebindings", "runtimeclasses", "crds", "apiservices", "validatingwebhookconfigurations", "mutatingwebhookconfigurations")


def ours():
    """Objects of the whole cluster that name this project."""
    found = []
    for kind in CLUSTER_KINDS:
        for one in json.loads(kubectl("get", kind, "-o", "json"))["items"]:
            name = one["metadata"]["name"]
            if "agent-sandbox" in name or "agents.x-k8s.io" in name:
                found.append(f"{kind}/{name}")
    return found


@check
def the_release_goes_and_sandboxes_stay():
    cluster.namespace(SPACE)
    apply([runtime_template("plain", SPACE), pool("plain", SPACE, "plain", 1)])
    pool_is_full("plain", SPACE)
    helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait")
    for file in ("router/router.yaml",):
        kubectl("delete", "-f", f"{cluster.REPOSITORY}/deploy/{file}", "--ignore-not-found", "--timeout=120s")
    assert cluster.items("sandboxes", SPACE), "sandboxes stay"


@check
def the_definitions_take_the_sandboxes_with_them():
    kubectl("delete", "-f", f"{cluster.REPOSITORY}/deploy/helm/crds/", "--timeout=200s")
    until(lambda: not cluster.items("pods", SPACE), "the pods to go")
    kubectl("delete", "namespace", SPACE, SYSTEM, "--ignore-not-found", "--timeout=200s")
    kubectl("delete", "clusterrole,clusterrolebinding", "agent-sandbox-router-default", "--ignore-not-found")
    until(lambda: not get("namespace", SYSTEM, "default"), "the namespace to go")
    assert not ours(), ours()


run_checks()

"""The install paths without helm: release manifests, kustomize, the files of the repository."""

import json
import os
import subprocess
import tempfile

import cluster
from checks import check, kubectl, run_checks, until
from cluster import REPOSITORY, SYSTEM, get, items

XTASK = os.environ["XTASK"]
release = tempfile.mkdtemp(dir=cluster.CONTROL_PLANE)


def file(name):
    return os.path.join(release, name)


@check
def a_release_is_rendered():
    subprocess.run([XTASK, "release", "--tag=v0.0.0-test", "--image-prefix=registry.example/", "--output", release], check=True, stdout=subprocess.DEVNULL)
    assert sorted(os.listdir(release)) == ["all-in-one.yaml", "extensions.yaml", "manifest.yaml", "router.yaml"]


@check
def the_core_is_applied_and_applied_again():
    kubectl("apply", "-f", file("manifest.yaml"))
    deployment = get("deployment", "agent-sandbox-controller", SYSTEM)
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert container["args"] == ["--leader-elect=true"]
    assert container["image"].endswith("/agent-sandbox-controller:v0.0.0-test")
    kubectl("wait", "--for=condition=Established", "crd/sandboxes.agents.x-k8s.io", "--timeout=180s")
    again = kubectl("apply", "-f", file("manifest.yaml"))
    assert all(line.endswith("unchanged") for line in again.splitlines()), again


@check
def the_extensions_are_added():
    kubectl("apply", "-f", file("extensions.yaml"))
    deployment = get("deployment", "agent-sandbox-controller", SYSTEM)
    assert deployment["spec"]["template"]["spec"]["containers"][0]["args"] == ["--leader-elect=true", "--extensions"]
    names = [one["metadata"]["name"] for one in items("crd", "default")]
    assert len([name for name in names if name.endswith("agents.x-k8s.io")]) == 4, names


@check
def all_in_one_is_the_same():
    again = kubectl("apply", "-f", file("all-in-one.yaml"))
    assert all(line.endswith("unchanged") for line in again.splitlines()), again


@check
def pods_of_the_deployment_are_admitted_in_a_restricted_namespace():
    kubectl("label", "namespace", SYSTEM, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
    kubectl("rollout", "restart", "deployment/agent-sandbox-controller", "-n", SYSTEM)
    pods = lambda: items("pods", SYSTEM, "-l", "app=agent-sandbox-controller")  # noqa: E731
    until(pods, "a pod of the Deployment")


@check
def the_router_is_applied():
    kubectl("apply", "-f", file("router.yaml"))
    assert get("service", "sandbox-router-svc", SYSTEM)


def names(things):
    return sorted(f"{thing['kind']} {thing['metadata']['name']}" for thing in things)


CORE = [
    "ClusterRole agent-sandbox-controller",
    "ClusterRoleBinding agent-sandbox-controller",
    "CustomResourceDefinition sandboxes.agents.x-k8s.io",
    "Deployment agent-sandbox-controller",
    "Namespace agent-sandbox-system",
    "Service agent-sandbox-controller",
    "ServiceAccount agent-sandbox-controller",
]
EXTENSIONS = [
    "ClusterRole agent-sandbox-controller-extensions",
    "ClusterRoleBinding agent-sandbox-controller-extensions",
    "CustomResourceDefinition sandboxclaims.extensions.agents.x-k8s.io",
    "CustomResourceDefinition sandboxtemplates.extensions.agents.x-k8s.io",
    "CustomResourceDefinition sandboxwarmpools.extensions.agents.x-k8s.io",
]


@check
def kustomize_renders_the_core_and_a_component_for_the_extensions():
    overlay = tempfile.mkdtemp(dir=cluster.CONTROL_PLANE)
    base = os.path.relpath(f"{REPOSITORY}/deploy", os.path.realpath(overlay))
    with open(f"{overlay}/kustomization.yaml", "w") as written:
        json.dump({"resources": [base], "components": [f"{base}/components/extensions"]}, written)
    for folder, objects, arguments in (
        (f"{REPOSITORY}/deploy", CORE, ["--leader-elect=true"]),
        (overlay, CORE + EXTENSIONS, ["--leader-elect=true", "--extensions"]),
    ):
        shown = kubectl("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-o", "json", "-k", folder)
        things = json.loads(shown)["items"]
        assert names(things) == sorted(objects), names(things)
        deployment = next(thing for thing in things if thing["kind"] == "Deployment")
        assert deployment["spec"]["template"]["spec"]["containers"][0]["args"] == arguments


@check
def the_binary_prints_the_same_installation():
    for mode, objects, arguments in (
        (["--core"], CORE, ["--leader-elect=true"]),
        ([], CORE + EXTENSIONS, ["--leader-elect=true", "--extensions"]),
    ):
        things = []
        for what in ("crds", "rbac", "manifests"):
            printed = subprocess.run([cluster.AGENT_SANDBOX, "generate", what, *mode], check=True, capture_output=True, text=True).stdout
            shown = kubectl("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-o", "json", "-f", "-", text=printed)
            shown = json.loads(shown)
            things += shown.get("items", [shown])
        assert names(things) == sorted(objects), names(things)
        deployment = next(thing for thing in things if thing["kind"] == "Deployment")
        assert deployment["spec"]["template"]["spec"]["containers"][0]["args"] == arguments


@check
def everything_can_be_deleted():
    kubectl("delete", "-f", file("router.yaml"), "--wait=false")
    # kube-apiserver prepares to store a kind when a client first requests it. A definition that is deleted before that may be forgotten
    # until its finalizer looks at all of them again, five minutes later.
    kubectl("get", "sandboxes,sandboxclaims,sandboxtemplates,sandboxwarmpools", "--all-namespaces")
    kubectl("delete", "-f", file("all-in-one.yaml"), "--timeout=180s")
    assert not [one for one in items("crd", "default") if one["metadata"]["name"].endswith("agents.x-k8s.io")]


run_checks()

"""A cluster of release 0.4.6 of the other implementation is taken over in place, and given back: nothing is made anew, no pod restarts,
claims keep their sandboxes."""

import os
import subprocess
import time

import cluster
from checks import check, kubectl, run_checks, until
from cluster import REPOSITORY, apply, condition, get, gone, items, pool_is_full, ready

SPACE = "moved"
KINDS = ("sandboxes", "sandboxclaims", "sandboxtemplates", "sandboxwarmpools", "pods", "services", "networkpolicies")
DEFINITIONS = (
    "sandboxes.agents.x-k8s.io",
    "sandboxclaims.extensions.agents.x-k8s.io",
    "sandboxtemplates.extensions.agents.x-k8s.io",
    "sandboxwarmpools.extensions.agents.x-k8s.io",
)
state = {}


def old(kind, name, **spec):
    """An object as its users wrote it: in the only version that they had."""
    thing = cluster.thing(kind, name, SPACE, spec)
    thing["apiVersion"] = thing["apiVersion"].replace("v1beta1", "v1alpha1")
    return thing


def upstream_definitions():
    folder = cluster.upstream("crds")
    for file in sorted(os.listdir(folder)):
        kubectl("apply", "--server-side", "--force-conflicts", "-f", os.path.join(folder, file))
    kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")

    def served():
        # This command asks anew, and all others remember what it was told.
        groups = [kubectl("api-resources", f"--api-group={group}") for group in ("agents.x-k8s.io", "extensions.agents.x-k8s.io")]
        return all("v1alpha1" in group and "v1beta1" not in group for group in groups)

    until(served, "only v1alpha1 to be served")


def fates():
    """What must stay the same: each object's identity, and how often each container was started."""
    found = {}
    for kind in KINDS:
        for thing in items(kind, SPACE):
            found[kind, thing["metadata"]["name"]] = thing["metadata"]["uid"]
    for pod in items("pods", SPACE):
        for container in pod["status"].get("containerStatuses", []):
            key = "container", pod["metadata"]["name"], container["name"]
            found[key] = (container["containerID"], container["restartCount"])
    return found


def bindings():
    return {
        found["metadata"]["name"]: ((found.get("status") or {}).get("sandbox") or {}).get("name")
        for found in items("sandboxclaims", SPACE)
    }


def settled():
    """Waits until nobody writes: two looks, a second apart, that find every object in the same version."""

    def versions():
        return [(kind, thing["metadata"]["name"], thing["metadata"]["resourceVersion"]) for kind in KINDS for thing in items(kind, SPACE)]

    def quiet():
        before = versions()
        time.sleep(1)
        return versions() == before

    until(quiet, "everybody to be content")


def assert_kept(before, released=()):
    now = fates()
    lost = {key: (value, now.get(key)) for key, value in before.items() if now.get(key) != value and key not in released}
    assert not lost, f"changed: {lost}"


def holds_the_lease(process):
    lease = get("lease", "a3317529.agent-sandbox.x-k8s.io", cluster.SYSTEM)
    holder = ((lease or {}).get("spec") or {}).get("holderIdentity")
    return holder and holder != state.get("holder") and process.child.poll() is None and holder


def takes_over(process):
    state["holder"] = until(lambda: holds_the_lease(process), f"{process.name} to lead")


@check
def a_cluster_of_the_other_implementation_has_all_kinds():
    kubectl("apply", "-f", f"{REPOSITORY}/tests/kubernetes/upstream-0.4.6.yaml")
    upstream_definitions()
    state["node"] = cluster.Node()
    state["controller"] = cluster.Upstream()
    takes_over(state["controller"])
    cluster.namespace(SPACE)
    template = {"podTemplate": cluster.pod_template()}
    apply(
        [
            old("Sandbox", "alone", **template),
            old("Sandbox", "asleep", replicas=1, **template),
            old("SandboxTemplate", "plain", **template),
            old("SandboxTemplate", "rolled", **template),
            old("SandboxWarmPool", "warm", replicas=3, sandboxTemplateRef={"name": "plain"}),
            old(
                "SandboxWarmPool",
                "recreating",
                replicas=1,
                sandboxTemplateRef={"name": "rolled"},
                updateStrategy={"type": "Recreate"},
            ),
        ]
    )
    ready("sandbox", "alone", SPACE)
    ready("sandbox", "asleep", SPACE)
    kubectl("scale", "sandbox", "asleep", "-n", SPACE, "--replicas=0")
    gone("pod", "asleep", SPACE)
    pool_is_full("warm", SPACE)
    pool_is_full("recreating", SPACE)
    apply(
        [
            old("SandboxClaim", "from-the-pool", sandboxTemplateRef={"name": "plain"}),
            old("SandboxClaim", "cold", sandboxTemplateRef={"name": "plain"}, warmpool="none"),
        ]
    )
    ready("sandboxclaim", "from-the-pool", SPACE)
    ready("sandboxclaim", "cold", SPACE)
    pool_is_full("warm", SPACE)
    settled()
    state["before"], state["bindings"] = fates(), bindings()
    assert all(state["bindings"].values()), state["bindings"]


@check
def ours_takes_everything_over_as_it_is():
    state["controller"].end()
    for file in sorted(os.listdir(f"{REPOSITORY}/deploy/crds")):
        kubectl("apply", "--server-side", "--force-conflicts", "-f", f"{REPOSITORY}/deploy/crds/{file}")
    state["controller"] = cluster.Controller()
    takes_over(state["controller"])
    # It has looked at the pool when it has answered a claim from it.
    apply(cluster.claim("new", SPACE, sandboxTemplateRef={"name": "plain"}))
    new = ready("sandboxclaim", "new", SPACE)["status"]["sandbox"]["name"]
    assert ("sandboxes", new) in state["before"], f"{new} was not among the warm sandboxes"
    pool_is_full("warm", SPACE)
    settled()
    assert_kept(state["before"])
    assert {name: bindings()[name] for name in state["bindings"]} == state["bindings"]
    cluster.assert_exclusive(SPACE)
    for name in ("alone", state["bindings"]["cold"], state["bindings"]["from-the-pool"]):
        assert cluster.is_ready(get("sandbox", name, SPACE)), name
    assert condition(get("sandbox", "asleep", SPACE), "Suspended").get("status") == "True"


@check
def what_was_taken_over_still_works():
    kubectl("scale", "sandbox", "asleep", "-n", SPACE, "--replicas=1")
    ready("sandbox", "asleep", SPACE)
    kubectl("scale", "sandboxwarmpool", "warm", "-n", SPACE, "--replicas=2")
    pool_is_full("warm", SPACE)
    kubectl("delete", "sandboxclaim", "from-the-pool", "-n", SPACE)
    gone("sandbox", state["bindings"]["from-the-pool"], SPACE)
    gone("pod", state["bindings"]["from-the-pool"], SPACE)
    assert "orbidden" not in state["controller"].said(), state["controller"].said()[-3000:]


@check
def a_claim_that_the_older_release_cannot_read_stops_the_way_back():
    apply(cluster.claim("by-pool", SPACE, warmPoolRef={"name": "warm"}))
    ready("sandboxclaim", "by-pool", SPACE)
    state["controller"].end()
    refused = subprocess.run([f"{REPOSITORY}/deploy/back-to-v1alpha1.sh"], capture_output=True, text=True)
    assert refused.returncode == 1 and f"{SPACE}/by-pool" in refused.stderr, refused
    kubectl("delete", "sandboxclaim", "by-pool", "-n", SPACE)
    stored = [get("crd", name, "default")["status"]["storedVersions"] for name in DEFINITIONS]
    assert all(versions == ["v1alpha1", "v1beta1"] for versions in stored), stored


@check
def the_other_implementation_takes_it_back_after_a_rewrite():
    state["controller"] = cluster.Controller()
    takes_over(state["controller"])
    pool_is_full("warm", SPACE)
    settled()
    state["controller"].end()
    before, bound = fates(), bindings()
    rewritten = subprocess.run([f"{REPOSITORY}/deploy/back-to-v1alpha1.sh"], capture_output=True, text=True)
    assert rewritten.returncode == 0, rewritten
    upstream_definitions()
    for name in DEFINITIONS:
        definition = get("crd", name, "default")
        assert definition["status"]["storedVersions"] == ["v1alpha1"], definition["status"]
        assert [version["name"] for version in definition["spec"]["versions"]] == ["v1alpha1"]
    # All of it can be read: nothing is left in a version that is not served.
    assert_kept(before)
    state["controller"] = cluster.Upstream()
    takes_over(state["controller"])
    apply(old("SandboxClaim", "after", sandboxTemplateRef={"name": "plain"}))
    after = ready("sandboxclaim", "after", SPACE)["status"]["sandbox"]["name"]
    assert ("sandboxes", after) in before, f"{after} was not among the warm sandboxes"
    pool_is_full("warm", SPACE)
    settled()
    assert_kept(before)
    assert {name: bindings()[name] for name in bound} == bound
    cluster.assert_exclusive(SPACE)


@check
def the_node_gives_the_machine_back():
    state["node"].leave()


run_checks()

"""A cluster of a release of the other implementation is taken over in place, and given back: nothing is made anew, no pod restarts, claims
keep their sandboxes. Release 0.4.6 knows v1alpha1 alone and claims by template; 0.5.0 stores v1beta1, knows claims by pool and has its
definitions converted by a webhook."""

import os
import subprocess
import tempfile
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
RELEASE = os.environ["UPSTREAM_RELEASE"]
KNOWS_V1BETA1 = RELEASE != "v0.4.6"


def old(kind, name, **spec):
    """An object as its users wrote it: in the newest version that they had."""
    thing = cluster.thing(kind, name, SPACE, spec)
    if not KNOWS_V1BETA1:
        thing["apiVersion"] = thing["apiVersion"].replace("v1beta1", "v1alpha1")
    return thing


# How a claim asks for a sandbox of the pool `warm`, in the words of the release; and how it asks for one that is made for it.
SOURCE = {"warmPoolRef": {"name": "warm"}} if KNOWS_V1BETA1 else {"sandboxTemplateRef": {"name": "plain"}}
COLD = {"env": [{"name": "COLD", "value": "yes"}]} if KNOWS_V1BETA1 else {"warmpool": "none"}


def old_claim(name, **spec):
    return old("SandboxClaim", name, **SOURCE, **spec)


def upstream_identity():
    """The identity, the roles and the Deployment of the release; its program is a process of this script, so there are no replicas."""
    if not KNOWS_V1BETA1:
        kubectl("apply", "-f", f"{REPOSITORY}/tests/kubernetes/upstream-0.4.6.yaml")
        return
    for file in ("controller", "rbac.generated", "extensions", "extensions-rbac.generated", "extensions.controller"):
        with open(cluster.upstream(f"manifests/{file}.yaml"), encoding="utf-8") as manifest:
            apply(manifest.read().replace("replicas: 1", "replicas: 0"))


def upstream_controller():
    if not KNOWS_V1BETA1:
        return cluster.Upstream()
    certificates = tempfile.mkdtemp(dir=cluster.CONTROL_PLANE)
    return cluster.Upstream(f"--webhook-cert-dir={certificates}", f"--webhook-port={cluster.free_port()}")


def our_definitions():
    if KNOWS_V1BETA1:
        subprocess.run([f"{REPOSITORY}/deploy/without-webhook.sh"], check=True)
    for file in sorted(os.listdir(f"{REPOSITORY}/deploy/crds")):
        kubectl("apply", "--server-side", "--force-conflicts", "-f", f"{REPOSITORY}/deploy/crds/{file}")


def upstream_definitions():
    folder = cluster.upstream("crds")
    for file in sorted(os.listdir(folder)):
        kubectl("apply", "--server-side", "--force-conflicts", "-f", os.path.join(folder, file))
    kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=180s")

    def served():
        # This command refreshes the discovery cache that the other commands use.
        groups = [kubectl("api-resources", f"--api-group={group}") for group in ("agents.x-k8s.io", "extensions.agents.x-k8s.io")]
        return all(KNOWS_V1BETA1 == ("v1beta1" in group) for group in groups)

    until(served, "the versions of the release to be served")


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
    """Waits until no controller writes: two lists, a second apart, with every object in the same version."""

    def versions():
        return [(kind, thing["metadata"]["name"], thing["metadata"]["resourceVersion"]) for kind in KINDS for thing in items(kind, SPACE)]

    def quiet():
        before = versions()
        time.sleep(1)
        return versions() == before

    until(quiet, "all controllers to be idle")


def assert_kept(before, released=()):
    now = fates()
    lost = {key: (value, now.get(key)) for key, value in before.items() if now.get(key) != value and key not in released}
    assert not lost, f"changed: {lost}"


def suspend(name):
    if KNOWS_V1BETA1:
        kubectl("patch", "sandbox", name, "-n", SPACE, "--type=merge", "-p", '{"spec":{"operatingMode":"Suspended"}}')
    else:
        kubectl("scale", "sandbox", name, "-n", SPACE, "--replicas=0")


def resume(name):
    if KNOWS_V1BETA1:
        kubectl("patch", "sandbox", name, "-n", SPACE, "--type=merge", "-p", '{"spec":{"operatingMode":"Running"}}')
    else:
        kubectl("scale", "sandbox", name, "-n", SPACE, "--replicas=1")


def holds_the_lease(process):
    lease = get("lease", "a3317529.agent-sandbox.x-k8s.io", cluster.SYSTEM)
    holder = ((lease or {}).get("spec") or {}).get("holderIdentity")
    return holder and holder != state.get("holder") and process.child.poll() is None and holder


def takes_over(process):
    state["holder"] = until(lambda: holds_the_lease(process), f"{process.name} to lead")


@check
def a_cluster_of_the_other_implementation_has_all_kinds():
    upstream_identity()
    upstream_definitions()
    state["node"] = cluster.start_node()
    state["controller"] = upstream_controller()
    takes_over(state["controller"])
    cluster.namespace(SPACE)
    template = {"podTemplate": cluster.pod_template()}
    apply(
        [
            old("Sandbox", "alone", **template),
            old("Sandbox", "asleep", **template),
            old("SandboxTemplate", "plain", envVarsInjectionPolicy="Allowed", **template),
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
    suspend("asleep")
    gone("pod", "asleep", SPACE)
    pool_is_full("warm", SPACE)
    pool_is_full("recreating", SPACE)
    apply([old_claim("from-the-pool"), old_claim("cold", **COLD)])
    ready("sandboxclaim", "from-the-pool", SPACE)
    ready("sandboxclaim", "cold", SPACE)
    pool_is_full("warm", SPACE)
    settled()
    state["before"], state["bindings"] = fates(), bindings()
    assert all(state["bindings"].values()), state["bindings"]


@check
def ours_takes_everything_over_as_it_is():
    state["controller"].end()
    our_definitions()
    state["controller"] = cluster.Controller()
    takes_over(state["controller"])
    # It has looked at the pool when it has answered a claim from it.
    apply(cluster.claim("new", SPACE, **SOURCE))
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
    resume("asleep")
    ready("sandbox", "asleep", SPACE)
    kubectl("scale", "sandboxwarmpool", "warm", "-n", SPACE, "--replicas=2")
    pool_is_full("warm", SPACE)
    kubectl("delete", "sandboxclaim", "from-the-pool", "-n", SPACE)
    gone("sandbox", state["bindings"]["from-the-pool"], SPACE)
    gone("pod", state["bindings"]["from-the-pool"], SPACE)
    # kube-apiserver itself takes half a minute to learn of a version that is new to it; what it refuses until then is tried again.
    refused = [line for line in state["controller"].log_text().splitlines() if "orbidden" in line and "cannot find RESTMapping" not in line]
    assert not refused, refused[-3:]


@check
def a_claim_that_the_older_release_cannot_read_stops_the_way_back():
    if KNOWS_V1BETA1:
        state["controller"].end()
        return
    apply(cluster.claim("by-pool", SPACE, warmPoolRef={"name": "warm"}))
    ready("sandboxclaim", "by-pool", SPACE)
    sandbox = bindings()["by-pool"]
    state["controller"].end()
    refused = subprocess.run([f"{REPOSITORY}/deploy/back-to-v1alpha1.sh"], capture_output=True, text=True)
    assert refused.returncode == 1 and f"{SPACE}/by-pool" in refused.stderr, refused
    kubectl("delete", "sandboxclaim", "by-pool", "-n", SPACE)
    gone("sandbox", sandbox, SPACE)
    gone("pod", sandbox, SPACE)
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
    if not KNOWS_V1BETA1:
        rewritten = subprocess.run([f"{REPOSITORY}/deploy/back-to-v1alpha1.sh"], capture_output=True, text=True)
        assert rewritten.returncode == 0, rewritten
    upstream_definitions()
    for name in DEFINITIONS:
        definition = get("crd", name, "default")
        assert definition["status"]["storedVersions"] == ["v1beta1" if KNOWS_V1BETA1 else "v1alpha1"], definition["status"]
        assert ("v1beta1" in [version["name"] for version in definition["spec"]["versions"]]) == KNOWS_V1BETA1
    # All of it can be read: nothing is left in a version that is not served.
    assert_kept(before)
    state["controller"] = upstream_controller()
    takes_over(state["controller"])
    apply(old_claim("after"))
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

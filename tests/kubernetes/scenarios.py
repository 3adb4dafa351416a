"""What the controllers promise, on a real control plane or in `up`: statuses to the letter, shutdown, parallel work, rollouts of warm pools, claims
that end, metrics."""

import re
import tempfile
import time
import urllib.request

import cluster
from checks import check, kubectl, run_checks, until
from cluster import apply, claim, condition, get, gone, is_ready, items, pool, pool_is_full, ready, template, thing

SPACE = "scenarios"
PARALLEL = 20
state = {}


def in_seconds(seconds):
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


def sandbox(name, command="exec sleep infinity", **spec):
    return thing("Sandbox", name, SPACE, {"podTemplate": cluster.pod_template(command), **spec})


def reason(kind, name, condition_type="Ready"):
    return condition(get(kind, name, SPACE), condition_type).get("reason")


def members(pool_name):
    """The sandboxes that a pool controls and that are not on their way out."""
    found = {}
    for one in items("sandboxes", SPACE):
        owners = one["metadata"].get("ownerReferences", [])
        if any(owner["name"] == pool_name and owner.get("controller") for owner in owners) and not one["metadata"].get("deletionTimestamp"):
            found[one["metadata"]["name"]] = one["metadata"]["uid"]
    return found


def is_updated(name):
    container = get("sandbox", name, SPACE)["spec"]["podTemplate"]["spec"]["containers"][0]
    return {"name": "TEST_ENV", "value": "updated"} in container.get("env", [])


def updated(name):
    return template(name, SPACE, podTemplate=cluster.pod_template(env=[{"name": "TEST_ENV", "value": "updated"}]))


def settled_pool(name):
    """The controller has looked at the pool's spec and template, and the pool is full."""

    def look():
        found = get("sandboxwarmpool", name, SPACE)
        status = found.get("status") or {}
        is_seen = status.get("observedGeneration") == found["metadata"]["generation"]
        return found if is_seen and status.get("readyReplicas", 0) == found["spec"]["replicas"] else None

    return until(look, f"pool {name} to settle")


@check
def the_controller_starts_with_the_flags_of_a_busy_cluster():
    cluster.install()
    state["node"] = cluster.start_node()
    workers = [f"--sandbox{kind}-concurrent-workers=10" for kind in ("", "-claim", "-warm-pool")]
    state["controller"] = cluster.start_controller(*workers, "--kube-api-qps=50", "--kube-api-burst=100")
    cluster.namespace(SPACE)


@check
def a_sandbox_tells_its_whole_status_and_passes_its_metadata_on():
    wanted = sandbox("simple", service=True)
    # Whatever fills in defaults: this one speaks the older generation.
    wanted["spec"]["replicas"] = 1
    wanted["spec"]["podTemplate"]["metadata"] = {"labels": {"test": "label"}, "annotations": {"test": "annotation"}}
    apply(wanted)
    found = ready("sandbox", "simple", SPACE)
    status = found["status"]
    assert reason("sandbox", "simple") == "DependenciesReady"
    assert (status["service"], status["serviceFQDN"]) == ("simple", f"simple.{SPACE}.svc.cluster.local"), status
    assert status["replicas"] == 1
    key, _, value = status["selector"].partition("=")
    assert key == "agents.x-k8s.io/sandbox-name-hash", status
    pod, service = get("pod", "simple", SPACE), get("service", "simple", SPACE)
    assert pod["metadata"]["labels"]["test"] == "label" and pod["metadata"]["annotations"]["test"] == "annotation"
    assert pod["metadata"]["labels"][key] == value and service["spec"]["selector"] == {key: value}
    for one in (pod, service):
        owner = one["metadata"]["ownerReferences"][0]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (found["metadata"]["uid"], True, True)


@check
def no_replicas_suspend_and_leave_the_service():
    kubectl("patch", "sandbox", "simple", "-n", SPACE, "--type=merge", "-p", '{"spec":{"replicas":0}}')
    gone("pod", "simple", SPACE)
    until(lambda: reason("sandbox", "simple", "Suspended") == "PodTerminated", "Suspended=PodTerminated")
    suspended = get("sandbox", "simple", SPACE)
    assert condition(suspended, "Ready")["status"] == "False" and condition(suspended, "Ready")["reason"] == "SandboxSuspended"
    assert not suspended["status"].get("replicas")
    assert not get("service", "simple", SPACE)["metadata"].get("deletionTimestamp")
    kubectl("patch", "sandbox", "simple", "-n", SPACE, "--type=merge", "-p", '{"spec":{"replicas":1}}')
    assert not condition(ready("sandbox", "simple", SPACE), "Suspended")


@check
def the_operating_mode_brings_the_conditions_of_later_releases():
    wanted = sandbox("modal")
    wanted["spec"]["operatingMode"] = "Running"
    apply(wanted)
    found = ready("sandbox", "modal", SPACE)
    suspended = condition(found, "Suspended")
    assert (suspended["status"], suspended["reason"]) == ("False", "NotSuspended"), suspended
    assert condition(found, "PodScheduled")["status"] == "True", found["status"]
    kubectl("patch", "sandbox", "modal", "-n", SPACE, "--type=merge", "-p", '{"spec":{"operatingMode":"Suspended"}}')
    gone("pod", "modal", SPACE)
    until(lambda: reason("sandbox", "modal", "Suspended") == "PodTerminated", "Suspended=PodTerminated")
    assert condition(get("sandbox", "modal", SPACE), "Ready")["message"] == "Sandbox is suspended"
    kubectl("delete", "sandbox", "modal", "-n", SPACE, "--wait=false")
    gone("sandbox", "modal", SPACE)


@check
def a_running_sandbox_is_shut_down_at_its_time():
    shutdown = in_seconds(4)
    patch = f'{{"spec":{{"shutdownTime":"{shutdown}","shutdownPolicy":"Retain"}}}}'
    kubectl("patch", "sandbox", "simple", "-n", SPACE, "--type=merge", "-p", patch)
    until(lambda: reason("sandbox", "simple") == "SandboxExpired", "expiry")
    assert time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) >= shutdown, "not before its time"
    gone("pod", "simple", SPACE)
    gone("service", "simple", SPACE)
    until(lambda: not get("sandbox", "simple", SPACE)["status"].get("serviceFQDN"), "the service to be forgotten")
    status = get("sandbox", "simple", SPACE)["status"]
    assert not status.get("service") and not status.get("replicas"), status
    kubectl("delete", "sandbox", "simple", "-n", SPACE)


@check
def an_expiry_keeps_how_a_sandbox_finished():
    wanted = sandbox("finished", "exit 0", shutdownPolicy="Retain")
    wanted["spec"]["podTemplate"]["spec"]["restartPolicy"] = "Never"
    apply(wanted)
    until(lambda: reason("sandbox", "finished", "Finished") == "PodSucceeded", "Finished=PodSucceeded")
    # It has finished, however long that took, and expires only now.
    patch = f'{{"spec":{{"shutdownTime":"{in_seconds(3)}"}}}}'
    kubectl("patch", "sandbox", "finished", "-n", SPACE, "--type=merge", "-p", patch)
    until(lambda: reason("sandbox", "finished") == "SandboxExpired", "expiry")
    assert reason("sandbox", "finished", "Finished") == "PodSucceeded"
    gone("pod", "finished", SPACE)
    kubectl("delete", "sandbox", "finished", "-n", SPACE)


@check
def an_expired_sandbox_is_deleted_when_asked_to():
    apply(sandbox("brief", shutdownTime=in_seconds(3), shutdownPolicy="Delete"))
    gone("sandbox", "brief", SPACE)
    gone("pod", "brief", SPACE)


@check
def what_a_sandbox_keeps_in_a_volume_survives_its_suspension():
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [cluster.NODE]}
    # The node of this project keeps a volume in its own directory; a kubelet mounts the path that the volume names.
    kept = tempfile.mkdtemp(dir=cluster.CONTROL_PLANE) if cluster.UNDER_KUBELET else "/kept"
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "kept", "annotations": {"pv.kubernetes.io/provisioned-by": "agents.x-k8s.io/directory"}},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "by-hand",
            "local": {"path": kept},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }
    wanted = sandbox("stateful")
    wanted["spec"]["podTemplate"]["spec"]["containers"][0]["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    claimed = {"accessModes": ["ReadWriteOnce"], "storageClassName": "by-hand", "resources": {"requests": {"storage": "1Gi"}}}
    wanted["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "data"}, "spec": claimed}]
    apply([volume, wanted])
    ready("sandbox", "stateful", SPACE)
    kubectl("exec", "stateful", "-n", SPACE, "--", "sh", "-c", "echo kept > /data/file")
    kubectl("scale", "sandbox", "stateful", "-n", SPACE, "--replicas=0")
    gone("pod", "stateful", SPACE)
    # Until the status says so, it may still be that of the pod before.
    until(lambda: reason("sandbox", "stateful", "Suspended") == "PodTerminated", "Suspended=PodTerminated")
    kubectl("scale", "sandbox", "stateful", "-n", SPACE, "--replicas=1")
    ready("sandbox", "stateful", SPACE)
    assert kubectl("exec", "stateful", "-n", SPACE, "--", "cat", "/data/file") == "kept\n"
    kubectl("delete", "sandbox", "stateful", "-n", SPACE)
    until(lambda: not items("pvc", SPACE), "the volume claim to go with its sandbox")
    kubectl("delete", "pv", "kept")


def all_ready(kind, names):
    def look():
        return {one["metadata"]["name"] for one in items(kind, SPACE) if is_ready(one)} >= set(names)

    until(look, f"{len(names)} {kind} to be Ready")


@check
def many_sandboxes_at_once_become_ready():
    names = [f"parallel-{number}" for number in range(PARALLEL)]
    apply([sandbox(name) for name in names])
    all_ready("sandboxes", names)
    kubectl("delete", "sandbox", *names, "-n", SPACE, "--wait=false")
    for name in names:
        gone("pod", name, SPACE)


def claims_at_once(prefix, template_name):
    names = [f"{prefix}-{number}" for number in range(PARALLEL)]
    apply([claim(name, SPACE, sandboxTemplateRef={"name": template_name}) for name in names])
    all_ready("sandboxclaims", names)
    holders = cluster.assert_exclusive(SPACE)
    taken = {sandbox: holder for sandbox, holder in holders.items() if holder in names}
    assert len(taken) == PARALLEL
    return names, taken


def release(names, pool_name):
    kubectl("delete", "sandboxwarmpool", pool_name, "-n", SPACE)
    kubectl("delete", "sandboxclaim", *names, "-n", SPACE, "--timeout=180s")
    until(lambda: not items("pods", SPACE), "all pods to be gone")


@check
def many_claims_at_once_are_met_from_a_pool_that_suffices():
    apply([template("wide", SPACE), pool("wide", SPACE, "wide", PARALLEL + 5)])
    warm = pool_is_full("wide", SPACE) and members("wide")
    names, taken = claims_at_once("wide", "wide")
    assert set(taken) <= set(warm), "every sandbox was a warm one"
    release(names, "wide")


@check
def many_claims_at_once_are_met_though_the_pool_does_not_suffice():
    apply([template("narrow", SPACE), pool("narrow", SPACE, "narrow", 5)])
    warm = pool_is_full("narrow", SPACE) and members("narrow")
    names, taken = claims_at_once("narrow", "narrow")
    assert len(set(taken) & set(warm)) == 5, "what was warm was taken first"
    release(names, "narrow")


@check
def a_pool_replaces_a_sandbox_that_a_user_deletes():
    apply([template("kept", SPACE), pool("kept", SPACE, "kept", 2)])
    before = pool_is_full("kept", SPACE) and members("kept")
    lost = sorted(before)[0]
    kubectl("delete", "sandbox", lost, "-n", SPACE)
    until(lambda: len(members("kept")) == 2 and lost not in members("kept"), "a replacement")
    settled_pool("kept")
    assert before.items() & members("kept").items(), "the other one stayed"


@check
def a_rollout_waits_for_replacement_unless_asked_to_recreate():
    for name, strategy in (("default", {}), ("onreplenish", {"updateStrategy": {"type": "OnReplenish"}})):
        apply([template(name, SPACE), pool(name, SPACE, name, 1, **strategy)])
        before = pool_is_full(name, SPACE) and members(name)
        apply(updated(name))
        until(lambda: get("sandboxwarmpool", name, SPACE)["status"].get("updatedReplicas", 0) == 0, "the new revision to be seen")
        assert members(name) == before, f"{name}: the old sandbox stays"
        kubectl("delete", "sandbox", *before, "-n", SPACE)
        until(lambda: members(name) and members(name) != before, f"{name}: a new sandbox")
        settled_pool(name)
        assert is_updated(next(iter(members(name))))


@check
def a_rollout_concerns_only_the_pools_of_its_template():
    recreate = {"updateStrategy": {"type": "Recreate"}}
    for name in ("first", "second"):
        apply([template(name, SPACE), pool(name, SPACE, name, 1, **recreate)])
    before = {name: pool_is_full(name, SPACE) and members(name) for name in ("first", "second")}
    apply(updated("first"))
    until(lambda: members("first") and not members("first").keys() & before["first"].keys(), "the first pool to be rolled")
    settled_pool("first")
    assert is_updated(next(iter(members("first"))))
    assert members("second") == before["second"]


@check
def a_pool_that_changes_templates_names_the_new_one():
    before = members("second")
    apply(template("third", SPACE))
    patch = '{"spec":{"sandboxTemplateRef":{"name":"third"}}}'
    kubectl("patch", "sandboxwarmpool", "second", "-n", SPACE, "--type=merge", "-p", patch)
    until(lambda: members("second") and not members("second").keys() & before.keys(), "the pool to be rolled")
    new = get("sandbox", next(iter(members("second"))), SPACE)
    assert new["metadata"]["annotations"]["agents.x-k8s.io/sandbox-template-ref"] == "third", new["metadata"]


@check
def labels_of_a_template_roll_nothing():
    apply([template("labelled", SPACE), pool("labelled", SPACE, "labelled", 1, updateStrategy={"type": "Recreate"})])
    before = pool_is_full("labelled", SPACE) and members("labelled")
    changed = cluster.pod_template()
    changed["metadata"] = {"labels": {"new": "label"}}
    apply(template("labelled", SPACE, podTemplate=changed))
    # A second member is made after the change was seen, so that by then the first would have gone.
    kubectl("scale", "sandboxwarmpool", "labelled", "-n", SPACE, "--replicas=2")
    settled_pool("labelled")
    assert before.items() <= members("labelled").items(), "the first one stays"


@check
def claims_end_as_their_policy_says():
    for policy in ("Retain", "Delete", "DeleteForeground"):
        name = policy.lower()
        apply(claim(name, SPACE, sandboxTemplateRef={"name": "kept"}))
        bound = ready("sandboxclaim", name, SPACE)["status"]["sandbox"]["name"]
        patch = f'{{"spec":{{"lifecycle":{{"shutdownTime":"{in_seconds(1)}","shutdownPolicy":"{policy}"}}}}}}'
        kubectl("patch", "sandboxclaim", name, "-n", SPACE, "--type=merge", "-p", patch)
        if policy == "Retain":
            until(lambda: reason("sandboxclaim", name) == "ClaimExpired", "ClaimExpired")
        else:
            gone("sandboxclaim", name, SPACE)
        gone("sandbox", bound, SPACE)
        gone("pod", bound, SPACE)
    kubectl("delete", "sandboxclaim", "retain", "-n", SPACE)


@check
def claims_are_counted_and_timed():
    metrics = urllib.request.urlopen(state["controller"].metrics_url).read().decode()
    counts = re.findall(r"^agent_sandbox_claim_controller_startup_latency_ms_count{(.*)} (\d+)", metrics, re.MULTILINE)
    assert sum(int(count) for _, count in counts) >= 2 * PARALLEL, counts
    launches = {launch for labels, _ in counts for launch in re.findall(r'launch_type="(\w+)"', labels)}
    assert {"warm", "cold"} <= launches, launches


@check
def nothing_was_forbidden():
    assert "orbidden" not in state["controller"].log_text(), state["controller"].log_text()[-3000:]


@check
def the_node_gives_the_machine_back():
    state["node"].leave()
    state["controller"].end()


run_checks()

"""Sandboxes, claims and warm pools on a real control plane: scheduled by its scheduler, run by our node, collected by its collector. Or all of
it by `up`."""

import json
import time
import urllib.request

import cluster
from checks import check, kubectl, run_checks, until
from cluster import apply, claim, condition, get, gone, is_ready, items, pool, pool_is_full, ready, template, thing

SPACE = "work"
state = {}


@check
def the_system_starts_as_its_service_accounts():
    cluster.install()
    state["node"] = cluster.start_node()
    state["controller"] = cluster.start_controller()
    state["router"] = cluster.start_router()
    cluster.namespace(SPACE)


@check
def a_sandbox_becomes_ready_with_a_pod_and_a_service():
    apply(thing("Sandbox", "one", SPACE, {"podTemplate": cluster.pod_template(), "service": True}))
    sandbox = ready("sandbox", "one", SPACE)
    assert sandbox["status"]["nodeName"] == cluster.NODE
    assert sandbox["status"]["serviceFQDN"] == f"one.{SPACE}.svc.cluster.local", sandbox["status"]
    pod = get("pod", "one", SPACE)
    owner = pod["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["name"], owner["blockOwnerDeletion"]) == ("Sandbox", "one", True)
    assert get("service", "one", SPACE)["spec"]["clusterIP"] == "None"


@check
def commands_and_logs_pass_through_the_api_server():
    assert kubectl("exec", "one", "-n", SPACE, "--", "echo", "hello") == "hello\n"
    apply(thing("Sandbox", "talker", SPACE, {"podTemplate": cluster.pod_template("echo started; exec sleep infinity")}))
    ready("sandbox", "talker", SPACE)
    until(lambda: kubectl("logs", "talker", "-n", SPACE) == "started\n", "the log")
    kubectl("delete", "sandbox", "talker", "-n", SPACE, "--wait=false")
    gone("pod", "talker", SPACE)


@check
def a_suspended_sandbox_loses_its_pod_and_gets_it_back():
    kubectl("patch", "sandbox", "one", "-n", SPACE, "--type=merge", "-p", '{"spec":{"replicas":0}}')
    gone("pod", "one", SPACE)
    until(lambda: condition(get("sandbox", "one", SPACE), "Suspended").get("status") == "True", "suspension")
    assert get("service", "one", SPACE)
    kubectl("scale", "sandbox", "one", "-n", SPACE, "--replicas=1")
    ready("sandbox", "one", SPACE)


@check
def the_collector_takes_what_a_sandbox_owned():
    kubectl("delete", "sandbox", "one", "-n", SPACE, "--wait=false")
    gone("sandbox", "one", SPACE)
    gone("pod", "one", SPACE)
    gone("service", "one", SPACE)


@check
def an_expired_sandbox_keeps_its_object_when_asked_to():
    soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3))
    spec = {"podTemplate": cluster.pod_template(), "shutdownTime": soon, "shutdownPolicy": "Retain"}
    apply(thing("Sandbox", "brief", SPACE, spec))
    expired = lambda: condition(get("sandbox", "brief", SPACE), "Ready").get("reason") == "SandboxExpired"  # noqa: E731
    until(expired, "expiry")
    gone("pod", "brief", SPACE)
    kubectl("delete", "sandbox", "brief", "-n", SPACE)


@check
def a_pool_fills_and_a_claim_adopts_from_it():
    apply([template("plain", SPACE), pool("warm", SPACE, "plain", 3)])
    pool_is_full("warm", SPACE)
    before = {sandbox["metadata"]["name"]: sandbox["metadata"]["uid"] for sandbox in items("sandboxes", SPACE)}
    pods = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in items("pods", SPACE)}
    apply(claim("mine", SPACE, sandboxTemplateRef={"name": "plain"}))
    bound = ready("sandboxclaim", "mine", SPACE)
    name = bound["status"]["sandbox"]["name"]
    sandbox = get("sandbox", name, SPACE)
    assert before[name] == sandbox["metadata"]["uid"], "a warm sandbox is adopted, not made anew"
    assert pods[name] == get("pod", name, SPACE)["metadata"]["uid"], "its pod is the one that was warm"
    pool_is_full("warm", SPACE)
    apply(claim("by-pool", SPACE, warmPoolRef={"name": "warm"}))
    ready("sandboxclaim", "by-pool", SPACE)
    cluster.assert_exclusive(SPACE)
    policies = items("networkpolicies", SPACE)
    assert policies, "a template comes with its network policy"


@check
def the_router_reaches_a_claimed_sandbox():
    apply(
        thing(
            "Sandbox",
            "web",
            SPACE,
            {"podTemplate": cluster.pod_template("cd /tmp && echo here > index.html && exec python3 -m http.server 8888")},
        )
    )
    ready("sandbox", "web", SPACE)
    request = urllib.request.Request(state["router"], headers={"X-Sandbox-ID": "web", "X-Sandbox-Namespace": SPACE})

    def answered():
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.read() == b"here\n"
        except OSError:
            return False

    until(answered, "an answer through the router")
    kubectl("delete", "sandbox", "web", "-n", SPACE)


@check
def claims_that_cannot_be_met_say_why():
    apply(claim("lost", SPACE, sandboxTemplateRef={"name": "absent"}))
    until(
        lambda: condition(get("sandboxclaim", "lost", SPACE), "Ready").get("reason") == "TemplateNotFound",
        "TemplateNotFound",
    )
    apply(claim("poolless", SPACE, warmPoolRef={"name": "absent"}))
    until(
        lambda: condition(get("sandboxclaim", "poolless", SPACE), "Ready").get("reason") == "WarmPoolNotFound",
        "WarmPoolNotFound",
    )
    apply(template("absent", SPACE))
    ready("sandboxclaim", "lost", SPACE)
    kubectl("delete", "sandboxclaim", "lost", "poolless", "-n", SPACE)


@check
def more_claims_than_warm_sandboxes_are_all_met():
    apply([claim(f"many-{number}", SPACE, sandboxTemplateRef={"name": "plain"}) for number in range(8)])
    for number in range(8):
        ready("sandboxclaim", f"many-{number}", SPACE)
    cluster.assert_exclusive(SPACE)
    kubectl("delete", "sandboxclaim", *(f"many-{number}" for number in range(8)), "-n", SPACE)
    until(lambda: len(items("pods", SPACE)) <= 6, "the pods of released claims to go")


@check
def a_new_template_rolls_a_pool_that_recreates():
    apply([template("rolled", SPACE), pool("rolling", SPACE, "rolled", 2, updateStrategy={"type": "Recreate"})])
    pool_is_full("rolling", SPACE)

    def members():
        return {
            sandbox["metadata"]["name"]: sandbox
            for sandbox in items("sandboxes", SPACE)
            if any(owner["name"] == "rolling" for owner in sandbox["metadata"].get("ownerReferences", []))
        }

    before = set(members())
    changed = cluster.pod_template(env=[{"name": "TEST_ENV", "value": "updated"}])
    apply(template("rolled", SPACE, podTemplate=changed))

    def rolled():
        now = members()
        return len(now) == 2 and not before & set(now) and all(is_ready(sandbox) for sandbox in now.values())

    until(rolled, "both members to be replaced")
    for sandbox in members().values():
        container = sandbox["spec"]["podTemplate"]["spec"]["containers"][0]
        assert {"name": "TEST_ENV", "value": "updated"} in container["env"]


@check
def events_tell_what_happened():
    reasons = {event["reason"] for event in items("events", SPACE)}
    assert {"SandboxAdopted", "PodCreated"} <= reasons, reasons


@check
def nothing_was_forbidden():
    output = state["controller"].log_text()
    assert "orbidden" not in output, output[-3000:]
    metrics = urllib.request.urlopen(state["controller"].metrics_url).read().decode()
    assert "agent_sandbox" in metrics


@check
def the_core_controller_runs_with_the_core_role_alone():
    if cluster.ON_UP or cluster.UNDER_KUBELET:
        return
    state["controller"].end()
    kubectl("delete", "clusterrolebinding", "agent-sandbox-controller-extensions")
    deployment = json.dumps([{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": ["--leader-elect=true"]}])
    kubectl("patch", "deployment", cluster.ACCOUNT, "-n", cluster.SYSTEM, "--type=json", "-p", deployment)
    state["controller"] = cluster.Controller()
    core = cluster.namespace("core")
    apply(claim("unwatched", core, sandboxTemplateRef={"name": "plain"}))
    apply(thing("Sandbox", "alone", core, {"podTemplate": cluster.pod_template(), "service": True}))
    ready("sandbox", "alone", core)
    kubectl("scale", "sandbox", "alone", "-n", core, "--replicas=0")
    gone("pod", "alone", core)
    assert not get("sandboxclaim", "unwatched", core).get("status"), "without extensions no controller reconciles claims"
    kubectl("delete", "sandbox", "alone", "-n", core)
    gone("service", "alone", core)
    output = state["controller"].log_text()
    assert "orbidden" not in output, output[-3000:]


@check
def a_namespace_takes_everything_with_it():
    kubectl("delete", "namespace", SPACE, "--timeout=180s")
    left = json.loads(kubectl("get", "pods", "--all-namespaces", "-o", "json"))["items"]
    assert not [pod for pod in left if pod["metadata"]["namespace"] == SPACE]


@check
def the_node_gives_the_machine_back():
    state["node"].leave()
    state["controller"].end()
    if cluster.ON_UP or cluster.UNDER_KUBELET:
        return
    lease = get("lease", "a3317529.agent-sandbox.x-k8s.io", cluster.SYSTEM)
    assert not lease["spec"].get("holderIdentity"), "a controller that stops releases its lease"


run_checks()

"""kubectl on the OpenKruise kinds: the three stories of docs/kruise.md, what a user sees of them, and the way to the sandboxes."""

import json
import os
import pathlib
import socket
import subprocess
import urllib.error
import urllib.request

from checks import ROUTER_URL, check, kubectl, run_checks, until

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "kruise"
CLAIM = "sandboxclaims.agents.kruise.io"


def apply(name):
    return kubectl("apply", "-f", str(EXAMPLES / name))


def field(kind, name, expression):
    return kubectl("get", kind, name, "-o", f"jsonpath={expression}")


def sandboxes(selector):
    return json.loads(kubectl("get", "sandboxes", "-l", selector, "-o", "json"))["items"]


def completed(name):
    kubectl("wait", f"{CLAIM}/{name}", "--for=condition=Completed", "--timeout=180s")


def execute(url, command, headers):
    """Runs a command in a sandbox through the router; the answer, or the status of a refusal."""
    body = json.dumps({"command": command}).encode()
    request = urllib.request.Request(f"{url}/execute", body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as refusal:
        return refusal.code


def executed(url, command, headers):
    """Runs a command in a sandbox through the router, once the router has heard of it."""

    def answer():
        try:
            output = execute(url, command, headers)
        except (urllib.error.URLError, ConnectionError):
            return None
        return output if isinstance(output, dict) else None

    return until(answer, f"{command} to be run")


@check
def sets_fill_and_are_scaled():
    apply("sandbox-sets.yaml")
    kubectl("wait", "sandboxset/python-pool", "sandboxset/test-pool", "--for=condition=Ready", "--timeout=180s")
    table = kubectl("get", "sbs", "python-pool").splitlines()
    assert table[0].split() == ["NAME", "DESIRED", "REPLICAS", "AVAILABLE", "UPDATED", "AGE"], table
    assert table[1].split()[:5] == ["python-pool", "3", "3", "3", "3"], table
    kubectl("scale", "sandboxset", "python-pool", "--replicas=4")
    until(lambda: field("sandboxset", "python-pool", "{.status.availableReplicas}") == "4", "four sandboxes")
    selector = field("sandboxset", "python-pool", "{.status.selector}")
    assert len(sandboxes(selector)) == 4


@check
def a_single_sandbox_is_claimed_with_its_environment():
    apply("story-1-single.yaml")
    completed("user-sandbox")
    table = kubectl("get", CLAIM, "user-sandbox").splitlines()
    assert table[0].split() == ["NAME", "PHASE", "TEMPLATE", "DESIRED", "CLAIMED", "AGE"], table
    assert table[1].split()[:5] == ["user-sandbox", "Completed", "python-pool", "1", "1"], table
    [sandbox] = sandboxes("agents.kruise.io/claim-name=user-sandbox")
    assert sandbox["spec"]["shutdownTime"] == "2099-12-30T12:00:00Z", sandbox["spec"]
    assert sandbox["metadata"]["ownerReferences"][0]["kind"] == "SandboxClaim"
    assert sandbox["metadata"]["annotations"]["agents.kruise.io/lock"]
    answer = executed(ROUTER_URL, "printenv API_KEY", {"X-Sandbox-ID": sandbox["metadata"]["name"]})
    assert answer["stdout"] == "sk-example\n", answer
    by_id = {"e2b-sandbox-id": sandbox["metadata"]["labels"]["agents.kruise.io/sandbox-id"]}
    assert executed(ROUTER_URL, "printenv API_KEY", by_id)["stdout"] == "sk-example\n"


@check
def an_unclaimed_sandbox_is_not_reachable_through_the_router():
    free = sandboxes("agents.kruise.io/sandbox-claimed=false")[0]
    answer = execute(ROUTER_URL, "true", {"X-Sandbox-ID": free["metadata"]["name"]})
    assert answer == 404, answer


@check
def a_batch_larger_than_the_set_is_claimed():
    apply("story-2-batch.yaml")
    completed("test-batch")
    assert field(CLAIM, "test-batch", "{.status.claimedReplicas}") == "10"
    found = sandboxes("claim-id=test-batch")
    assert len({sandbox["metadata"]["uid"] for sandbox in found}) == 10
    locks = {sandbox["metadata"]["annotations"]["agents.kruise.io/lock"] for sandbox in found}
    assert len(locks) == 10, locks
    error = kubectl("patch", CLAIM, "test-batch", "--type=merge", "-p", '{"spec": {"replicas": 11}}', succeeds=False)
    assert "replicas is immutable" in error, error


@check
def a_sandbox_is_reached_by_its_host():
    [sandbox] = sandboxes("agents.kruise.io/claim-name=user-sandbox")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = "127.0.0.1:%d" % free.getsockname()[1]
    arguments = ["--host-domain=sandboxes.test", f"--http-bind-address={address}"]
    nowhere = ["--metrics-bind-address=0", "--health-probe-bind-address=0"]
    router = subprocess.Popen([os.environ["AGENT_SANDBOX"], "router", *arguments, *nowhere], stdout=subprocess.DEVNULL)
    try:
        host = f"8888-{sandbox['metadata']['labels']['agents.kruise.io/sandbox-id']}.sandboxes.test"
        assert executed(f"http://{address}", "printenv API_KEY", {"Host": host})["stdout"] == "sk-example\n"
    finally:
        router.terminate()
        router.wait(timeout=30)


@check
def a_claim_is_cleaned_up_and_its_sandboxes_stay():
    apply("story-3-timeout-and-cleanup.yaml")
    # The claim is there for five seconds more, so it is shown by the command that waits for it.
    shown = ["--timeout=180s", "-o", "jsonpath={.status.claimedReplicas}"]
    assert kubectl("wait", f"{CLAIM}/timed-claim", "--for=condition=Completed", *shown) == "5"
    kubectl("wait", f"{CLAIM}/timed-claim", "--for=delete", "--timeout=180s")
    selector = "project=my-project,environment=test"
    until(lambda: all("ownerReferences" not in it["metadata"] for it in sandboxes(selector)), "the sandboxes to have no owner")
    found = sandboxes(selector)
    assert len(found) == 5
    assert all(it["metadata"]["annotations"]["claim-purpose"] == "integration-test" for it in found)
    for sandbox in found:
        answer = executed(ROUTER_URL, "echo here", {"X-Sandbox-ID": sandbox["metadata"]["name"]})
        assert answer["stdout"] == "here\n", answer


@check
def bad_claims_are_refused_or_explained():
    def manifest(**spec):
        spec = {"templateName": "python-pool", **spec}
        kinds = {"apiVersion": "agents.kruise.io/v1alpha1", "kind": "SandboxClaim", "metadata": {"name": "bad"}}
        return json.dumps({**kinds, "spec": spec})

    for spec, field_path in [({"replicas": 0}, "spec.replicas"), ({"claimTimeout": "soon"}, "spec.claimTimeout")]:
        error = kubectl("apply", "-f", "-", text=manifest(**spec), succeeds=False)
        assert field_path in error, error
    kubectl("apply", "-f", "-", text=manifest(templateName="nowhere"))
    completed("bad")
    reason = field(CLAIM, "bad", "{.status.conditions[?(@.type=='Completed')].reason}")
    assert reason == "SandboxSetNotFound", reason
    kubectl("delete", CLAIM, "bad")
    kubectl("apply", "-f", "-", text=manifest(labels={"team": "not valid"}))
    until(lambda: "spec.labels" in field(CLAIM, "bad", "{.status.message}"), "the claim to say what is wrong")
    kubectl("delete", CLAIM, "bad")


@check
def deleting_claims_and_sets_releases_their_sandboxes():
    kubectl("delete", CLAIM, "user-sandbox", "test-batch")
    kubectl("delete", "sandboxset", "--all")
    kubectl("delete", "sandboxes", "-l", "project=my-project")
    until(lambda: not sandboxes("agents.kruise.io/sandbox-template"), "all sandboxes to be gone")


run_checks()

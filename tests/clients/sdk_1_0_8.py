"""The published Python SDK, version 1.0.8, synchronous: v1beta1 claims from a warm pool."""

import io
import json

from checks import NAMESPACE, ROUTER_URL, check, kubectl, raises, run_checks, until

from kubernetes.client import ApiException
from k8s_agent_sandbox import (
    SandboxClient,
    SandboxNotFoundError,
    SandboxRequestError,
    SandboxWarmPoolNotFoundError,
)
from k8s_agent_sandbox.models import (
    SandboxDirectConnectionConfig,
    SandboxInClusterConnectionConfig,
)

POOL = "python-warmpool"


def claim_exists(name):
    found = kubectl("get", "sandboxclaim", name, "--ignore-not-found", "-o", "name")
    return bool(found.strip())


def direct():
    return SandboxClient(SandboxDirectConnectionConfig(api_url=ROUTER_URL))


def exercise(sandbox):
    """Commands and files, the same over every kind of connection."""
    result = sandbox.commands.run("python3 -c 'print(6*7)'")
    assert (result.stdout, result.stderr, result.exit_code) == ("42\n", "", 0), result
    result = sandbox.commands.run("sh -c 'echo out; echo err >&2; exit 3'")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3), result
    result = sandbox.commands.run("sleep 60", command_timeout=0.5)
    assert result.timed_out and result.exit_code == 124, result

    sandbox.files.write("deep/down/note.txt", "remembered")
    assert sandbox.files.read("deep/down/note.txt") == b"remembered"
    megabytes = bytes(range(256)) * 4096 * 4
    sandbox.files.write("large.bin", io.BytesIO(megabytes))
    received = io.BytesIO()
    sandbox.files.read_to("large.bin", received)
    assert received.getvalue() == megabytes
    assert sandbox.files.exists("large.bin")
    assert not sandbox.files.exists("missing.txt")
    entries = {entry.name: entry for entry in sandbox.files.list(".")}
    assert entries["large.bin"].size == len(megabytes), entries
    assert entries["deep"].type == "directory", entries
    assert entries["deep"].modified.tzinfo is not None
    error = raises(SandboxRequestError, lambda: sandbox.files.read("missing.txt"))
    assert error.status_code == 404, error


@check
def through_the_tunnel():
    with SandboxClient() as client:
        sandbox = client.create_sandbox(POOL, labels={"team": "blue"})
        exercise(sandbox)
        assert sandbox.status()[0] == "SandboxReady", sandbox.status()
        assert client.list_all_sandboxes(label_selector="team=blue") == [sandbox.claim_name]
        assert client.list_all_sandboxes(label_selector="team=red") == []
        assert client.list_active_sandboxes() == [(NAMESPACE, sandbox.claim_name)]
        name = sandbox.claim_name
    until(lambda: not claim_exists(name), "the claim is deleted")


@check
def by_the_routers_address():
    with direct() as client:
        exercise(client.create_sandbox(POOL))


@check
def by_the_pods_address():
    with SandboxClient(SandboxInClusterConnectionConfig()) as client:
        exercise(client.create_sandbox(POOL))


@check
def a_sandbox_is_found_again_by_name():
    first = direct().create_sandbox(POOL)
    first.files.write("kept", "still here")
    first.close_connection()
    client = direct()
    again = client.get_sandbox(first.claim_name)
    assert again.sandbox_id == first.sandbox_id
    assert again.files.read("kept") == b"still here"
    client.delete_sandbox(first.claim_name)
    until(lambda: not claim_exists(first.claim_name), "the claim is deleted")
    raises(SandboxNotFoundError, lambda: client.get_sandbox(first.claim_name, resolve_timeout=2))


@check
def the_environment_reaches_commands():
    with direct() as client:
        sandbox = client.create_sandbox(POOL, env={"GREETING": "hello there"})
        assert sandbox.commands.run("printenv GREETING").stdout == "hello there\n"


@check
def the_pods_metadata_is_the_claims():
    with direct() as client:
        sandbox = client.create_sandbox(
            POOL,
            pod_labels={"tenant": "a"},
            pod_annotations={"example.com/note": "a longer note"},
        )
        metadata = json.loads(kubectl("get", "pod", sandbox.get_pod_name(), "-o", "json"))["metadata"]
        assert metadata["labels"]["tenant"] == "a", metadata
        assert metadata["annotations"]["example.com/note"] == "a longer note", metadata


@check
def a_named_claim_is_adopted_when_it_exists():
    name = "by-name"
    first = direct().create_sandbox(POOL, claim_name=name)
    first.files.write("kept", "still here")
    raises(ApiException, lambda: direct().create_sandbox(POOL, claim_name=name))
    client = direct()
    again = client.create_sandbox(POOL, claim_name=name, adopt_existing=True)
    assert again.files.read("kept") == b"still here"
    client.delete_sandbox(name)
    until(lambda: not claim_exists(name), "the claim is deleted")


@check
def a_sandbox_ends_after_its_time():
    sandbox = direct().create_sandbox(POOL, shutdown_after_seconds=15)
    until(lambda: not claim_exists(sandbox.claim_name), "the claim expires")


@check
def a_missing_pool_is_said_to_be_missing():
    client = direct()
    raises(SandboxWarmPoolNotFoundError, lambda: client.create_sandbox("no-such-pool", sandbox_ready_timeout=20))
    assert client.list_all_sandboxes() == [], "the claim was rolled back"


run_checks()

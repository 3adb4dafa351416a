"""The published Python SDK, version 0.4.6, as its users call it: v1alpha1 claims made from a template."""

import json

import gateway
from checks import NAMESPACE, ROUTER_URL, check, kubectl, raises, run_checks, until

from k8s_agent_sandbox import SandboxClient
from k8s_agent_sandbox.exceptions import (
    SandboxNotFoundError,
    SandboxRequestError,
    SandboxTemplateNotFoundError,
)
from k8s_agent_sandbox.models import (
    SandboxDirectConnectionConfig,
    SandboxGatewayConnectionConfig,
    SandboxInClusterConnectionConfig,
)

TEMPLATE = "python-runtime-template"


def claim_exists(name):
    found = kubectl("get", "sandboxclaim", name, "--ignore-not-found", "-o", "name")
    return bool(found.strip())


def exercise(sandbox):
    """Commands and files, the same over every kind of connection."""
    result = sandbox.commands.run("python3 -c 'print(6*7)'")
    assert (result.stdout, result.stderr, result.exit_code) == ("42\n", "", 0), result
    result = sandbox.commands.run("sh -c 'echo out; echo err >&2; exit 3'")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3), result

    sandbox.files.write("note.txt", "remembered")
    sandbox.files.write("bytes.bin", bytes(range(256)))
    assert sandbox.files.read("note.txt") == b"remembered"
    assert sandbox.files.read("bytes.bin") == bytes(range(256))
    assert sandbox.commands.run("cat note.txt").stdout == "remembered"
    assert sandbox.files.exists("note.txt")
    assert not sandbox.files.exists("missing.txt")
    sandbox.commands.run("mkdir -p folder")
    entries = {entry.name: entry for entry in sandbox.files.list(".")}
    assert entries["note.txt"].type == "file" and entries["note.txt"].size == 10, entries
    assert entries["folder"].type == "directory", entries
    assert entries["note.txt"].mod_time > 0
    error = raises(SandboxRequestError, lambda: sandbox.files.read("missing.txt"))
    assert error.status_code == 404, error


@check
def through_the_tunnel():
    client = SandboxClient()
    sandbox = client.create_sandbox(TEMPLATE, labels={"team": "blue"})
    try:
        exercise(sandbox)
        assert sandbox.status()[0] == "SandboxReady", sandbox.status()
        assert sandbox.get_pod_ip()
        assert sandbox.get_pod_name()
        labels = kubectl("get", "sandboxclaim", sandbox.claim_name, "-o", "jsonpath={.metadata.labels.team}")
        assert labels == "blue", labels
        assert client.list_active_sandboxes() == [(NAMESPACE, sandbox.claim_name)]
        assert sandbox.claim_name in client.list_all_sandboxes()
    finally:
        client.delete_all()
    until(lambda: not claim_exists(sandbox.claim_name), "the claim is deleted")


@check
def by_a_gateway():
    gateway.start(NAMESPACE)
    client = SandboxClient(SandboxGatewayConnectionConfig(gateway_name=gateway.NAME, gateway_namespace=NAMESPACE))
    sandbox = client.create_sandbox(TEMPLATE)
    try:
        exercise(sandbox)
    finally:
        client.delete_sandbox(sandbox.claim_name)
        kubectl("delete", "gateway", gateway.NAME)


@check
def through_the_tunnel_in_another_namespace():
    kubectl("create", "namespace", "another")
    template = kubectl("get", "sandboxtemplate", TEMPLATE, "-o", "json")
    copy = json.loads(template)
    copy["metadata"] = {"name": TEMPLATE, "namespace": "another"}
    copy.pop("status", None)
    kubectl("apply", "-f", "-", text=json.dumps(copy))
    client = SandboxClient()
    sandbox = client.create_sandbox(TEMPLATE, namespace="another")
    try:
        assert sandbox.commands.run("echo elsewhere").stdout == "elsewhere\n"
    finally:
        client.delete_all()
    kubectl("delete", "namespace", "another", "--timeout=180s")


@check
def by_the_routers_address():
    client = SandboxClient(SandboxDirectConnectionConfig(api_url=ROUTER_URL))
    sandbox = client.create_sandbox(TEMPLATE)
    try:
        exercise(sandbox)
    finally:
        client.delete_all()


@check
def by_the_pods_address():
    client = SandboxClient(SandboxInClusterConnectionConfig(use_pod_ip=True))
    sandbox = client.create_sandbox(TEMPLATE)
    try:
        exercise(sandbox)
    finally:
        client.delete_all()


@check
def a_sandbox_is_found_again_by_name():
    config = SandboxDirectConnectionConfig(api_url=ROUTER_URL)
    first = SandboxClient(config).create_sandbox(TEMPLATE)
    first.files.write("kept", "still here")
    first.close_connection()
    client = SandboxClient(config)
    again = client.get_sandbox(first.claim_name)
    assert again.sandbox_id == first.sandbox_id
    assert again.files.read("kept") == b"still here"
    client.delete_sandbox(first.claim_name)
    until(lambda: not claim_exists(first.claim_name), "the claim is deleted")
    raises(SandboxNotFoundError, lambda: client.get_sandbox(first.claim_name, resolve_timeout=2))


@check
def a_sandbox_ends_after_its_time():
    client = SandboxClient(SandboxDirectConnectionConfig(api_url=ROUTER_URL))
    sandbox = client.create_sandbox(TEMPLATE, shutdown_after_seconds=15)
    until(lambda: not claim_exists(sandbox.claim_name), "the claim expires")


@check
def a_missing_template_is_said_to_be_missing():
    client = SandboxClient()
    raises(SandboxTemplateNotFoundError, lambda: client.create_sandbox("no-such-template", sandbox_ready_timeout=20))
    assert client.list_all_sandboxes() == [], "the claim was rolled back"


run_checks()

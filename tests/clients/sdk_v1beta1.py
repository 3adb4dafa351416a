"""The published Python SDKs of the v1beta1 generation, whichever version is installed: a pool's sandbox over every kind of connection, by the
synchronous and the asynchronous client. What one version has more than another is left to the scripts of that version.

Several versions run this at the same time, each in a namespace of its own.
"""

import asyncio
import json
import os
from importlib import metadata

import gateway
from checks import ROUTER_URL, check, kubectl, raises, run_checks, until

from k8s_agent_sandbox import AsyncSandboxClient, SandboxClient, SandboxNotFoundError
from k8s_agent_sandbox.models import (
    SandboxDirectConnectionConfig,
    SandboxGatewayConnectionConfig,
    SandboxInClusterConnectionConfig,
)

NAMESPACE = "sdk-" + metadata.version("k8s-agent-sandbox").replace(".", "-") + f"-{os.getpid()}"
POOL = "pool"


def apply(document):
    kubectl("apply", "-f", "-", text=json.dumps(document))


def prepare():
    """A namespace with a template and a pool, as the quickstart has them."""
    kubectl("create", "namespace", NAMESPACE)
    template = json.loads(kubectl("get", "sandboxtemplate", "python-runtime-template", "-n", "default", "-o", "json"))
    apply({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxTemplate",
        "metadata": {"name": "template", "namespace": NAMESPACE},
        "spec": template["spec"],
    })
    apply({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxWarmPool",
        "metadata": {"name": POOL, "namespace": NAMESPACE},
        "spec": {"replicas": 2, "sandboxTemplateRef": {"name": "template"}},
    })
    kubectl("wait", "--for=jsonpath={.status.readyReplicas}=2", f"sandboxwarmpool/{POOL}", "-n", NAMESPACE, "--timeout=180s")


def direct():
    return SandboxDirectConnectionConfig(api_url=ROUTER_URL)


def by_gateway():
    return SandboxGatewayConnectionConfig(gateway_name=gateway.NAME, gateway_namespace=NAMESPACE)


def exercise(config=None):
    """Commands and files, the same over every kind of connection."""
    client = SandboxClient(config) if config else SandboxClient()
    sandbox = client.create_sandbox(POOL, namespace=NAMESPACE)
    try:
        result = sandbox.commands.run("sh -c 'echo out; echo err >&2; exit 3'")
        assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3), result
        content = bytes(range(256)) * 64
        sandbox.files.write("data.bin", content)
        assert sandbox.files.read("data.bin") == content
        assert {entry.name for entry in sandbox.files.list(".")} >= {"data.bin"}
    finally:
        client.delete_sandbox(sandbox.claim_name, namespace=NAMESPACE)


@check
def through_the_tunnel():
    exercise()


@check
def by_the_routers_address():
    exercise(direct())


@check
def by_a_gateway():
    exercise(by_gateway())


@check
def by_the_pods_address():
    # Version 0.5.0 takes the name of the service unless it is told to take the address, which later versions do by themselves.
    fields = SandboxInClusterConnectionConfig.model_fields
    exercise(SandboxInClusterConnectionConfig(**({"use_pod_ip": True} if "use_pod_ip" in fields else {})))


@check
def a_sandbox_is_found_again_by_name_and_gone_once_it_is_deleted():
    first = SandboxClient(direct()).create_sandbox(POOL, namespace=NAMESPACE, labels={"team": "blue"})
    first.files.write("kept", "still here")
    client = SandboxClient(direct())
    assert client.list_all_sandboxes(namespace=NAMESPACE) == [first.claim_name]
    again = client.get_sandbox(first.claim_name, namespace=NAMESPACE)
    assert again.sandbox_id == first.sandbox_id
    assert again.files.read("kept") == b"still here"
    client.delete_sandbox(first.claim_name, namespace=NAMESPACE)
    until(lambda: not client.list_all_sandboxes(namespace=NAMESPACE), "the claim is deleted")
    raises(SandboxNotFoundError, lambda: client.get_sandbox(first.claim_name, namespace=NAMESPACE, resolve_timeout=2))


@check
def by_the_asynchronous_client():
    async def run(config):
        async with AsyncSandboxClient(config) as client:
            sandbox = await client.create_sandbox(POOL, namespace=NAMESPACE)
            result = await sandbox.commands.run("python3 -c 'print(6*7)'")
            assert (result.stdout, result.exit_code) == ("42\n", 0), result
            await sandbox.files.write("note", "remembered")
            assert await sandbox.files.read("note") == b"remembered"
            await client.delete_sandbox(sandbox.claim_name, namespace=NAMESPACE)

    asyncio.run(run(direct()))
    asyncio.run(run(by_gateway()))


prepare()
gateway.start(NAMESPACE)
try:
    run_checks()
finally:
    kubectl("delete", "namespace", NAMESPACE, "--wait=false")

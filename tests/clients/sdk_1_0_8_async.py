"""The published Python SDK, version 1.0.8, asynchronous."""

import asyncio

from checks import NAMESPACE, ROUTER_URL, check, kubectl, run_checks, until

from k8s_agent_sandbox import AsyncSandboxClient, SandboxNotFoundError
from k8s_agent_sandbox.models import (
    SandboxDirectConnectionConfig,
    SandboxInClusterConnectionConfig,
)

POOL = "python-warmpool"


def claim_exists(name):
    return bool(kubectl("get", "sandboxclaim", name, "--ignore-not-found", "-o", "name").strip())


async def exercise(sandbox):
    result = await sandbox.commands.run("python3 -c 'print(6*7)'")
    assert (result.stdout, result.exit_code) == ("42\n", 0), result
    await sandbox.files.write("folder/note.txt", b"remembered")
    assert await sandbox.files.read("folder/note.txt") == b"remembered"
    assert await sandbox.files.exists("folder/note.txt")
    assert [entry.name for entry in await sandbox.files.list("folder")] == ["note.txt"]
    assert (await sandbox.status())[0] == "SandboxReady"


@check
def several_at_once():
    async def body():
        config = SandboxDirectConnectionConfig(api_url=ROUTER_URL)
        async with AsyncSandboxClient(config) as client:
            sandboxes = await asyncio.gather(*(client.create_sandbox(POOL) for _ in range(4)))
            assert len({sandbox.sandbox_id for sandbox in sandboxes}) == 4
            await asyncio.gather(*(exercise(sandbox) for sandbox in sandboxes))

    asyncio.run(body())


@check
def by_the_pods_address():
    async def body():
        async with AsyncSandboxClient(SandboxInClusterConnectionConfig()) as client:
            await exercise(await client.create_sandbox(POOL, env={"A": "b"}))

    asyncio.run(body())


@check
def labels_and_lists():
    async def body():
        async with AsyncSandboxClient(SandboxDirectConnectionConfig(api_url=ROUTER_URL)) as client:
            sandbox = await client.create_sandbox(POOL, labels={"team": "blue"})
            claim = sandbox.claim_name
            label = kubectl("get", "sandboxclaim", claim, "-o", "jsonpath={.metadata.labels.team}")
            assert label == "blue", label
            assert await client.list_active_sandboxes() == [(NAMESPACE, claim)]
            assert await client.list_all_sandboxes(label_selector="team=blue") == [claim]
            assert await client.list_all_sandboxes(label_selector="team=red") == []
            await client.delete_sandbox(claim)
            until(lambda: not claim_exists(claim), "the claim is deleted")

    asyncio.run(body())


@check
def a_sandbox_ends_after_its_time():
    async def body():
        async with AsyncSandboxClient(SandboxDirectConnectionConfig(api_url=ROUTER_URL)) as client:
            sandbox = await client.create_sandbox(POOL, shutdown_after_seconds=15)
            until(lambda: not claim_exists(sandbox.claim_name), "the claim expires")

    asyncio.run(body())


@check
def a_sandbox_is_found_again_by_name():
    async def body():
        config = SandboxDirectConnectionConfig(api_url=ROUTER_URL)
        async with AsyncSandboxClient(config) as client:
            first = await client.create_sandbox(POOL)
            await first.files.write("kept", b"still here")
            async with AsyncSandboxClient(config) as other:
                again = await other.get_sandbox(first.claim_name)
                assert await again.files.read("kept") == b"still here"
                try:
                    await other.get_sandbox("no-such-claim", resolve_timeout=2)
                except SandboxNotFoundError:
                    return
                raise AssertionError("a claim that does not exist was found")

    asyncio.run(body())


run_checks()

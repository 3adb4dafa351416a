"""The published Python SDK, version 0.4.6, asynchronous."""

import asyncio

from checks import NAMESPACE, ROUTER_URL, check, kubectl, run_checks, until

from k8s_agent_sandbox import AsyncSandboxClient
from k8s_agent_sandbox.exceptions import SandboxNotFoundError
from k8s_agent_sandbox.models import SandboxDirectConnectionConfig

TEMPLATE = "python-runtime-template"


def client():
    return AsyncSandboxClient(SandboxDirectConnectionConfig(api_url=ROUTER_URL))


def claim_exists(name):
    return bool(kubectl("get", "sandboxclaim", name, "--ignore-not-found", "-o", "name").strip())


async def exercise(sandbox):
    result = await sandbox.commands.run("python3 -c 'print(6*7)'")
    assert (result.stdout, result.exit_code) == ("42\n", 0), result
    await sandbox.files.write("note.txt", b"remembered")
    assert await sandbox.files.read("note.txt") == b"remembered"
    assert await sandbox.files.exists("note.txt")
    assert "note.txt" in [entry.name for entry in await sandbox.files.list(".")]


@check
def several_at_once():
    async def body():
        async with client() as sandboxes:
            made = await asyncio.gather(*(sandboxes.create_sandbox(TEMPLATE) for _ in range(3)))
            try:
                assert len({sandbox.sandbox_id for sandbox in made}) == 3
                await asyncio.gather(*(exercise(sandbox) for sandbox in made))
            finally:
                await sandboxes.delete_all()
        return [sandbox.claim_name for sandbox in made]

    for name in asyncio.run(body()):
        until(lambda: not claim_exists(name), "the claim is deleted")


@check
def labels_and_lists():
    async def body():
        async with client() as sandboxes:
            sandbox = await sandboxes.create_sandbox(TEMPLATE, labels={"team": "blue"})
            try:
                label = kubectl("get", "sandboxclaim", sandbox.claim_name, "-o", "jsonpath={.metadata.labels.team}")
                assert label == "blue", label
                assert await sandboxes.list_active_sandboxes() == [(NAMESPACE, sandbox.claim_name)]
                assert sandbox.claim_name in await sandboxes.list_all_sandboxes()
            finally:
                await sandboxes.delete_sandbox(sandbox.claim_name)

    asyncio.run(body())


@check
def a_sandbox_is_found_again_by_name():
    async def body():
        async with client() as sandboxes, client() as others:
            first = await sandboxes.create_sandbox(TEMPLATE)
            await first.files.write("kept", b"still here")
            again = await others.get_sandbox(first.claim_name)
            assert await again.files.read("kept") == b"still here"
            await sandboxes.delete_all()
            try:
                await others.get_sandbox("no-such-claim", resolve_timeout=2)
            except SandboxNotFoundError:
                return
            raise AssertionError("a claim that does not exist was found")

    asyncio.run(body())


@check
def a_sandbox_ends_after_its_time():
    async def body():
        async with client() as sandboxes:
            return (await sandboxes.create_sandbox(TEMPLATE, shutdown_after_seconds=15)).claim_name

    name = asyncio.run(body())
    until(lambda: not claim_exists(name), "the claim expires")


run_checks()

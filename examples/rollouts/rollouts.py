"""Scores programs that a policy has written, each in a sandbox of its own, many at once.

The trainer stays outside: it holds the policy and the rewards, and only the programs cross into sandboxes. A sandbox is used once, so that no
program can leave anything for the next.
"""

import asyncio
import os
import time

from k8s_agent_sandbox import AsyncSandboxClient
from k8s_agent_sandbox.models import SandboxDirectConnectionConfig

POOL = "rollouts"
ROLLOUTS = 16
AT_ONCE = 4

# What a policy might propose for "double a number": right, wrong, broken, and never ending.
PROGRAMS = (
    "def double(x): return 2 * x",
    "def double(x): return x ** 2",
    "def double(x) return x",
    "def double(x):\n    while True: pass",
)
# CPU time: on a busy machine a correct program may take long.
LIMITED = "ulimit -t 2; exec python3 test.py"
TEST = "from solution import double\nassert [double(x) for x in range(4)] == [0, 2, 4, 6]\n"


async def reward(client, program):
    """1 if the program passes the test in time, else 0."""
    sandbox = await client.create_sandbox(POOL)
    try:
        await sandbox.files.write("solution.py", program.encode())
        await sandbox.files.write("test.py", TEST.encode())
        result = await sandbox.commands.run(f"timeout 60 sh -c '{LIMITED}'")
        return int(result.exit_code == 0)
    finally:
        await sandbox.terminate()


async def main():
    router = os.environ.get("ROUTER_URL", "http://127.0.0.1:8080")
    gate = asyncio.Semaphore(AT_ONCE)
    async with AsyncSandboxClient(SandboxDirectConnectionConfig(api_url=router)) as client:

        async def rollout(number):
            async with gate:
                return await reward(client, PROGRAMS[number % len(PROGRAMS)])

        began = time.monotonic()
        rewards = await asyncio.gather(*(rollout(number) for number in range(ROLLOUTS)))
    print(f"{sum(rewards)} of {len(rewards)} programs passed")
    print(f"{len(rewards) / (time.monotonic() - began):.1f} rollouts a second")


if __name__ == "__main__":
    asyncio.run(main())

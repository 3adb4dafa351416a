"""What the client checks share: a list of named checks that are run in order, and waiting with a deadline."""

import os
import subprocess
import sys
import time
import traceback

ROUTER_URL = os.environ["ROUTER_URL"]
NAMESPACE = "default"
# Generous, because it only costs time when a check fails. More than any `--timeout` that kubectl is given: what it says of its own is worth
# more than that it was killed.
DEADLINE_SECONDS = 240

_checks = []

# The names of checks that failed, for the cleanup.
failed = []


def check(function):
    """Marks a function as a check; its name says what it promises."""
    _checks.append(function)
    return function


def run_checks():
    """Runs every check and ends the process with 1 if one failed."""
    for function in _checks:
        name = function.__name__.replace("_", " ")
        begin = time.monotonic()
        try:
            function()
        except Exception:
            traceback.print_exc()
            failed.append(name)
        verdict = "FAILED" if name in failed else "ok"
        print(f"{verdict:>6}  {name} ({time.monotonic() - begin:.1f}s)", flush=True)
    if failed:
        sys.exit(f"{len(failed)} of {len(_checks)} checks failed: {', '.join(failed)}")


def until(condition, what):
    """Waits until a condition holds, and returns what it returned."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {DEADLINE_SECONDS} s: {what}")


def raises(error, function):
    """Calls a function that must fail with this error, and returns it."""
    try:
        value = function()
    except error as raised:
        return raised
    raise AssertionError(f"expected {error.__name__}, got {value!r}")


def kubectl(*arguments, text=None, succeeds=True, environment=None):
    """The standard output of a kubectl command that must succeed, or the standard error of one that must not."""
    result = subprocess.run(
        ["kubectl", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        env={**os.environ, **(environment or {})},
    )
    output = f"kubectl {' '.join(arguments)}: exit {result.returncode}\n{result.stdout}\n{result.stderr}"
    assert (result.returncode == 0) == succeeds, output
    return result.stdout if succeeds else result.stderr

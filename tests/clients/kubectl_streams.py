"""kubectl exec, cp, logs, attach and port-forward against sandboxes' pods, over WebSocket and over SPDY."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import tempfile
import termios
import time
import urllib.request

from checks import DEADLINE_SECONDS, check, kubectl, run_checks, until

POD = "talker"
SPDY = {"KUBECTL_REMOTE_COMMAND_WEBSOCKETS": "false", "KUBECTL_PORT_FORWARD_WEBSOCKETS": "false"}
WEBSOCKET = {"KUBECTL_REMOTE_COMMAND_WEBSOCKETS": "true", "KUBECTL_PORT_FORWARD_WEBSOCKETS": "true"}

SCRIPT = """
echo first; echo second; echo third
python3 -m http.server --bind 127.0.0.1 8000 >/dev/null 2>&1 &
while read line; do echo "heard $line"; done
"""


def pod():
    container = {
        "name": "main",
        "image": "host",
        "command": ["sh", "-c", SCRIPT],
        "stdin": True,
        "workingDir": "/tmp",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": POD},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
    }


def over_both(function):
    """Runs a check once for each protocol."""

    def both():
        for environment in (WEBSOCKET, SPDY):
            function(environment)

    both.__name__ = function.__name__
    return check(both)


@check
def the_pod_runs():
    kubectl("apply", "-f", "-", text=json.dumps(pod()))
    kubectl("wait", f"pod/{POD}", "--for=condition=Ready", "--timeout=180s")


@over_both
def exec_keeps_the_streams_apart_and_passes_the_exit_code(environment):
    command = ["kubectl", "exec", "-i", POD, "--", "sh", "-c", "cat; echo err >&2; exit 7"]
    done = subprocess.run(
        command,
        input=b"from outside\n" * 20000,
        capture_output=True,
        timeout=DEADLINE_SECONDS,
        env={**os.environ, **environment},
    )
    assert done.returncode == 7, done
    assert done.stdout == b"from outside\n" * 20000, len(done.stdout)
    assert done.stderr.startswith(b"err\n"), done.stderr
    assert kubectl("exec", POD, "--", "pwd", environment=environment) == "/tmp\n"


@over_both
def exec_gives_a_terminal_of_the_right_size(environment):
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    # 21 rows of 77 columns.
    size = struct.pack("HHHH", 21, 77, 0, 0)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
    session = subprocess.Popen(
        ["kubectl", "exec", "-it", POD, "--", "sh"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    os.close(slave)
    seen = b""

    def read_until(pattern):
        nonlocal seen
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not re.search(pattern, seen):
            assert time.monotonic() < deadline, seen
            if select.select([master], [], [], 0.2)[0]:
                seen += os.read(master, 4096)

    os.write(master, b"until [ \"$(stty size)\" = '21 77' ]; do sleep 0.1; done; echo size=$((20+1)); test -t 0 && echo a-$((40+2))\n")
    read_until(rb"size=21\r\n")
    read_until(rb"a-42\r\n")
    os.write(master, b"exit 5\n")
    assert session.wait(timeout=DEADLINE_SECONDS) == 5, seen
    os.close(master)


@over_both
def files_are_copied_both_ways(environment):
    with tempfile.TemporaryDirectory() as directory:
        there, back = os.path.join(directory, "there"), os.path.join(directory, "back")
        with open(there, "wb") as file:
            file.write(os.urandom(3 << 20))
        kubectl("cp", there, f"{POD}:/tmp/copied", environment=environment)
        kubectl("cp", f"{POD}:/tmp/copied", back, environment=environment)
        with open(there, "rb") as first, open(back, "rb") as second:
            assert first.read() == second.read()


@check
def logs_are_read_in_full_by_tail_and_by_time():
    until(lambda: "third" in kubectl("logs", POD), "the log has three lines")
    assert kubectl("logs", POD).startswith("first\nsecond\nthird\n")
    assert kubectl("logs", POD, "--tail=0") == ""
    line = kubectl("logs", POD, "--timestamps").splitlines()[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z first", line), line
    assert kubectl("logs", POD, "--since=1h").startswith("first\n")
    assert "first" not in kubectl("logs", POD, "--since-time=2100-01-01T00:00:00Z")
    assert kubectl("logs", POD, "--limit-bytes=8") == "first\nse"
    error = kubectl("logs", POD, "--previous", succeeds=False)
    assert "previous terminated container" in error, error


@over_both
def attach_speaks_with_the_containers_own_command(environment):
    word = "spdy" if environment is SPDY else "websocket"
    follower = subprocess.Popen(
        ["kubectl", "logs", "-f", "--tail=1", POD],
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    attached = subprocess.Popen(
        ["kubectl", "attach", "-i", POD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, **environment},
    )
    try:
        attached.stdin.write(f"{word}\n".encode())
        assert read_line(attached.stdout) == f"heard {word}\n"
        # The line that was the last when the follower came may be shown before.
        output = [read_line(follower.stdout)]
        if output[-1] != f"heard {word}\n":
            output.append(read_line(follower.stdout))
        assert output[-1] == f"heard {word}\n", output
    finally:
        for process in (attached, follower):
            process.kill()
            process.communicate()


def read_line(stream):
    """The next line of an unbuffered stream, which alone can be waited for with a deadline."""
    ready, _, _ = select.select([stream], [], [], DEADLINE_SECONDS)
    assert ready, "nothing was printed in time"
    return stream.readline().decode()


class Forward:
    """A running kubectl port-forward; `port` is the local one."""

    def __init__(self, environment, *arguments):
        self.process = subprocess.Popen(
            ["kubectl", "port-forward", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **environment},
        )

    def __enter__(self):
        line = read_line(self.process.stdout)
        found = re.search(r"Forwarding from 127.0.0.1:(\d+)", line)
        assert found, (line, self.process.stderr.read())
        self.port = int(found.group(1))
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def fetch(port, path="/"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE_SECONDS) as answer:
        return answer.read()


@over_both
def a_port_of_the_pods_loopback_is_forwarded(environment):
    # Its server listens on 8000, which the kernel spells so.
    until(lambda: "0100007F:1F40" in kubectl("exec", POD, "--", "cat", "/proc/net/tcp"), "the pod's server")
    with Forward(environment, f"pod/{POD}", ":8000") as forward:
        for _ in range(5):
            assert b"Directory listing" in fetch(forward.port)


@over_both
def the_routers_service_is_forwarded(environment):
    for namespace in ("default", "agent-sandbox-system"):
        with Forward(environment, "-n", namespace, "svc/sandbox-router-svc", ":8080") as forward:
            assert b"ok" in fetch(forward.port, "/healthz").lower()


@check
def the_routers_pod_comes_back_when_it_is_deleted():
    before = kubectl("get", "pod", "sandbox-router", "-o", "jsonpath={.metadata.uid}")
    kubectl("delete", "pod", "sandbox-router", "--wait=false")
    find = ["get", "pod", "sandbox-router", "--ignore-not-found", "-o", "jsonpath={.metadata.uid}"]
    until(lambda: kubectl(*find) not in ("", before), "another pod")
    kubectl("wait", "pod/sandbox-router", "--for=condition=Ready", "--timeout=180s")
    slices = kubectl("get", "endpointslices", "-l", "kubernetes.io/service-name=sandbox-router-svc", "-o", "name")
    assert slices.strip(), "the service has endpoints"


@check
def the_log_of_the_run_before_is_kept():
    crashing = pod()
    crashing["metadata"]["name"] = "crashing"
    crashing["spec"]["containers"][0]["command"] = ["sh", "-c", "echo run; echo failed >&2; exit 1"]
    kubectl("apply", "-f", "-", text=json.dumps(crashing))
    restarts = ["get", "pod", "crashing", "-o", "jsonpath={.status.containerStatuses[0].restartCount}"]
    until(lambda: kubectl(*restarts) not in ("", "0"), "a restart")
    assert sorted(kubectl("logs", "crashing", "--previous").splitlines()) == ["failed", "run"]
    assert sorted(kubectl("logs", "-f", "crashing").splitlines()) == ["failed", "run"]
    errors = kubectl("get", "--raw", "/api/v1/namespaces/default/pods/crashing/log?stream=Stderr&previous=true")
    assert errors == "failed\n", errors
    kubectl("delete", "pod", "crashing", "--timeout=180s")


@check
def a_pod_is_run_attached_and_removed():
    command = ["run", "once", "--image=host", "--restart=Never", "--rm", "-i", "--quiet", "--command", "--"]
    output = kubectl(*command, "sh", "-c", "read line; echo heard $line", text="you\n")
    assert output.startswith("heard you\n"), output
    assert kubectl("get", "pod", "once", "--ignore-not-found") == ""


@check
def a_pod_is_debugged_from_within():
    # The profile that newer releases take otherwise asks for SYS_PTRACE, which this node gives to no container.
    command = ["debug", POD, "--profile=baseline", "--image=host", "--target=main", "--container=looker", "--attach=false", "--"]
    kubectl(*command, "sh", "-c", "echo looking; exec sleep 1000")
    state = "jsonpath={.status.ephemeralContainerStatuses[?(@.name=='looker')].state.running.startedAt}"
    until(lambda: kubectl("get", "pod", POD, "-o", state), "the ephemeral container to run")
    processes = kubectl("exec", POD, "-c", "looker", "--", "sh", "-c", "cat /proc/[0-9]*/cmdline")
    assert "http.server" in processes, processes
    until(lambda: kubectl("logs", POD, "-c", "looker") == "looking\n", "its first word")


@check
def what_cannot_be_reached_is_said():
    error = kubectl("exec", POD, "--", "no-such-program", succeeds=False)
    assert "no-such-program" in error, error
    error = kubectl("exec", "no-such-pod", "--", "true", succeeds=False)
    assert 'pods "no-such-pod" not found' in error, error
    error = kubectl("logs", POD, "-c", "no-such-container", succeeds=False)
    assert "no-such-container is not valid for pod" in error, error


@check
def the_pod_is_deleted():
    kubectl("delete", "pod", POD, "--timeout=180s")


run_checks()

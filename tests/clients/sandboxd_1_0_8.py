"""The published SDK's own file and command clients, version 1.0.8, and the gRPC stubs of its wheel against the in-sandbox runtime:
the API of port 8888, and the newer one of ports 8080 (files) and 9090 (processes); and against a sandbox of the quickstart."""

import contextlib
import io
import os
import socket
import subprocess
import sys
import tempfile

import grpc
import k8s_agent_sandbox
import requests

from checks import check, run_checks, until

sys.path.insert(0, os.path.join(os.path.dirname(k8s_agent_sandbox.__file__), "_proto"))

from google.protobuf import empty_pb2  # noqa: E402
from k8s_agent_sandbox import SandboxClient  # noqa: E402
from k8s_agent_sandbox.commands.command_executor import CommandExecutor  # noqa: E402
from k8s_agent_sandbox.files.filesystem import Filesystem  # noqa: E402
from k8s_agent_sandbox.models import SandboxdPodTunnelConnectionConfig  # noqa: E402
from process.v1 import process_pb2 as messages  # noqa: E402
from process.v1 import process_pb2_grpc as service  # noqa: E402


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return "127.0.0.1:%d" % listener.getsockname()[1]


def listens(address):
    host, port = address.split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


@contextlib.contextmanager
def sandboxd():
    """The addresses of a running runtime: the SDK's API, and the two halves of the newer one."""
    addresses = [free_address() for _ in range(3)]
    sdk, rest, processes = addresses
    with tempfile.TemporaryDirectory() as base:
        command = [os.environ["AGENT_SANDBOX"], "sandboxd", "--", "--base-dir", base, "--listen", sdk, "--init-listen", "none"]
        with subprocess.Popen([*command, "--rest-listen", rest, "--grpc-listen", processes]) as process:
            try:
                until(lambda: all(map(listens, addresses)), "the runtime listens")
                yield addresses
            finally:
                process.terminate()


class Connector:
    """What the SDK's clients need of a connection, without Kubernetes."""

    def __init__(self, base_url, channel, newer):
        self.base_url, self.channel, self.newer = base_url, channel, newer

    def is_sandboxd(self):
        return self.newer

    def connect(self):
        return self.base_url

    def grpc_channel(self):
        return self.channel

    def invalidate_sandboxd_transport(self, *_arguments, **_options):
        pass

    def send_request(self, method, endpoint, **options):
        allowed = options.pop("allowed_statuses", None) or ()
        options.pop("_disable_retries", None)
        response = requests.request(method, f"{self.base_url}/{endpoint}", **options)
        if response.status_code not in allowed:
            response.raise_for_status()
        return response


def config(*command, **options):
    return messages.ProcessConfig(command=command, **options)


def refused(call, request, code, **options):
    try:
        call(request, **options)
    except grpc.RpcError as error:
        assert error.code() == code, error
    else:
        raise AssertionError(f"{request} was not refused")


def check_processes(channel):
    stub = service.ProcessServiceStub(channel)
    answer = stub.Execute(
        messages.ExecuteRequest(config=config("/bin/sh", "-c", "echo $A; echo e >&2; exit 3", env_vars={"A": "x"})), timeout=60
    )
    assert (answer.exit_code, answer.stdout, answer.stderr) == (3, b"x\n", b"e\n"), answer
    refused(stub.Execute, messages.ExecuteRequest(config=config("sleep", "60")), grpc.StatusCode.DEADLINE_EXCEEDED, timeout=0.3)

    events = iter(stub.Start(messages.StartRequest(config=config("cat"))))
    process = next(events).init.process_id
    stub.WriteStdin(messages.WriteStdinRequest(process_id=process, input=b"typed"))
    assert next(events).stdout == b"typed"
    stub.WriteStdin(messages.WriteStdinRequest(process_id=process, eof=empty_pb2.Empty()))
    assert next(events).exit.exit_code == 0
    assert list(events) == []

    events = iter(stub.Start(messages.StartRequest(config=config("/bin/sh"), pty=messages.PTY(cols=100, rows=30))))
    process = next(events).init.process_id
    stub.ResizeTTY(messages.ResizeTTYRequest(process_id=process, cols=120, rows=40))
    stub.WriteStdin(messages.WriteStdinRequest(process_id=process, input=b"stty size; exit 5\n"))
    *output, last = events
    assert b"40 120" in b"".join(event.stdout for event in output) and last.exit.exit_code == 5

    events = iter(stub.Start(messages.StartRequest(config=config("sleep", "60"))))
    process = next(events).init.process_id
    stub.SendSignal(messages.SendSignalRequest(process_id=process, signal=messages.SIGNAL_SIGTERM))
    assert next(events).exit.exit_code == 143
    gone = messages.SendSignalRequest(process_id=999_999_999, signal=messages.SIGNAL_SIGTERM)
    refused(stub.SendSignal, gone, grpc.StatusCode.NOT_FOUND)


def check_sdk(connector):
    files = Filesystem(connector, None, "check")
    commands = CommandExecutor(connector, None, "check")
    files.write("dir a/ünï code.txt", "content")
    assert files.read("dir a/ünï code.txt") == b"content"
    files.write("stream.bin", io.BytesIO(b"z" * 300_000))
    received = io.BytesIO()
    assert files.read_to("stream.bin", received) == 300_000
    kinds = {entry.name: entry.type for entry in files.list(".")}
    assert kinds["dir a"] == "directory" and kinds["stream.bin"] == "file", kinds
    assert files.exists("stream.bin") and not files.exists("missing")
    result = commands.run("echo hello")
    assert (result.stdout, result.exit_code) == ("hello\n", 0), result
    result = commands.run("sleep 60", command_timeout=0.3)
    assert result.timed_out and result.exit_code == 124, result
    if connector.newer:
        files.delete("dir a", recursive=True)
        assert not files.exists("dir a")
        assert commands.run("echo $K", env={"K": "v"}, cwd=".").stdout == "v\n"


@check
def processes_over_grpc():
    with sandboxd() as (_, _, processes), grpc.insecure_channel(processes) as channel:
        check_processes(channel)


@check
def the_sdk_over_the_api_of_port_8888():
    with sandboxd() as (sdk, _, processes), grpc.insecure_channel(processes) as channel:
        check_sdk(Connector(f"http://{sdk}", channel, newer=False))


@check
def the_sdk_over_the_newer_api():
    with sandboxd() as (_, rest, processes), grpc.insecure_channel(processes) as channel:
        check_sdk(Connector(f"http://{rest}", channel, newer=True))


@check
def a_sandbox_of_the_quickstart_over_the_newer_api():
    with SandboxClient(SandboxdPodTunnelConnectionConfig()) as client:
        sandbox = client.create_sandbox(warmpool="python-warmpool")
        sandbox.files.write("deep/down/note.txt", "remembered")
        assert sandbox.files.read("deep/down/note.txt") == b"remembered"
        assert {entry.name for entry in sandbox.files.list("deep")} == {"down"}
        result = sandbox.commands.run("cat deep/down/note.txt")
        assert (result.stdout, result.exit_code) == ("remembered", 0), result
        sandbox.files.delete("deep", recursive=True)
        assert not sandbox.files.exists("deep")
        sandbox.terminate()


run_checks()

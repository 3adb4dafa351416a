"""The secure default of a template, enforced by the cluster's own NetworkPolicy engine: no metadata service, no other pods, no API server."""

import http.server
import json
import threading
import urllib.request

import cluster
import whole
from checks import check, kubectl, run_checks, until
from cluster import apply, claim, get, pool, pool_is_full, ready
from whole import pod, pod_ready, runtime_template

SPACE = "policies"
METADATA = ("169.254.169.254", 80)
state = {}


class Metadata(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"credentials")

    def log_message(self, *_):
        pass


def reaches(asker, target):
    """Whether a connection from the pod to the address is accepted."""
    dial = f"import socket; socket.create_connection({target!r}, 3); print('connected')"
    said = kubectl("exec", asker, "-n", SPACE, "--", "sh", "-c", f'python3 -c "{dial}" 2>&1 | tail -1')
    assert said == "connected\n" or "timed out" in said or "refused" in said or "unreachable" in said, said
    return said == "connected\n"


@check
def targets_answer_a_pod_without_policies():
    cluster.namespace(SPACE)
    threading.Thread(target=http.server.ThreadingHTTPServer(METADATA, Metadata).serve_forever, daemon=True).start()
    apply(
        [
            pod("tool", SPACE, command="mkdir -p /tmp/www && echo tool > /tmp/www/index.html && exec /bin/busybox httpd -f -p 8000 -h /tmp/www"),
            runtime_template("secure", SPACE),
            runtime_template("open", SPACE, networkPolicyManagement="Unmanaged"),
            pool("secure", SPACE, "secure", 1),
            pool("open", SPACE, "open", 1),
        ]
    )
    state["tool"] = pod_ready("tool", SPACE)["status"]["podIP"]
    for name in ("secure", "open"):
        pool_is_full(name, SPACE)
        apply(claim(name, SPACE, warmPoolRef={"name": name}))
        state[name] = ready("sandboxclaim", name, SPACE)["status"]["sandbox"]["name"]
    state["targets"] = {
        "metadata": METADATA,
        "pod": (state["tool"], 8000),
        "api": (get("service", "kubernetes", "default")["spec"]["clusterIP"], 443),
        "node": ("10.99.0.2", 6443),
    }
    for name, target in state["targets"].items():
        until(lambda: reaches(state["open"], target), f"the unmanaged sandbox to reach {name} at {target}")


@check
def a_sandbox_reaches_none_of_them():
    for name, target in state["targets"].items():
        until(lambda: not reaches(state["secure"], target), f"the sandbox to be kept from {name}")


@check
def another_pod_does_not_reach_the_sandbox():
    address = get("pod", state["secure"], SPACE)["status"]["podIP"]
    open_address = get("pod", state["open"], SPACE)["status"]["podIP"]
    assert reaches(state["open"], (open_address, 8888)), "the runtime answers"
    assert not reaches(state["open"], (address, 8888))


@check
def the_router_reaches_the_sandbox():
    request = urllib.request.Request(
        f"{cluster.start_router()}/execute",
        data=json.dumps({"command": "echo here"}).encode(),
        headers={"X-Sandbox-ID": state["secure"], "X-Sandbox-Namespace": SPACE, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert json.load(answer)["stdout"] == "here\n"


@check
def the_sandbox_has_no_credentials_of_the_cluster():
    listing = kubectl("exec", state["secure"], "-n", SPACE, "--", "sh", "-c", "ls /var/run/secrets/kubernetes.io 2>&1 || true")
    assert "No such file" in listing, listing


@check
def nothing_is_left():
    kubectl("delete", "namespace", SPACE, "--timeout=180s")


run_checks()

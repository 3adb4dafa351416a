"""What breaks on a cluster, under load: leaders die, the API server restarts, etcd stalls, requests fail. Everything converges, and no
sandbox is ever held by two claims."""

import http.client
import http.server
import json
import os
import random
import signal
import ssl
import threading
import time
import urllib.parse

import cluster
from checks import check, kubectl, run_checks, until
from cluster import apply, claim, items, pool, pool_is_full, template

SPACE = "storm"
CLAIMS = 20
state = {}


class Replicas:
    """Controllers that are started again when they end, as a Deployment would."""

    def __init__(self, count, kubeconfig=None):
        self.kubeconfig = kubeconfig or cluster.account_kubeconfig()
        self.lock = threading.Lock()
        self.stopping = False
        self.running = [self._start() for _ in range(count)]
        self.keeper = threading.Thread(target=self._keep, daemon=True)
        self.keeper.start()

    def _start(self):
        return cluster.Controller(kubeconfig=self.kubeconfig, comes_back=False)

    def _keep(self):
        while not self.stopping:
            with self.lock:
                for index, controller in enumerate(self.running):
                    if controller.child.poll() is not None and not self.stopping:
                        try:
                            self.running[index] = self._start()
                        except AssertionError:
                            pass  # Its arguments come from an API server that may just be down.
            time.sleep(0.2)

    def leader(self):
        def look():
            holder = cluster.get("lease", "a3317529.agent-sandbox.x-k8s.io", cluster.SYSTEM)["spec"].get("holderIdentity")
            for controller in self.running:
                if holder and holder in controller.log_text() and controller.child.poll() is None:
                    return controller
            return None

        return until(look, "a leader")

    def stop(self):
        with self.lock:
            self.stopping = True
        self.keeper.join()
        for controller in self.running:
            controller.end()


def storm(name, disturb):
    """Makes claims in four waves, disturbs the cluster after the first, and waits until all are met."""
    names = [f"{name}-{number}" for number in range(CLAIMS)]
    waves = [names[wave::4] for wave in range(4)]
    begin = time.monotonic()

    def make(wave):
        things = [claim(one, SPACE, sandboxTemplateRef={"name": "plain"}) for one in wave]
        until(lambda: _applies(things), "claims to be accepted")

    make(waves[0])
    disturb()
    for wave in waves[1:]:
        make(wave)

    def missing():
        try:
            found = items("sandboxclaims", SPACE)
        except AssertionError:
            return names
        return set(names) - {one["metadata"]["name"] for one in found if cluster.is_ready(one)}

    until(lambda: not missing(), f"every claim to be met; missing: {missing()}")
    print(f"        {CLAIMS} claims were met within {time.monotonic() - begin:.1f} s", flush=True)
    holders = cluster.assert_exclusive(SPACE)
    assert len([one for one in holders.values() if one in names]) == CLAIMS
    kubectl("delete", "sandboxclaims", "--all", "-n", SPACE, "--timeout=180s")
    pool_is_full("warm", SPACE)
    # Its status may tell of an earlier time.
    until(lambda: sum(map(_belongs_to_the_pool, items("sandboxes", SPACE))) == 8, "the pool of 8 to have 8 members")


def _belongs_to_the_pool(sandbox):
    owners = sandbox["metadata"].get("ownerReferences", [])
    return any(owner["kind"] == "SandboxWarmPool" for owner in owners) and not sandbox["metadata"].get("deletionTimestamp")


def _applies(things):
    try:
        return apply(things)
    except AssertionError:
        return False


def part(name):
    """The process of a part of the control plane."""
    with open(f"{cluster.CONTROL_PLANE}/{name}.pid") as file:
        return int(file.read())


@check
def two_controllers_share_a_pool():
    cluster.install()
    state["node"] = cluster.Node()
    state["replicas"] = Replicas(2)
    cluster.namespace(SPACE)
    apply([template("plain", SPACE), pool("warm", SPACE, "plain", 8)])
    pool_is_full("warm", SPACE)


@check
def a_leader_that_is_killed_is_replaced():
    leader = state["replicas"].leader()
    storm("killed", lambda: leader.send(signal.SIGKILL))


@check
def a_leader_that_is_asked_to_stop_hands_over_at_once():
    leader = state["replicas"].leader()
    storm("stopped", lambda: leader.send(signal.SIGTERM))
    assert leader.child.wait(60) == 0


@check
def the_api_server_is_restarted():
    def restart():
        before = part("kube-apiserver")
        os.kill(before, signal.SIGKILL)
        until(lambda: _reads(lambda: part("kube-apiserver") != before), "the API server to be started again")

    storm("restarted", restart)


@check
def etcd_stands_still_for_five_seconds():
    def pause():
        etcd = part("etcd")
        os.kill(etcd, signal.SIGSTOP)
        try:
            time.sleep(5)
        finally:
            os.kill(etcd, signal.SIGCONT)

    storm("paused", pause)


def _reads(look):
    try:
        return look()
    except OSError:
        return False


class Unreliable(http.server.BaseHTTPRequestHandler):
    """Passes requests on to the API server. One in six is refused with 429, one in six with 500, and watches are cut."""

    protocol_version = "HTTP/1.1"

    def _handle(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        is_watch = "watch=true" in self.path or "watch=1" in self.path
        if state["unreliable"] and not is_watch:
            dice = random.random()
            if dice < 1 / 3:
                return self._refuse(429 if dice < 1 / 6 else 500)
        server = http.client.HTTPSConnection(state["host"], context=state["tls"], timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        server.request(self.command, self.path, body=body or None, headers=headers)
        answer = server.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        until_cut = time.monotonic() + random.uniform(1, 4)
        if is_watch:
            server.sock and server.sock.settimeout(0.5)
        while True:
            try:
                piece = answer.read1(65536)
            except TimeoutError:
                piece = None
            except (OSError, http.client.HTTPException):
                # Once a read has timed out, Python refuses the next.
                if is_watch and state["unreliable"]:
                    return self._cut(server)
                break
            if piece == b"":
                break
            if piece:
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            if is_watch and state["unreliable"] and time.monotonic() > until_cut:
                return self._cut(server)
        self.wfile.write(b"0\r\n\r\n")
        server.close()
        return None

    def _cut(self, server):
        state["cut"] += 1
        self.close_connection = True
        server.close()

    def _refuse(self, code):
        state["refused"] += 1
        reason = "TooManyRequests" if code == 429 else "InternalError"
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": "injected"}
        text = json.dumps(status).encode()
        self.send_response(code)
        if code == 429:
            self.send_header("Retry-After", "1")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle

    def handle(self):
        try:
            super().handle()
        except OSError:
            pass

    def log_message(self, *_):
        pass


@check
def requests_are_refused_and_watches_cut():
    state["replicas"].stop()
    config = json.loads(kubectl("config", "view", "--raw", "-o", "json"))["clusters"][0]["cluster"]
    state.update(
        host=urllib.parse.urlparse(config["server"]).netloc,
        tls=ssl.create_default_context(cafile=config["certificate-authority"]),
        unreliable=False,
        refused=0,
        cut=0,
    )
    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unreliable)
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{proxy.server_address[1]}"
    state["replicas"] = Replicas(1, cluster.account_kubeconfig(server=address))
    state["replicas"].leader()

    def begin():
        state["unreliable"] = True

    storm("refused", begin)
    state["unreliable"] = False
    print(f"        {state['refused']} requests were refused, {state['cut']} watches cut", flush=True)
    assert state["refused"] > CLAIMS and state["cut"] > 0
    state["replicas"].stop()
    proxy.shutdown()


@check
def the_machine_is_given_back():
    state["replicas"] = Replicas(1)
    state["node"].leave()
    state["replicas"].stop()


run_checks()

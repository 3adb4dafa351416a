"""The same job for upstream's controller and for ours, with real pods, in one run: a pool of 50, 30 claims at once, then 5 a second for a minute.

It asserts only that both do the job; the figures are printed, for docs/benchmarks.md. `VERSUS_SECONDS` shortens the second half, `VERSUS_POOL` the pool.
"""

import http.client
import json
import os
import ssl
import statistics
import subprocess
import tempfile
import threading
import time

import cluster
from checks import check, kubectl, run_checks, until
from cluster import CONTROL_PLANE, REPOSITORY, SYSTEM, apply, claim, get, pool, pool_is_full
from whole import no_pods, runtime_template

RELEASE = "v0.5.0"
POOL, BURST, RATE = int(os.environ.get("VERSUS_POOL", "50")), 30, 5
SECONDS = int(os.environ.get("VERSUS_SECONDS", "60"))
WORKERS = [f"--sandbox{kind}-concurrent-workers=10" for kind in ("", "-claim", "-warm-pool")]
CLAIMS = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/{}/sandboxclaims"
figures = {}


def connection():
    context = ssl.create_default_context(cafile=f"{CONTROL_PLANE}/ca.crt")
    context.load_cert_chain(f"{CONTROL_PLANE}/admin.crt", f"{CONTROL_PLANE}/admin.key")
    return http.client.HTTPSConnection("10.99.0.2", 6443, context=context)


class Ready:
    """When each claim of a namespace was first seen Ready, by a watch."""

    def __init__(self, space):
        self.at = {}
        threading.Thread(target=self._watch, args=(space,), daemon=True).start()

    def _watch(self, space):
        server = connection()
        server.request("GET", CLAIMS.format(space) + "?watch=true")
        for line in server.getresponse():
            thing = json.loads(line)["object"]
            if cluster.is_ready(thing):
                self.at.setdefault(thing["metadata"]["name"], time.monotonic())


def create(server, space, name):
    """Creates a claim, and returns when it was asked for."""
    begin = time.monotonic()
    body = json.dumps(claim(name, space, warmPoolRef={"name": "warm"}))
    server.request("POST", CLAIMS.format(space), body=body, headers={"Content-Type": "application/json"})
    answer = server.getresponse()
    answer.read()
    assert answer.status == 201, answer.status
    return begin


def describe(what, milliseconds):
    ordered = sorted(milliseconds)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return what, {"median": statistics.median(ordered), "p99": p99, "highest": ordered[-1]}


def job(name):
    """Does the whole job with the controller that runs, and keeps its figures."""
    space = cluster.namespace(f"versus-{name}")
    template = runtime_template("plain", space)
    template["spec"]["podTemplate"]["spec"]["containers"][0].pop("readinessProbe")
    begin = time.monotonic()
    apply([template, pool("warm", space, "plain", POOL)])
    pool_is_full("warm", space)
    filled = time.monotonic() - begin
    ready = Ready(space)
    servers = [connection() for _ in range(BURST)]
    for server in servers:
        server.connect()
    asked = {}
    threads = [threading.Thread(target=lambda n=number: asked.update({f"burst-{n}": create(servers[n], space, f"burst-{n}")})) for number in range(BURST)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: len(ready.at) >= BURST, "the burst to be met")
    burst = [(ready.at[one] - asked[one]) * 1000 for one in asked]
    pool_is_full("warm", space)
    asked = {}
    begin = time.monotonic()
    for number in range(RATE * SECONDS):
        time.sleep(max(0.0, begin + number / RATE - time.monotonic()))
        asked[f"rate-{number}"] = create(servers[0], space, f"rate-{number}")
        # Claims live for some seconds, so that the node never holds more pods than the pool and these.
        if number >= 50:
            servers[1].request("DELETE", CLAIMS.format(space) + f"/rate-{number - 50}")
            servers[1].getresponse().read()
    until(lambda: set(asked) <= set(ready.at), "every claim to be met")
    rate = [(ready.at[one] - asked[one]) * 1000 for one in asked]
    cluster.assert_exclusive(space)
    figures[name] = dict([describe(f"{BURST} claims at once", burst), describe(f"{RATE} claims a second for {SECONDS} s", rate)])
    figures[name]["filled"] = filled
    kubectl("delete", "sandboxwarmpool", "warm", "-n", space)
    kubectl("delete", "sandboxclaims", "--all", "-n", space, "--wait=false")
    no_pods(space)
    kubectl("delete", "namespace", space, "--timeout=200s")


@check
def upstream_does_the_job():
    os.environ["UPSTREAM_RELEASE"] = RELEASE
    for file in ("controller", "rbac.generated", "extensions", "extensions-rbac.generated", "extensions.controller"):
        with open(cluster.upstream(f"manifests/{file}.yaml"), encoding="utf-8") as manifest:
            apply(manifest.read().replace("replicas: 1", "replicas: 0"))
    folder = cluster.upstream("crds")
    for file in sorted(os.listdir(folder)):
        kubectl("apply", "--server-side", "--force-conflicts", "-f", os.path.join(folder, file))
    kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=180s")
    certificates = tempfile.mkdtemp(dir=CONTROL_PLANE)
    controller = cluster.Upstream(f"--webhook-cert-dir={certificates}", f"--webhook-port={cluster.free_port()}", *WORKERS)
    until(lambda: get("lease", "a3317529.agent-sandbox.x-k8s.io", SYSTEM), "upstream to lead")
    try:
        job("upstream")
    finally:
        controller.end()
        kubectl("delete", "lease", "a3317529.agent-sandbox.x-k8s.io", "-n", SYSTEM, "--ignore-not-found")


@check
def ours_does_the_same_job():
    subprocess.run([f"{REPOSITORY}/deploy/without-webhook.sh"], check=True)
    for file in sorted(os.listdir(f"{REPOSITORY}/deploy/crds")):
        kubectl("apply", "--server-side", "--force-conflicts", "-f", f"{REPOSITORY}/deploy/crds/{file}")
    controller = cluster.Controller(*WORKERS)
    until(lambda: "became leader" in controller.said(), "ours to lead")
    try:
        job("ours")
    finally:
        controller.end()


@check
def the_figures_are_printed():
    for name, found in figures.items():
        print(f"        {name}: the pool of {POOL} was full after {found.pop('filled'):.1f} s")
    for what in figures["ours"]:
        for name, found in figures.items():
            shown = ", ".join(f"{key} {value:.0f} ms" for key, value in found[what].items())
            print(f"        {what}: {name} {shown}")
        ratio = figures["upstream"][what]["median"] / figures["ours"][what]["median"]
        print(f"        {what}: upstream's median is {ratio:.1f} times ours", flush=True)


run_checks()

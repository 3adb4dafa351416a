"""A pool scaled by a HorizontalPodAutoscaler of the cluster, on the rate of claims that the controller counts.

The source of the metric is a server of `external.metrics.k8s.io` in this script, behind kube-apiserver's aggregator, as a metrics adapter would be.
"""

import http.server
import json
import re
import ssl
import threading
import time
import urllib.request

import cluster
from checks import check, kubectl, run_checks, until
from cluster import CONTROL_PLANE, REPOSITORY, apply, claim, get, pool
from whole import runtime_template

SPACE = "autoscaling"
# Claims made at once: enough for more than two a second, which the minimum of the pool is for.
BATCH = 16
METRIC = "agent_sandbox_claim_creations_per_second"
GROUP = "/apis/external.metrics.k8s.io/v1beta1"
state = {"rate": 0.0}


def created():
    """How many claims the leader has counted in the namespace."""
    text = urllib.request.urlopen(state["controller"].metrics_url, timeout=10).read().decode()
    found = re.findall(rf'^agent_sandbox_claim_creation_total{{[^}}]*namespace="{SPACE}"[^}}]*}} (\d+)', text, re.MULTILINE)
    return sum(map(int, found))


def measure():
    """The rate over the last few seconds, as Prometheus' `rate` would give it."""
    history = []
    while True:
        try:
            history.append((time.monotonic(), created()))
        except (OSError, AssertionError, StopIteration):
            pass
        history[:] = [one for one in history if one[0] > time.monotonic() - 20]
        if len(history) > 1:
            (begin, first), (end, last) = history[0], history[-1]
            state["rate"] = max(0.0, (last - first) / (end - begin))
        time.sleep(1)


class Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if METRIC in self.path:
            item = {"metricName": METRIC, "metricLabels": {}, "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "value": f"{int(state['rate'] * 1000)}m"}
            answer = {"kind": "ExternalMetricValueList", "apiVersion": "external.metrics.k8s.io/v1beta1", "metadata": {}, "items": [item]}
        else:
            resource = {"name": METRIC, "namespaced": True, "kind": "ExternalMetricValueList", "singularName": "", "verbs": ["get"]}
            answer = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "external.metrics.k8s.io/v1beta1", "resources": [resource]}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def serve():
    server = http.server.ThreadingHTTPServer(("10.99.0.2", 6444), Metrics)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{CONTROL_PLANE}/kubelet.crt", f"{CONTROL_PLANE}/kubelet.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    apply(
        [
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "metrics-adapter", "namespace": SPACE}, "spec": {"ports": [{"name": "https", "port": 443, "targetPort": 6444}]}},
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {"name": "metrics-adapter", "namespace": SPACE, "labels": {"kubernetes.io/service-name": "metrics-adapter"}},
                "addressType": "IPv4",
                "ports": [{"name": "https", "port": 6444, "protocol": "TCP"}],
                "endpoints": [{"addresses": ["10.99.0.2"], "conditions": {"ready": True}}],
            },
            {
                "apiVersion": "apiregistration.k8s.io/v1",
                "kind": "APIService",
                "metadata": {"name": "v1beta1.external.metrics.k8s.io"},
                "spec": {
                    "group": "external.metrics.k8s.io", "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100,
                    "insecureSkipTLSVerify": True, "service": {"name": "metrics-adapter", "namespace": SPACE},
                },
            },
        ]
    )
    kubectl("wait", "--for=condition=Available", "apiservice/v1beta1.external.metrics.k8s.io", "--timeout=120s")


@check
def the_autoscaler_reads_the_rate_of_claims():
    cluster.namespace(SPACE)
    state["controller"] = cluster.start_controller()
    serve()
    threading.Thread(target=measure, daemon=True).start()
    apply([runtime_template("warm", SPACE), pool("python-warmpool", SPACE, "warm", 1)])
    kubectl("apply", "-n", SPACE, "-f", f"{REPOSITORY}/examples/autoscaling/autoscaler.yaml")
    until(lambda: get("sandboxwarmpool", "python-warmpool", SPACE)["spec"]["replicas"] == 2, "the pool to have its minimum")
    active = lambda: cluster.condition(get("hpa", "python-warmpool", SPACE), "ScalingActive").get("status") == "True"  # noqa: E731
    until(active, "the autoscaler to have a metric")


@check
def claims_make_the_pool_grow():
    made = 0

    def grown():
        nonlocal made
        apply([claim(f"load-{made + one}", SPACE, warmPoolRef={"name": "python-warmpool"}) for one in range(BATCH)])
        if made:
            kubectl("delete", "sandboxclaim", *(f"load-{made - BATCH + one}" for one in range(BATCH)), "-n", SPACE, "--wait=false")
        made += BATCH
        return get("sandboxwarmpool", "python-warmpool", SPACE)["spec"]["replicas"] > 2

    until(grown, "the autoscaler to scale the pool up")
    replicas = get("sandboxwarmpool", "python-warmpool", SPACE)["spec"]["replicas"]
    print(f"        {replicas} replicas at {state['rate']:.1f} claims a second", flush=True)


@check
def nothing_is_left():
    kubectl("delete", "apiservice", "v1beta1.external.metrics.k8s.io")
    kubectl("delete", "namespace", SPACE, "--timeout=200s")


run_checks()

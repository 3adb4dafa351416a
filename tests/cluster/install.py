"""The chart and the router as they are installed on a cluster: from images, run by a kubelet, with their own accounts."""

import whole
from checks import check, kubectl, run_checks, until
from cluster import SYSTEM, get, items
from whole import CHART, RELEASE, helm, install_router, pod_ready, rolled_out, values


@check
def a_pod_runs_and_resolves_names():
    kubectl("create", "namespace", "first")
    until(lambda: get("serviceaccount", "default", "first"), "the service account")
    kubectl("apply", "-f", "-", text=whole.json.dumps(whole.pod("first", "first")))
    pod_ready("first", "first")
    assert kubectl("exec", "first", "-n", "first", "--", "echo", "hello") == "hello\n"
    found = kubectl("exec", "first", "-n", "first", "--", "nslookup", "kubernetes.default.svc.cluster.local")
    assert "10.96.0.1" in found, found
    kubectl("delete", "namespace", "first", "--timeout=180s")


@check
def the_chart_brings_two_controllers_of_which_one_leads():
    helm("install", RELEASE, CHART, "--create-namespace", *values("--set=replicaCount=2"))
    rolled_out("agent-sandbox-controller")
    lease = until(lambda: get("lease", "a3317529.agent-sandbox.x-k8s.io", SYSTEM), "a leader")
    pods = {pod["metadata"]["name"]: pod for pod in items("pods", SYSTEM)}
    assert len(pods) == 2, list(pods)
    holder = lease["spec"]["holderIdentity"]
    assert any(holder.startswith(name) for name in pods), (holder, list(pods))
    for pod in pods.values():
        assert pod["status"]["containerStatuses"][0]["restartCount"] == 0, pod["status"]


@check
def the_router_runs_with_several_replicas():
    install_router(replicas=3)
    pods = items("pods", SYSTEM, "-l", "app=sandbox-router")
    assert len(pods) == 3 and all(pod["status"]["podIP"] for pod in pods)


run_checks()

"""The stories of docs/kruise.md on a real control plane, as the clients' checks tell them on the embedded one."""

import runpy

import checks
import cluster
from checks import kubectl

cluster.install()
for file in ("deploy/kruise/crds.yaml", "deploy/kruise/rbac.yaml", "deploy/router/router.yaml"):
    kubectl("apply", "--server-side", "-f", f"{cluster.REPOSITORY}/{file}")
kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
kubectl("delete", "deployment", "sandbox-router-deployment", "-n", cluster.SYSTEM)
node = cluster.Node()
try:
    cluster.Controller("--kruise")
    port = cluster.free_port()
    checks.ROUTER_URL = f"http://127.0.0.1:{port}"
    cluster.Process(
        "router",
        "router",
        f"--http-bind-address=127.0.0.1:{port}",
        f"--health-probe-bind-address=127.0.0.1:{cluster.free_port()}",
        f"--metrics-bind-address=127.0.0.1:{cluster.free_port()}",
        environment={"KUBECONFIG": cluster.account_kubeconfig("sandbox-router")},
    )
    runpy.run_path(f"{cluster.REPOSITORY}/tests/clients/kruise.py", run_name="__main__")
finally:
    kubectl("delete", "sandboxclaims.agents.kruise.io,sandboxsets", "--all", "--all-namespaces", "--timeout=60s")
    node.leave()

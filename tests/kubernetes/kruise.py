"""The stories of docs/kruise.md on a real control plane, as the clients' checks tell them on the embedded one."""

import runpy

import checks
import cluster
from checks import kubectl

cluster.install()
for file in ("deploy/kruise/crds.yaml", "deploy/kruise/rbac.yaml"):
    kubectl("apply", "--server-side", "-f", f"{cluster.REPOSITORY}/{file}")
kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=180s")
node = cluster.Node()
try:
    cluster.Controller("--kruise")
    checks.ROUTER_URL = cluster.start_router()
    runpy.run_path(f"{cluster.REPOSITORY}/tests/clients/kruise.py", run_name="__main__")
finally:
    kubectl("delete", "sandboxclaims.agents.kruise.io,sandboxsets", "--all", "--all-namespaces", "--timeout=180s")
    node.leave()

"""Runs a script of `tests/clients`, or the tests of a Go module, on the cluster: with the pool, the template and the router that they expect.

`agent-sandbox up` has a pool of the runtime and a router in every namespace. On a cluster its operator makes them.
"""

import os
import runpy
import subprocess
import sys

SUITE = sys.argv[1]

# checks.py reads it when it is imported, and the address is known only once there is a router.
os.environ["ROUTER_URL"] = "unknown"

import checks  # noqa: E402
import cluster  # noqa: E402
import whole  # noqa: E402
from checks import kubectl  # noqa: E402

# Checks for which there must be a router in a namespace that the check itself makes.
OF_UP_ALONE = {"through_the_tunnel_in_another_namespace"}

_check = checks.check
checks.check = lambda function: function if function.__name__ in OF_UP_ALONE else _check(function)

whole.install_router("default", replicas=1)
address = cluster.get("service", "sandbox-router-svc", "default")["spec"]["clusterIP"]
checks.ROUTER_URL = os.environ["ROUTER_URL"] = f"http://{address}:8080"

cluster.apply(
    [
        whole.runtime_template("python-runtime-template", "default", envVarsInjectionPolicy="Allowed"),
        cluster.pool("python-warmpool", "default", "python-runtime-template", 2),
    ]
)
cluster.pool_is_full("python-warmpool", "default")
try:
    if SUITE.startswith("/"):
        sys.exit(subprocess.run([SUITE, "-test.v", "-test.timeout=900s", "-test.skip=Typed"]).returncode)
    runpy.run_path(f"{cluster.REPOSITORY}/tests/clients/{SUITE}.py", run_name="__main__")
finally:
    for kind in ("sandboxclaims", "sandboxwarmpools", "sandboxtemplates"):
        kubectl("delete", kind, "--all", "-n", "default", "--timeout=180s")
    whole.no_sandboxes("default")

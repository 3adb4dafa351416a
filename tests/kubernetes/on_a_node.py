"""The kubectl checks of exec, cp, logs, attach and port-forward, through a real kube-apiserver to our node."""

import runpy

import checks
import cluster

# `up` publishes the router as a service of every namespace; on a cluster its own manifest does.
OF_UP_ALONE = {"the_routers_service_is_forwarded", "the_routers_pod_comes_back_when_it_is_deleted"}

_check = checks.check
checks.check = lambda function: function if function.__name__ in OF_UP_ALONE else _check(function)

cluster.install()
node = cluster.Node()
try:
    runpy.run_path(f"{cluster.REPOSITORY}/tests/clients/kubectl_streams.py", run_name="__main__")
finally:
    node.leave()

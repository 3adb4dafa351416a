"""What the scripts for a whole cluster share: pods of the runtime image, the installed chart, parts of the cluster as processes."""

import json
import os
import subprocess
import time

import cluster
from checks import kubectl, until
from cluster import CONTROL_PLANE, REPOSITORY, SYSTEM, get, is_ready, items

RUNTIME = os.environ["IMAGE_PYTHON_RUNTIME"]
BUSYBOX = "agent-sandbox.test/busybox:test"
CHART = f"{REPOSITORY}/deploy/helm"
RELEASE = "agent-sandbox"
DIRECTORIES = {name: f"{CONTROL_PLANE}/helm" for name in ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")}


def helm(*arguments):
    result = subprocess.run(["helm", *arguments], capture_output=True, text=True, env={**os.environ, **DIRECTORIES})
    assert result.returncode == 0, f"helm {' '.join(arguments)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def image_values():
    repository, _, tag = os.environ["IMAGE_AGENT_SANDBOX_CONTROLLER"].rpartition(":")
    return [f"--set=image.repository={repository},image.tag={tag},image.pullPolicy=Never"]


def values(*more):
    return [*image_values(), "--set=controller.extensions=true", f"--namespace={SYSTEM}", *more]


def rolled_out(deployment, namespace=SYSTEM):
    kubectl("rollout", "status", f"deployment/{deployment}", "-n", namespace, "--timeout=200s")


def install_router(namespace=SYSTEM, replicas=2):
    """The router of the manifests, with the image of this run, in a namespace of choice."""
    with open(f"{REPOSITORY}/deploy/router/router.yaml") as file:
        text = file.read().replace("agent-sandbox-router:latest", os.environ["IMAGE_AGENT_SANDBOX_ROUTER"])
    if namespace != SYSTEM:
        text = text.replace(f"namespace: {SYSTEM}", f"namespace: {namespace}").replace("name: agent-sandbox-router", "name: agent-sandbox-router-" + namespace)
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=text)
    kubectl("scale", "deployment/sandbox-router-deployment", f"--replicas={replicas}", "-n", namespace)
    rolled_out("sandbox-router-deployment", namespace)


def runtime_template(name, namespace, pod=None, container=None, **spec):
    """A template of the runtime image, whose pods are Ready when the runtime answers."""
    main = {
        "name": "python-runtime",
        "image": RUNTIME,
        "imagePullPolicy": "Never",
        "ports": [{"containerPort": 8888}],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8888}, "periodSeconds": 1},
        **(container or {}),
    }
    pod_spec = {"containers": [main], "terminationGracePeriodSeconds": 1, **(pod or {})}
    return cluster.thing("SandboxTemplate", name, namespace, {"podTemplate": {"spec": pod_spec}, **spec})


def part(name):
    """The process of a part of the cluster."""
    with open(f"{CONTROL_PLANE}/{name}.pid") as file:
        return int(file.read())


def restart(name, number):
    """Sends a signal that ends a part, and waits until it was started again."""
    before = part(name)
    os.kill(before, number)

    def again():
        try:
            return part(name) != before
        except (OSError, ValueError):
            return False

    until(again, f"{name} to be started again")


def processes(pod_uid, program):
    """The processes of a pod, by its cgroup, whose program's name begins like this."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/cgroup") as cgroups, open(f"/proc/{entry}/comm") as name:
                if pod_uid in cgroups.read() and name.read().startswith(program):
                    found.append(int(entry))
        except OSError:
            continue  # It has ended.
    assert found, f"no process of pod {pod_uid}"
    return found


def node_is(status, name=cluster.NODE):
    return cluster.condition(get("node", name, "default"), "Ready").get("status") == status


def pod(name, namespace, image=BUSYBOX, command="exec sleep 1000000", **spec):
    main = {"name": "main", "image": image, "imagePullPolicy": "Never", "command": ["sh", "-c", command]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {"containers": [main], "terminationGracePeriodSeconds": 0, **spec},
    }


def pod_ready(name, namespace):
    return until(lambda: (found := get("pod", name, namespace)) and is_ready(found) and found, f"pod {name} to be Ready")


def seconds_of(action):
    begin = time.monotonic()
    action()
    return time.monotonic() - begin


def no_pods(namespace):
    until(lambda: not items("pods", namespace), f"no pods in {namespace}")


def no_sandboxes(namespace):
    until(lambda: not items("sandboxes", namespace), f"no sandboxes in {namespace}")

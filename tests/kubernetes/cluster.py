"""What the scripts here share: the programs under test as processes, and objects on a real control plane.

Where there is no such control plane, a running `agent-sandbox up` stands for the cluster and for every program, so that the same script tells
whether it keeps the same promises. On a whole cluster (`cargo xtask test-cluster`) the kubelet is the node, and the controller and the router are
the pods that the chart and the manifests installed.
"""

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import checks
from checks import kubectl, until

AGENT_SANDBOX = os.environ["AGENT_SANDBOX"]
CONTROL_PLANE = os.environ.get("CONTROL_PLANE")
REPOSITORY = os.environ["REPOSITORY"]
SYSTEM = "agent-sandbox-system"
ON_UP = CONTROL_PLANE is None
UNDER_KUBELET = os.environ.get("CLUSTER") == "kubelet"
NODE = "agent-sandbox" if ON_UP else "node-one"
ACCOUNT = "agent-sandbox-controller"

_running = []
_namespaces = []


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Process:
    """A program under test. It is stopped at the end, whatever happens before, and its log is shown if that was a failure."""

    def __init__(self, name, *arguments, environment=None, program=AGENT_SANDBOX):
        self.name = name
        self.log = os.path.join(CONTROL_PLANE, f"{name}-{len(_running)}.log")
        self.command = [program, *arguments]
        self.environment = {**os.environ, "NO_COLOR": "1", **(environment or {})}
        self.changing, self.ending = threading.Lock(), False
        self._launch()
        _running.append(self)

    def _launch(self):
        with open(self.log, "ab") as log:
            self.child = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment)

    def send(self, number):
        if self.child.poll() is None:
            self.child.send_signal(number)

    def end(self, number=signal.SIGTERM, seconds=90):
        """Sends a signal, and waits for the end it brings."""
        with self.changing:
            self.ending = True
        self.send(number)
        try:
            return self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            self.child.kill()
            raise AssertionError(f"{self.name} did not end within {seconds} s of signal {number}")

    def log_text(self):
        with open(self.log, encoding="utf-8", errors="replace") as log:
            return log.read()


def _end_all():
    """Ends what still runs, and gives back what nodes have left of it: a script that failed has deleted nothing."""
    # A check that fails is caught, so that those after it are run; what is caught nowhere leaves its type behind.
    failed = checks.failed or getattr(sys, "last_type", None) is not None
    for process in reversed(_running):
        with process.changing:
            process.ending = True
        if process.child.poll() is None:
            process.send(signal.SIGCONT)
            process.send(signal.SIGTERM)
            try:
                process.child.wait(20)
            except subprocess.TimeoutExpired:
                process.child.kill()
                process.child.wait()
        if isinstance(process, Node):
            process.give_back()
        if failed or os.environ.get("SHOW_LOGS"):
            print(f"--- log of {process.name}\n{process.log_text()[-4000:]}", file=sys.stderr)


atexit.register(_end_all)
# The programs of a script end with the script.
signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))


def apply(document):
    """Applies an object, a list of objects, or text."""
    if isinstance(document, list):
        document = {"apiVersion": "v1", "kind": "List", "items": document}
    text = document if isinstance(document, str) else json.dumps(document)
    return kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=text)


def get(kind, name, namespace):
    """An object, or nothing."""
    found = kubectl("get", kind, name, "-n", namespace, "-o", "json", "--ignore-not-found")
    return json.loads(found) if found else None


def items(kind, namespace, *arguments):
    """The objects of a kind, without pods that stand for something else: `up` has one for its router in every namespace."""
    found = json.loads(kubectl("get", kind, "-n", namespace, "-o", "json", *arguments))["items"]
    return [one for one in found if "kubernetes.io/config.mirror" not in one["metadata"].get("annotations", {})]


def condition(thing, name):
    conditions = ((thing or {}).get("status") or {}).get("conditions") or []
    return next((one for one in conditions if one["type"] == name), {})


def is_ready(thing):
    return condition(thing, "Ready").get("status") == "True"


def ready(kind, name, namespace):
    def look():
        thing = get(kind, name, namespace)
        return thing if is_ready(thing) else None

    return until(look, f"{kind} {name} to be Ready")


def gone(kind, name, namespace):
    until(lambda: get(kind, name, namespace) is None, f"{kind} {name} to be gone")


def install():
    """Our definitions, with the identity and the roles of an installation of the other implementation, which is all we may need."""
    if ON_UP or UNDER_KUBELET:
        return
    for file in sorted(os.listdir(f"{REPOSITORY}/deploy/crds")):
        kubectl("apply", "--server-side", "-f", f"{REPOSITORY}/deploy/crds/{file}")
    kubectl("apply", "-f", f"{REPOSITORY}/tests/kubernetes/upstream-0.4.6.yaml")
    kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=180s")


def account_kubeconfig(account=ACCOUNT, namespace=SYSTEM, server=None):
    """A kubeconfig that is a service account and nothing more."""
    token = kubectl("create", "token", account, "-n", namespace, "--duration=4h").strip()
    config = json.loads(kubectl("config", "view", "--raw", "-o", "json"))
    config["users"][0]["user"] = {"token": token}
    if server:
        config["clusters"][0]["cluster"] = {"server": server}
    file = tempfile.NamedTemporaryFile("w", dir=CONTROL_PLANE, suffix=".kubeconfig", delete=False)
    with file:
        json.dump(config, file)
    return file.name


def deployed_arguments():
    """The arguments of the controller, as the Deployment in the cluster has them."""
    containers = get("deployment", ACCOUNT, SYSTEM)["spec"]["template"]["spec"]["containers"]
    return containers[0]["args"]


class OfUp:
    """A program that `up` is, too, and that lives as long as it does."""

    def __init__(self):
        url = os.environ["METRICS_URL"]
        self.metrics = url.rsplit(":", 1)[1]
        self.metrics_url = f"{url}/metrics"

    def log_text(self):
        return ""

    def end(self, *_):
        pass

    def leave(self):
        """Deletes what the script has made."""
        for name in _namespaces:
            kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=180s")


class Deployed:
    """The controller as a Deployment on a whole cluster."""

    def __init__(self, *arguments):
        self.begin = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if arguments:
            change = {"args": [*deployed_arguments(), *arguments]}
            patch = {"spec": {"template": {"spec": {"containers": [{"name": ACCOUNT, **change}]}}}}
            kubectl("patch", "deployment", ACCOUNT, "-n", SYSTEM, "-p", json.dumps(patch))
        kubectl("rollout", "status", f"deployment/{ACCOUNT}", "-n", SYSTEM, "--timeout=180s")
        self.arguments = arguments

    @property
    def metrics_url(self):
        """The metrics of the pod that leads: only it has counted claims."""
        holder = get("lease", "a3317529.agent-sandbox.x-k8s.io", SYSTEM)["spec"]["holderIdentity"]
        pods = items("pods", SYSTEM, "-l", "app.kubernetes.io/name=agent-sandbox")
        leader = next(pod for pod in pods if holder.startswith(pod["metadata"]["name"]))
        return f"http://{leader['status']['podIP']}:8080/metrics"

    def said(self):
        return kubectl("logs", "-l", "app.kubernetes.io/name=agent-sandbox", "-n", SYSTEM, "--tail=-1", f"--since-time={self.begin}", "--prefix")

    def end(self, *_):
        if self.arguments:
            kubectl("rollout", "undo", f"deployment/{ACCOUNT}", "-n", SYSTEM)
            kubectl("rollout", "status", f"deployment/{ACCOUNT}", "-n", SYSTEM, "--timeout=180s")


class Kubelet:
    """The kubelet as the node, which lives as long as the cluster does."""

    def leave(self):
        """Deletes what the script has made."""
        for name in _namespaces:
            kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=180s")


def start_controller(*arguments):
    if UNDER_KUBELET:
        return Deployed(*arguments)
    return OfUp() if ON_UP else Controller(*arguments)


def start_node():
    if UNDER_KUBELET:
        return Kubelet()
    return OfUp() if ON_UP else Node()


def start_router():
    """Where a router is, which is started for it."""
    if ON_UP:
        return checks.ROUTER_URL
    if UNDER_KUBELET:
        address = get("service", "sandbox-router-svc", SYSTEM)["spec"]["clusterIP"]
        return f"http://{address}:8080"
    kubectl("apply", "--server-side", "-f", f"{REPOSITORY}/deploy/router/router.yaml")
    kubectl("delete", "deployment", "sandbox-router-deployment", "-n", SYSTEM)
    port = free_port()
    Process(
        "router",
        "router",
        f"--http-bind-address=127.0.0.1:{port}",
        f"--health-probe-bind-address=127.0.0.1:{free_port()}",
        f"--metrics-bind-address=127.0.0.1:{free_port()}",
        environment={"KUBECONFIG": account_kubeconfig("sandbox-router")},
    )
    return f"http://127.0.0.1:{port}"


class Controller(Process):
    """The controller manager, as its service account, with the arguments of its Deployment and its ports moved."""

    def __init__(self, *arguments, kubeconfig=None, comes_back=True):
        self.metrics, self.probes = free_port(), free_port()
        self.metrics_url = f"http://127.0.0.1:{self.metrics}/metrics"
        super().__init__(
            "controller",
            "controller",
            *deployed_arguments(),
            f"--leader-election-namespace={SYSTEM}",
            f"--kubeconfig={kubeconfig or account_kubeconfig()}",
            f"--metrics-bind-address=127.0.0.1:{self.metrics}",
            f"--health-probe-bind-address=127.0.0.1:{self.probes}",
            *arguments,
        )
        if comes_back:
            threading.Thread(target=self._keep, daemon=True).start()

    def _keep(self):
        """Starts it again when it has lost its lease, as a Deployment would: a machine that stood still for some seconds costs it that."""
        while True:
            self.child.wait()
            with self.changing:
                if self.ending or not self.log_text().rstrip().endswith("lost the lease"):
                    return
                self._launch()


def upstream(file):
    """A file of the other implementation's release that is asked for."""
    release = os.environ["UPSTREAM_RELEASE"]
    path = os.path.join(os.environ["UPSTREAM"], release, file)
    assert os.path.exists(path), f"{release} of the other implementation is not there: `cargo xtask kube-assets` says why"
    return path


class Upstream(Process):
    """The other implementation's controller, in the place of ours."""

    def __init__(self, *arguments):
        super().__init__(
            "upstream",
            *deployed_arguments(),
            f"--leader-election-namespace={SYSTEM}",
            f"--metrics-bind-address=127.0.0.1:{free_port()}",
            f"--health-probe-bind-address=127.0.0.1:{free_port()}",
            *arguments,
            environment={"KUBECONFIG": account_kubeconfig()},
            program=upstream("agent-sandbox-controller"),
        )


class Node(Process):
    """The node, as the user of its name, which runs what the scheduler binds to it."""

    def __init__(self):
        self.data = tempfile.mkdtemp(prefix="agent-sandbox-node-")
        kubectl("apply", "-f", f"{REPOSITORY}/deploy/node/rbac.yaml")
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"agent-sandbox-{NODE}"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "agent-sandbox-node"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": f"system:node:{NODE}"}],
        }
        apply(binding)
        file = lambda name: os.path.join(CONTROL_PLANE, name)  # noqa: E731
        super().__init__(
            "node",
            "node",
            f"--kubeconfig={file('node.kubeconfig')}",
            f"--node-name={NODE}",
            f"--data-dir={self.data}",
            "--listen=127.0.0.1:0",
            f"--client-ca-file={file('ca.crt')}",
            f"--tls-cert-file={file('kubelet.crt')}",
            f"--tls-private-key-file={file('kubelet.key')}",
        )
        kubectl_ready = lambda: is_ready(get("node", NODE, "default"))  # noqa: E731
        until(kubectl_ready, "the node to be Ready")
        until(lambda: not get("node", NODE, "default")["spec"].get("taints"), "the node to take pods")

    def leave(self):
        """Deletes every pod, so that the node gives back what it holds of the machine."""
        try:
            for kind in ("sandboxclaims", "sandboxwarmpools", "sandboxes", "pods"):
                kubectl("delete", kind, "--all", "--all-namespaces", "--ignore-not-found", "--timeout=180s")
        finally:
            self.end()
            self.give_back()

    def give_back(self):
        """Frees what is left of the node, which has stopped."""
        subprocess.run([AGENT_SANDBOX, "reset", "--data-dir", self.data], stdout=subprocess.DEVNULL, check=False)
        shutil.rmtree(self.data, ignore_errors=True)


def namespace(name):
    kubectl("create", "namespace", name)
    _namespaces.append(name)
    until(lambda: get("serviceaccount", "default", name), f"the service account of {name}")
    return name


# A kubelet runs images; the node of this project also runs the machine itself as one.
IMAGE = os.environ["IMAGE_PYTHON_RUNTIME"] if UNDER_KUBELET else "host"


def pod_template(command="exec sleep infinity", **container):
    main = {"name": "main", "image": IMAGE, "command": ["sh", "-c", command], **container}
    return {"spec": {"containers": [main], "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False}}


def thing(kind, name, namespace, spec):
    group = "agents.x-k8s.io" if kind == "Sandbox" else "extensions.agents.x-k8s.io"
    return {
        "apiVersion": f"{group}/v1beta1",
        "kind": kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }


def template(name, namespace, **changes):
    return thing("SandboxTemplate", name, namespace, {"podTemplate": pod_template(), **changes})


def pool(name, namespace, template, replicas, **changes):
    spec = {"replicas": replicas, "sandboxTemplateRef": {"name": template}, **changes}
    return thing("SandboxWarmPool", name, namespace, spec)


def claim(name, namespace, **spec):
    return thing("SandboxClaim", name, namespace, spec)


def pool_is_full(name, namespace):
    def look():
        found = get("sandboxwarmpool", name, namespace)
        status = found.get("status") or {}
        return found if status.get("readyReplicas", 0) == found["spec"]["replicas"] else None

    return until(look, f"pool {name} to be full")


def assert_exclusive(namespace):
    """No sandbox belongs to two claims, and no claim to two sandboxes."""
    holders = {}
    for found in items("sandboxclaims", namespace):
        sandbox = ((found.get("status") or {}).get("sandbox") or {}).get("name")
        if sandbox:
            assert sandbox not in holders, f"{sandbox} is held by {holders[sandbox]} and {found['metadata']['name']}"
            holders[sandbox] = found["metadata"]["name"]
    owned = {}
    for found in items("sandboxes", namespace):
        for owner in found["metadata"].get("ownerReferences", []):
            if owner["kind"] == "SandboxClaim" and owner.get("controller"):
                assert owner["name"] not in owned, f"claim {owner['name']} owns {owned[owner['name']]} and another"
                owned[owner["name"]] = found["metadata"]["name"]
    return holders

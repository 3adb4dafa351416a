"""The examples for clusters, as a reader applies them, on a real control plane."""

import json
import os
import subprocess
import tempfile
import urllib.error
import urllib.request

import cluster
from checks import check, kubectl, run_checks, until
from cluster import get, pool, ready, template

EXAMPLES = f"{cluster.REPOSITORY}/examples"
SECURE = "secure"
SPACE = "work"
state = {}


@check
def the_system_starts():
    cluster.install()
    state["node"] = cluster.start_node()
    state["controller"] = cluster.start_controller()
    for name in (SECURE, SPACE):
        cluster.namespace(name)


@check
def the_controllers_probes_answer_and_profiles_take_a_flag():
    def answer(port, path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
                return response.status
        except urllib.error.HTTPError as refused:
            return refused.code

    controller = state["controller"]
    until(lambda: answer(controller.probes, "/readyz") == 200, "the controller to be ready")
    assert answer(controller.probes, "/healthz") == 200
    assert answer(controller.metrics, "/metrics") == 200
    for path in ("/debug/pprof/profile", "/debug/pprof/", "/debug/fgprof"):
        assert answer(controller.metrics, path) == 404, path


@check
def a_careless_sandbox_from_before_is_there():
    kubectl("apply", "-n", SECURE, "-f", f"{EXAMPLES}/disruption-budget/budget.yaml")


@check
def careless_sandboxes_are_refused_with_what_to_change():
    kubectl("apply", "-f", f"{EXAMPLES}/admission-policy/secure-sandboxes.yaml")
    kubectl("label", "namespace", SECURE, "sandboxes=secure")
    careless = f"{EXAMPLES}/hello-world/sandbox.yaml"

    def refusal():
        # A policy is in force after a short delay. Until then the dry run admits the sandbox.
        try:
            return kubectl("apply", "--dry-run=server", "-n", SECURE, "-f", careless, succeeds=False)
        except AssertionError:
            return None

    output = until(refusal, "the policy to be in force")
    assert "automountServiceAccountToken must be false" in output, output
    confined = f"{EXAMPLES}/admission-policy/sandbox.yaml"
    text = kubectl("create", "--dry-run=client", "-n", SECURE, "-o", "json", "-f", confined)
    limitless = {"name": "before", "image": "host", "securityContext": {"allowPrivilegeEscalation": False}}
    for change, complaint in (
        (lambda pod: pod.update(hostPID=True), "must not have hostNetwork, hostPID or hostIPC"),
        (lambda pod: pod["containers"][0]["securityContext"].update(privileged=True), "securityContext.privileged"),
        (lambda pod: pod["containers"][0]["securityContext"].update(capabilities={"add": ["SYS_ADMIN"]}), "capabilities.add"),
        (lambda pod: pod["containers"][0].pop("securityContext"), "allowPrivilegeEscalation: false"),
        (lambda pod: pod["containers"][0].pop("resources"), "resources.limits.memory"),
        (lambda pod: pod.update(initContainers=[limitless]), "resources.limits.memory"),
        (lambda pod: pod.update(volumes=[{"name": "v", "hostPath": {"path": "/"}}]), "hostPath"),
    ):
        sandbox = json.loads(text)
        change(sandbox["spec"]["podTemplate"]["spec"])
        output = kubectl("apply", "-n", SECURE, "-f", "-", text=json.dumps(sandbox), succeeds=False)
        assert complaint in output, output
    output = kubectl("apply", "-f", "-", text=json.dumps(template("careless", SECURE)), succeeds=False)
    assert "allowPrivilegeEscalation" in output, output


@check
def what_was_there_before_can_be_suspended():
    kubectl("scale", "sandbox", "at-work", "-n", SECURE, "--replicas=0")
    kubectl("label", "sandbox", "at-work", "-n", SECURE, "seen=yes")


@check
def confined_ones_and_other_namespaces_are_admitted():
    kubectl("apply", "-n", SECURE, "-f", f"{EXAMPLES}/admission-policy/sandbox.yaml")
    kubectl("apply", "-n", SPACE, "-f", f"{EXAMPLES}/hello-world/sandbox.yaml")
    ready("sandbox", "confined", SECURE)
    ready("sandbox", "hello-world", SPACE)


@check
def the_autoscaler_finds_the_pool_it_scales():
    cluster.apply([template("warm", SPACE), pool("python-warmpool", SPACE, "warm", 1)])
    kubectl("apply", "-n", SPACE, "-f", f"{EXAMPLES}/autoscaling/autoscaler.yaml")

    def able():
        found = get("hpa", "python-warmpool", SPACE)
        return cluster.condition(found, "AbleToScale").get("status") == "True" and found

    until(able, "the autoscaler to read the pool's scale")
    # Below its minimum the autoscaler needs no metric, and this cluster has no metrics.
    until(lambda: get("sandboxwarmpool", "python-warmpool", SPACE)["spec"]["replicas"] == 2, "the pool to have its minimum")


@check
def a_load_is_put_on_the_cluster_with_its_pools_autoscaled():
    results = tempfile.mkdtemp(dir=cluster.CONTROL_PLANE)
    command = [
        cluster.AGENT_SANDBOX, "bench", "load", "rapid-burst", "--target=cluster", "--image=host", "--command=sleep", "--command=infinity",
        "--namespaces=2", "--rounds=2", "--claims=2", "--pool=3", "--pause=0", "--hpa-min-replicas=3", "--hpa-max-replicas=9",
        f"--controller-metrics=http://127.0.0.1:{state['controller'].metrics}", f"--output={results}",
        f"--kubeconfig={os.environ['KUBECONFIG']}",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    # How fast it was is no test's to say.
    assert all(line.startswith("missed: ") for line in ended.stderr.splitlines()), ended.stderr
    with open(f"{results}/results.json") as file:
        found = json.load(file)
    assert (found["total"]["claims"], found["total"]["notReady"]) == (8, 0), ended.stdout
    assert found["poolAtEnd"] == 6, ended.stdout
    counts = {one["histogram"]: one["count"] for one in found["controller"]}
    assert counts["agent_sandbox_claim_controller_startup_latency_ms"] == 8, counts


@check
def an_agent_at_work_is_not_evicted():
    kubectl("apply", "-n", SPACE, "-f", f"{EXAMPLES}/disruption-budget/budget.yaml")
    ready("sandbox", "at-work", SPACE)

    def counted():
        status = get("pdb", "agents-at-work", SPACE).get("status") or {}
        return status.get("currentHealthy") == 1 and status.get("expectedPods") == 1

    until(counted, "the budget to count the sandbox")

    def evict(name):
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": SPACE}}
        path = f"/api/v1/namespaces/{SPACE}/pods/{name}/eviction"
        return lambda succeeds: kubectl("create", "--raw", path, "-f", "-", text=json.dumps(eviction), succeeds=succeeds)

    output = evict("at-work")(succeeds=False)
    assert "disruption budget" in output, output
    evict("hello-world")(succeeds=True)


@check
def agents_reach_the_tool_by_its_name_and_strangers_do_not():
    kubectl("apply", "-n", SPACE, "-f", f"{EXAMPLES}/network-policy/tool-for-agents.yaml")
    for name in ("tool", "agent", "stranger"):
        ready("sandbox", name, SPACE)
    ask = "import urllib.request as r; print(r.urlopen('http://tool:8000/', timeout=3).read().decode(), end='')"

    def answer(asker):
        return kubectl("exec", asker, "-n", SPACE, "--", "sh", "-c", f'python3 -c "{ask}" 2>&1 | tail -1')

    # The service's name is known once the cluster has noted that its pod is Ready.
    until(lambda: answer("agent") == "the tool answers\n", "the agent to reach the tool")
    output = answer("stranger")
    assert "timed out" in output, output


@check
def nothing_is_left():
    state["node"].leave()


run_checks()

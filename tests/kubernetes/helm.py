"""The chart: linted, rendered for a matrix of values and compared with snapshots, installed, upgraded and uninstalled for real.

`UPDATE_SNAPSHOTS=1` writes the snapshots anew.
"""

import difflib
import json
import os
import subprocess
import textwrap

import cluster
from checks import check, kubectl, run_checks, until
from cluster import AGENT_SANDBOX, CONTROL_PLANE, REPOSITORY, get

CHART = f"{REPOSITORY}/deploy/helm"
SNAPSHOTS = f"{REPOSITORY}/tests/kubernetes/helm"
IMAGE = "--set=image.repository=registry.example/agent-sandbox-controller,image.tag=v0.0.0-test"
DIRECTORIES = {name: f"{CONTROL_PLANE}/helm" for name in ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")}

MATRIX = {
    "defaults": [],
    "extensions": ["--set=controller.extensions=true"],
    "no-leader-election": ["--set=controller.leaderElect=false"],
    "own-namespace": ["--namespace=mine", "--set=namespace.create=false,namespace.name=mine"],
    "release-namespace": ["--namespace=mine", "--set=namespace.name="],
    "every-flag": [
        "--set=controller.leaderElectionNamespace=elections,controller.clusterDomain=example.org",
        "--set=controller.extensions=true,controller.enableTracing=true,controller.enablePprof=true",
        "--set=controller.enablePprofDebug=true,controller.pprofBlockProfileRate=2000000",
        "--set=controller.pprofMutexProfileFraction=5,controller.kubeApiQps=50.5,controller.kubeApiBurst=100",
        "--set=controller.sandboxConcurrentWorkers=11,controller.sandboxClaimConcurrentWorkers=12",
        "--set=controller.sandboxWarmPoolConcurrentWorkers=13,controller.sandboxTemplateConcurrentWorkers=14",
        "--set=controller.extraArgs={--zap-log-level=debug,--log-format=text}",
    ],
    "pod": [
        "--set=replicaCount=3,nameOverride=other,image.repository=example.org/image,image.pullPolicy=Always",
        "--set=podAnnotations.a=b,podLabels.team=t,podLabels.app\\.kubernetes\\.io/name=wrong",
        "--set=resources.limits.memory=64Mi,nodeSelector.disk=fast",
        "--set=tolerations[0].operator=Exists",
        '--set-json=affinity={"nodeAffinity":{"preferredDuringSchedulingIgnoredDuringExecution":[]}}',
    ],
    "node": ["--set=node.enabled=true,node.names={node-two,node-three}"],
    "monitoring": [
        "--set=monitoring.serviceMonitor.enabled=true,monitoring.serviceMonitor.labels.release=prometheus",
        "--set=monitoring.podMonitor.enabled=true,monitoring.podMonitor.interval=30s,monitoring.podMonitor.namespaces={one,two}",
        "--set=monitoring.rules.enabled=true,monitoring.rules.labels.app\\.kubernetes\\.io/name=wrong",
    ],
}


def helm(*arguments, succeeds=True):
    result = subprocess.run(["helm", *arguments], capture_output=True, text=True, env={**os.environ, **DIRECTORIES})
    assert (result.returncode == 0) == succeeds, f"helm {' '.join(arguments)}\n{result.stdout}\n{result.stderr}"
    return result.stdout if succeeds else result.stderr


def rendered(*values):
    return helm("template", "agent-sandbox", CHART, IMAGE, *values)


@check
def the_chart_is_clean():
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART, IMAGE)


@check
def every_combination_is_rendered_as_before():
    os.makedirs(SNAPSHOTS, exist_ok=True)
    for name, values in MATRIX.items():
        now = rendered(*values)
        path = f"{SNAPSHOTS}/{name}.yaml"
        if os.environ.get("UPDATE_SNAPSHOTS"):
            with open(path, "w") as snapshot:
                snapshot.write(now)
        with open(path) as snapshot:
            before = snapshot.read()
        difference = difflib.unified_diff(before.splitlines(), now.splitlines(), "before", "now", lineterm="", n=2)
        assert now == before, f"{name}:\n" + "\n".join(difference)


@check
def the_controller_understands_every_flag():
    rendered_json = subprocess.run(
        ["kubectl", "create", "--dry-run=client", "-o", "json", "-f", "-"],
        input=rendered(*MATRIX["every-flag"]),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    decoder, things, rest = json.JSONDecoder(), [], rendered_json.strip()
    while rest:
        thing, end = decoder.raw_decode(rest)
        things.append(thing)
        rest = rest[end:].strip()
    deployment = next(thing for thing in things if thing["kind"] == "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert len(arguments) == 17, arguments
    shown = subprocess.run([AGENT_SANDBOX, "controller", *arguments, "--version"], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr


@check
def bad_values_are_refused_by_name():
    for given, missing in (("image.tag=v1", "image.repository"), ("image.repository=registry.example/c", "image.tag")):
        refusal = helm("template", "agent-sandbox", CHART, f"--set={given}", succeeds=False)
        assert f"{missing} is required: set it to" in refusal, refusal
    for value, named in (
        ("controller.sandboxConcurrentWorkers=0", "sandboxConcurrentWorkers"),
        ("controller.workers=3", "workers"),
        ("controller.leaderElect=maybe", "leaderElect"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("replicaCount=many", "replicaCount"),
        ("monitoring.serviceMonitor.interval=often", "interval"),
        ("monitoring.alerts.enabled=true", "alerts"),
        ("node.enabled=true", "node.names is required"),
        ("node.names={Not_A_Name}", "Not_A_Name"),
    ):
        output = helm("template", "agent-sandbox", CHART, IMAGE, f"--set={value}", succeeds=False)
        assert named in output, output


@check
def alerts_and_dashboard_are_those_that_the_repository_tests():
    shown = rendered(
        "--set=monitoring.rules.enabled=true,monitoring.dashboard.enabled=true",
        "--set=monitoring.dashboard.annotations.grafana_folder=Sandboxes",
        "--show-only=templates/monitoring-rules.yaml",
        "--show-only=templates/monitoring-dashboard.yaml",
    )
    for file, indentation in (("rules.yaml", 2), ("dashboard.json", 4)):
        with open(f"{REPOSITORY}/deploy/monitoring/{file}") as original:
            text = textwrap.indent(original.read().strip(), " " * indentation)
        assert text in shown, f"the chart's {file} differs from deploy/monitoring/{file}"
    assert 'grafana_dashboard: "1"' in shown and "grafana_folder: Sandboxes" in shown, shown


@check
def the_server_accepts_it_before_it_is_installed():
    install = ["install", "agent-sandbox", CHART, IMAGE, "--namespace", cluster.SYSTEM, "--create-namespace"]
    # Dry runs cannot see a namespace that they would make.
    kubectl("create", "namespace", "rehearsal")
    helm("install", "agent-sandbox", CHART, IMAGE, "--namespace=rehearsal", "--set=namespace.name=", "--dry-run=server")
    helm(*install, "--set=controller.extensions=true")
    deployment = get("deployment", "agent-sandbox-controller", cluster.SYSTEM)
    assert "--extensions=true" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert get("clusterrolebinding", "agent-sandbox-controller-extensions", "default")
    pods = lambda: cluster.items("pods", cluster.SYSTEM, "-l", "app.kubernetes.io/name=agent-sandbox")  # noqa: E731
    until(pods, "a pod of the Deployment")


@check
def the_installed_roles_are_enough_for_the_controller():
    controller = cluster.Controller()
    until(lambda: "became leader" in controller.log_text(), "a leader")
    space = cluster.namespace("work")
    cluster.apply(cluster.template("plain", space))
    until(lambda: cluster.items("networkpolicies", space), "the network policy of a template")
    assert controller.end() == 0
    assert "orbidden" not in controller.log_text(), controller.log_text()


@check
def an_upgrade_changes_the_arguments_and_the_binding():
    helm("upgrade", "agent-sandbox", CHART, IMAGE, "--namespace", cluster.SYSTEM, "--set=controller.leaderElect=false")
    deployment = get("deployment", "agent-sandbox-controller", cluster.SYSTEM)
    assert deployment["spec"]["template"]["spec"]["containers"][0]["args"] == ["--leader-elect=false"]
    assert not get("clusterrolebinding", "agent-sandbox-controller-extensions", "default")


@check
def what_users_made_survives_an_uninstall():
    helm("uninstall", "agent-sandbox", "--namespace", cluster.SYSTEM)
    assert not get("deployment", "agent-sandbox-controller", cluster.SYSTEM)
    assert not get("clusterrole", "agent-sandbox-controller", "default")
    assert get("sandboxtemplate", "plain", "work"), "definitions and objects stay"


run_checks()

"""kubectl on sandboxes, claims, templates and pools: the commands a cluster's user has at hand."""

import json
import os
import subprocess
import time

from checks import DEADLINE_SECONDS, check, kubectl, run_checks, until

SANDBOX = """
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata:
  name: by-kubectl
  labels: {app: shown}
spec:
  podTemplate:
    spec:
      containers:
        - name: main
          image: host
"""


def path(name, expression, kind="sandbox"):
    return kubectl("get", kind, name, "-o", f"jsonpath={expression}")


@check
def the_kinds_are_discovered_and_explained():
    names = kubectl("api-resources", "-o", "name").split()
    for name in ["sandboxes.agents.x-k8s.io", "sandboxclaims.extensions.agents.x-k8s.io", "pods", "nodes"]:
        assert name in names, names
    assert "agents.x-k8s.io/v1beta1" in kubectl("api-versions").split()
    text = kubectl("explain", "sandbox.spec.podTemplate")
    assert "FIELDS" in text and "metadata" in text, text
    assert "containers" in kubectl("explain", "sandbox.spec", "--recursive")
    assert "creationTimestamp" in kubectl("explain", "sandbox.metadata")
    pod = kubectl("explain", "pod.spec", "--recursive")
    for field in ["containers", "livenessProbe", "httpGet", "terminationGracePeriodSeconds"]:
        assert field in pod, field
    port = kubectl("explain", "pods.spec.containers.ports.containerPort")
    assert "<integer>" in port and "Number of port to expose" in port, port
    assert "resourceNames" in kubectl("explain", "clusterroles.rules")
    # The older form of the documents, which older clients merge by.
    for field in ["pod.spec.containers.ports", "sandbox.spec.podTemplate"]:
        assert "FIELDS" in kubectl("explain", field, "--output=plaintext-openapiv2")
    assert "gitVersion" in kubectl("version", "-o", "json")
    assert kubectl("cluster-info").strip()


MANIFESTS = os.path.join(os.path.dirname(__file__), "../../crates/api/tests/manifests/x-k8s")


def manifest(name):
    """A manifest of the documentation, with an image that needs no registry."""
    with open(os.path.join(MANIFESTS, f"{name}.yaml"), encoding="utf-8") as file:
        lines = file.read().splitlines()
    return "\n".join(line.split("image:")[0] + "image: host" if "image:" in line else line for line in lines)


@check
def every_documented_manifest_is_accepted():
    kubectl("create", "namespace", "research")
    for file in sorted(os.listdir(MANIFESTS)):
        output = kubectl("apply", "--dry-run=server", "-f", os.path.join(MANIFESTS, file))
        assert "created (server dry run)" in output, f"{file}: {output}"
    kubectl("delete", "namespace", "research", "--timeout=180s")


@check
def documented_manifests_do_what_they_say():
    names = ["template", "warm-pool", "claim-minimal", "sandbox-minimal"]
    texts = {name: manifest(name) for name in names}
    for name in names:
        kubectl("apply", "-f", "-", text=texts[name])
    kubectl("wait", "sandboxclaim/mine", "--for=condition=Ready", "--timeout=180s")
    kubectl("wait", "sandbox/smallest", "--for=condition=Ready", "--timeout=180s")
    for name in reversed(names):
        kubectl("delete", "-f", "-", "--timeout=180s", text=texts[name])


@check
def objects_are_applied_shown_and_waited_for():
    assert "created (server dry run)" in kubectl("apply", "--dry-run=server", "-f", "-", text=SANDBOX)
    assert "created" in kubectl("apply", "-f", "-", text=SANDBOX)
    assert "unchanged" in kubectl("apply", "-f", "-", text=SANDBOX)
    kubectl("wait", "sandbox/by-kubectl", "--for=condition=Ready", "--timeout=180s")
    table = kubectl("get", "sandboxes", "-l", "app=shown")
    assert table.split()[0] == "NAME" and "by-kubectl" in table, table
    assert "by-kubectl" in kubectl("get", "sandboxes", "-o", "wide")
    assert kubectl("get", "sandbox", "by-kubectl", "-o", "name") == "sandbox.agents.x-k8s.io/by-kubectl\n"
    columns = "custom-columns=N:.metadata.name"
    shown = kubectl("get", "sandboxes", "--field-selector=metadata.name=by-kubectl", "-o", columns, "--no-headers")
    assert shown == "by-kubectl\n", shown
    assert "by-kubectl" in kubectl("get", "sandboxes", "--sort-by=.metadata.creationTimestamp")
    described = kubectl("describe", "sandbox", "by-kubectl")
    assert "Kind:         Sandbox" in described and "Conditions:" in described, described
    assert "Containers:" in kubectl("describe", "pod", "by-kubectl")
    assert "Capacity:" in kubectl("describe", "node")


@check
def events_are_found_by_what_they_are_about():
    about = {"apiVersion": "v1", "kind": "Pod", "name": "by-kubectl", "namespace": "default", "uid": path("by-kubectl", "{.metadata.uid}", "pod")}
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "reported", "namespace": "default"}, "involvedObject": about, "type": "Normal"}
    event.update({"reason": "ReportedByKubectl", "message": "hello", "count": 1, "firstTimestamp": now, "lastTimestamp": now})
    kubectl("create", "-f", "-", text=json.dumps(event))
    assert "ReportedByKubectl" in kubectl("events", "--for=pod/by-kubectl")
    assert "ReportedByKubectl" not in kubectl("events", "--for=pod/another")
    assert "ReportedByKubectl" in kubectl("describe", "pod", "by-kubectl")
    selected = kubectl("get", "events", "--field-selector=reason=ReportedByKubectl,involvedObject.name=by-kubectl", "-o", "name")
    assert selected == "event/reported\n", selected
    assert "ReportedByKubectl" in kubectl("get", "events.events.k8s.io", "reported", "-o", "jsonpath={.reason}")
    kubectl("delete", "event", "reported")


@check
def a_difference_is_shown_and_applied_from_the_server():
    changed = SANDBOX.replace("app: shown", "app: shown, tier: one")
    different = subprocess.run(["kubectl", "diff", "-f", "-"], input=changed, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert different.returncode == 1 and "+    tier: one" in different.stdout, different
    kubectl("apply", "-f", "-", text=changed)
    assert path("by-kubectl", "{.metadata.labels.tier}") == "one"
    applied = kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=changed.replace("tier: one", "tier: two"))
    assert "serverside-applied" in applied, applied
    assert path("by-kubectl", "{.metadata.labels.tier}") == "two"


@check
def fields_are_set_in_every_way():
    kubectl("label", "sandbox", "by-kubectl", "colour=green")
    kubectl("annotate", "sandbox", "by-kubectl", "example.com/note=hello")
    assert path("by-kubectl", "{.metadata.labels.colour}") == "green"
    assert path("by-kubectl", r"{.metadata.annotations.example\.com/note}") == "hello"
    kubectl("label", "sandbox", "by-kubectl", "colour-")
    assert path("by-kubectl", "{.metadata.labels.colour}") == ""
    kubectl("patch", "sandbox", "by-kubectl", "--type=merge", "-p", '{"metadata": {"labels": {"by": "merge"}}}')
    kubectl("patch", "sandbox", "by-kubectl", "--type=json", "-p", '[{"op": "add", "path": "/metadata/labels/also", "value": "json"}]')
    assert (path("by-kubectl", "{.metadata.labels.by}"), path("by-kubectl", "{.metadata.labels.also}")) == ("merge", "json")
    kubectl("patch", "pod", "by-kubectl", "-p", '{"metadata": {"labels": {"by": "strategic"}}}')
    assert path("by-kubectl", "{.metadata.labels.by}", "pod") == "strategic"
    whole = json.loads(kubectl("get", "sandbox", "by-kubectl", "-o", "json"))
    whole["metadata"]["labels"]["by"] = "replace"
    kubectl("replace", "-f", "-", text=json.dumps(whole))
    assert path("by-kubectl", "{.metadata.labels.by}") == "replace"
    error = kubectl("apply", "-f", "-", text=SANDBOX.replace("podTemplate", "podTemplat"), succeeds=False)
    assert "podTemplat" in error, error


@check
def lists_of_a_built_in_kind_merge_by_key():
    def pod(*containers):
        listed = [{"name": name, "image": "host", "env": [{"name": "A", "value": "1"}]} for name in containers]
        spec = {"nodeName": "nowhere", "containers": listed, "tolerations": [{"operator": "Exists"}]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "merged", "labels": {"a": "1"}}, "spec": spec}

    kubectl("apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": [pod("one", "two")]}))
    kubectl("patch", "pod", "merged", "-p", '{"metadata": {"labels": {"b": "2"}}, "spec": {"containers": [{"name": "two", "image": "other"}]}}')
    assert path("merged", "{.spec.containers[*].image}", "pod") == "host other"
    # Fields of other managers stay if the configuration does not contain them.
    assert "configured" in kubectl("apply", "-f", "-", text=json.dumps(pod("one", "two")))
    assert path("merged", "{.spec.containers[*].image}", "pod") == "host host"
    assert path("merged", "{.metadata.labels.b}", "pod") == "2"
    assert path("merged", "{.spec.containers[1].env[0].value}", "pod") == "1"
    kubectl("delete", "pod", "merged", "--force", "--grace-period=0")


@check
def dependents_follow_the_cascade():
    def config_map(name, owner=None):
        metadata = {"name": name, "namespace": "default"}
        if owner:
            uid = path(owner, "{.metadata.uid}", "configmap")
            metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "ConfigMap", "name": owner, "uid": uid, "blockOwnerDeletion": True}]
        return json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})

    for cascade in ["background", "foreground", "orphan"]:
        kubectl("create", "-f", "-", text=config_map("owner"))
        kubectl("create", "-f", "-", text=config_map("dependent", "owner"))
        kubectl("delete", "configmap", "owner", f"--cascade={cascade}", "--timeout=180s")
        assert "not found" in kubectl("get", "configmap", "owner", succeeds=False)
        if cascade == "orphan":
            assert path("dependent", "{.metadata.ownerReferences}", "configmap") == ""
            kubectl("delete", "configmap", "dependent")
        else:
            kubectl("wait", "configmap/dependent", "--for=delete", "--timeout=180s")


@check
def objects_are_created_and_replaced_by_command():
    kubectl("create", "namespace", "by-command")
    kubectl("create", "configmap", "settings", "--from-literal=a=1", "-n", "by-command")
    kubectl("create", "secret", "generic", "hidden", "--from-literal=b=2", "-n", "by-command")
    assert kubectl("get", "configmap", "settings", "-n", "by-command", "-o", "jsonpath={.data.a}") == "1"
    whole = json.loads(kubectl("get", "configmap", "settings", "-n", "by-command", "-o", "json"))
    kubectl("replace", "--force", "-f", "-", text=json.dumps(whole))
    replaced = json.loads(kubectl("get", "configmap", "settings", "-n", "by-command", "-o", "json"))
    assert replaced["metadata"]["uid"] != whole["metadata"]["uid"]
    assert "kind: ConfigMap" in kubectl("get", "configmap", "settings", "-n", "by-command", "-o", "yaml")
    kubectl("delete", "namespace", "by-command", "--timeout=180s")
    assert "not found" in kubectl("get", "namespace", "by-command", succeeds=False)


@check
def an_object_is_edited():
    kubectl("edit", "sandbox", "by-kubectl", environment={"KUBE_EDITOR": "sed -i s/tier:.two/tier:\\ edited/"})
    assert path("by-kubectl", "{.metadata.labels.tier}") == "edited"


@check
def a_set_of_objects_is_pruned():
    def config_map(name):
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "default"}, "data": {"key": "value"}}

    def apply(*names):
        objects = {"apiVersion": "v1", "kind": "List", "items": [config_map(name) for name in names]}
        arguments = ["apply", "--server-side", "--applyset=secrets/the-set", "--prune", "-n", "default", "-f", "-"]
        return kubectl(*arguments, text=json.dumps(objects), environment={"KUBECTL_APPLYSET": "true"})

    apply("kept", "dropped")
    assert "configmap/dropped pruned" in apply("kept")
    assert kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.key}") == "value"
    kubectl("wait", "configmap/kept", "--for=jsonpath={.data.key}=value", "--timeout=180s")
    kubectl("delete", "configmap/kept", "secret/the-set")


@check
def a_token_of_an_account_is_good_for_what_it_may():
    kubectl("create", "serviceaccount", "reader")
    kubectl("create", "role", "reader", "--verb=get,list", "--resource=sandboxes.agents.x-k8s.io")
    kubectl("create", "rolebinding", "reader", "--role=reader", "--serviceaccount=default:reader")
    token = kubectl("create", "token", "reader").strip()
    assert "by-kubectl" in kubectl("get", "sandboxes", f"--token={token}")
    error = kubectl("get", "pods", f"--token={token}", succeeds=False)
    assert 'User "system:serviceaccount:default:reader" cannot list resource "pods"' in error, error
    kubectl("delete", "serviceaccount/reader", "role/reader", "rolebinding/reader")


@check
def sandboxes_and_pools_are_scaled():
    kubectl("scale", "sandboxwarmpool", "python-warmpool", "--replicas=3")
    until(lambda: path("python-warmpool", "{.status.readyReplicas}", "sandboxwarmpool") == "3", "three warm sandboxes")
    kubectl("scale", "sandboxwarmpool", "python-warmpool", "--replicas=2")
    until(lambda: path("python-warmpool", "{.status.readyReplicas}", "sandboxwarmpool") == "2", "two warm sandboxes")


@check
def access_is_reviewed():
    assert kubectl("auth", "can-i", "create", "sandboxes") == "yes\n"
    assert "sandboxes" in kubectl("auth", "can-i", "--list") or "*.*" in kubectl("auth", "can-i", "--list")
    assert "Username" in kubectl("auth", "whoami")
    unprivileged = ["--as=system:serviceaccount:default:unprivileged"]
    denied = subprocess.run(["kubectl", "auth", "can-i", "create", "sandboxes", *unprivileged], capture_output=True, text=True)
    assert denied.stdout == "no\n", denied


@check
def a_watch_reports_changes():
    watch = subprocess.Popen(["kubectl", "get", "sandboxes", "--watch", "-o", "name"], stdout=subprocess.PIPE, text=True)
    try:
        assert watch.stdout.readline()
        kubectl("create", "-f", "-", text=SANDBOX.replace("by-kubectl", "another"))
        lines = iter(watch.stdout.readline, "")
        assert any("another" in line for line in lines)
    finally:
        watch.kill()
        watch.communicate()


@check
def objects_are_deleted_with_what_they_own():
    assert "deleted" in kubectl("delete", "sandbox", "another", "--cascade=foreground", "--timeout=180s")
    kubectl("delete", "-f", "-", text=SANDBOX)
    kubectl("wait", "pod/by-kubectl", "--for=delete", "--timeout=180s")
    error = kubectl("get", "sandbox", "by-kubectl", succeeds=False)
    assert 'sandboxes.agents.x-k8s.io "by-kubectl" not found' in error, error
    assert kubectl("delete", "sandbox", "by-kubectl", "--ignore-not-found") == ""


run_checks()

"""The official Python client against the server whose kubeconfig is the first argument: CRUD, watch, patches, the dynamic client."""

import sys
import threading

from kubernetes import client, config, dynamic, watch

config.load_kube_config(sys.argv[1])
core = client.CoreV1Api()

created = core.create_namespaced_config_map("default", {"metadata": {"name": "one", "labels": {"app": "python"}}, "data": {"a": "b"}})
assert created.metadata.uid and created.metadata.resource_version
assert core.read_namespaced_config_map("one", "default").data == {"a": "b"}
assert [item.metadata.name for item in core.list_namespaced_config_map("default", label_selector="app=python").items] == ["one"]

seen = []
version = core.list_namespaced_config_map("default").metadata.resource_version


def follow():
    for event in watch.Watch().stream(core.list_namespaced_config_map, "default", resource_version=version, timeout_seconds=20):
        seen.append((event["type"], event["object"].metadata.name))
        if event["type"] == "DELETED":
            return


follower = threading.Thread(target=follow)
follower.start()
core.patch_namespaced_config_map("one", "default", {"data": {"c": "d"}})
core.delete_namespaced_config_map("one", "default")
follower.join(30)
assert seen == [("MODIFIED", "one"), ("DELETED", "one")], seen

try:
    core.read_namespaced_config_map("one", "default")
    raise SystemExit("a deleted object was found")
except client.ApiException as error:
    assert error.status == 404 and '"reason":"NotFound"' in error.body, error.body

definition = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "gadgets.example.com"},
    "spec": {
        "group": "example.com",
        "scope": "Namespaced",
        "names": {"plural": "gadgets", "kind": "Gadget"},
        "versions": [{
            "name": "v1", "served": True, "storage": True, "subresources": {"status": {}},
            "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
        }],
    },
}
client.ApiextensionsV1Api().create_custom_resource_definition(definition)
gadgets = dynamic.DynamicClient(client.ApiClient()).resources.get(api_version="example.com/v1", kind="Gadget")
gadgets.create({"apiVersion": "example.com/v1", "kind": "Gadget", "metadata": {"name": "g"}, "spec": {"x": 1}}, namespace="default")
patched = gadgets.patch({"spec": {"y": 2}}, name="g", namespace="default", content_type="application/merge-patch+json")
assert dict(patched.spec) == {"x": 1, "y": 2}, patched.spec
assert len(gadgets.get(namespace="default").items) == 1
custom = client.CustomObjectsApi()
custom.patch_namespaced_custom_object_status("example.com", "v1", "default", "gadgets", "g", {"status": {"phase": "Ready"}})
assert custom.get_namespaced_custom_object("example.com", "v1", "default", "gadgets", "g")["status"] == {"phase": "Ready"}
gadgets.delete(name="g", namespace="default")
print("python client ok")

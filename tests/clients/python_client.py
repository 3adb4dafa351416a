"""The official Python client: CRUD, watch, patches, errors and the dynamic client."""

import os
import threading

from checks import DEADLINE_SECONDS, NAMESPACE, check, raises, run_checks
from kubernetes import client, config, dynamic, watch

config.load_kube_config(os.environ["KUBECONFIG"])
core = client.CoreV1Api()

GROUP = "python.example.com"
DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"gadgets.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"plural": "gadgets", "kind": "Gadget"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


@check
def objects_are_created_listed_watched_and_deleted():
    created = core.create_namespaced_config_map(NAMESPACE, {"metadata": {"name": "one", "labels": {"app": "python"}}, "data": {"a": "b"}})
    assert created.metadata.uid and created.metadata.resource_version
    assert core.read_namespaced_config_map("one", NAMESPACE).data == {"a": "b"}
    listed = core.list_namespaced_config_map(NAMESPACE, label_selector="app=python")
    assert [item.metadata.name for item in listed.items] == ["one"]
    created.data = {"a": "c"}
    assert core.replace_namespaced_config_map("one", NAMESPACE, created).data == {"a": "c"}
    stale = raises(client.ApiException, lambda: core.replace_namespaced_config_map("one", NAMESPACE, created))
    assert stale.status == 409 and '"reason":"Conflict"' in stale.body, stale.body

    seen = []
    version = core.list_namespaced_config_map(NAMESPACE).metadata.resource_version

    def follow():
        arguments = {"label_selector": "app=python", "resource_version": version, "timeout_seconds": DEADLINE_SECONDS}
        for event in watch.Watch().stream(core.list_namespaced_config_map, NAMESPACE, **arguments):
            seen.append((event["type"], event["object"].metadata.name))
            if event["type"] == "DELETED":
                return

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    core.patch_namespaced_config_map("one", NAMESPACE, {"data": {"c": "d"}})
    core.delete_namespaced_config_map("one", NAMESPACE)
    follower.join(DEADLINE_SECONDS)
    assert seen == [("MODIFIED", "one"), ("DELETED", "one")], seen
    missing = raises(client.ApiException, lambda: core.read_namespaced_config_map("one", NAMESPACE))
    assert missing.status == 404 and '"reason":"NotFound"' in missing.body, missing.body


@check
def custom_kinds_are_found_and_used():
    definitions = client.ApiextensionsV1Api()
    definitions.create_custom_resource_definition(DEFINITION)
    try:
        gadgets = dynamic.DynamicClient(client.ApiClient()).resources.get(api_version=f"{GROUP}/v1", kind="Gadget")
        gadgets.create({"apiVersion": f"{GROUP}/v1", "kind": "Gadget", "metadata": {"name": "g"}, "spec": {"x": 1}}, namespace=NAMESPACE)
        patched = gadgets.patch({"spec": {"y": 2}}, name="g", namespace=NAMESPACE, content_type="application/merge-patch+json")
        assert dict(patched.spec) == {"x": 1, "y": 2}, patched.spec
        assert len(gadgets.get(namespace=NAMESPACE).items) == 1
        applied = gadgets.server_side_apply(
            {"apiVersion": f"{GROUP}/v1", "kind": "Gadget", "metadata": {"name": "g"}, "spec": {"z": 3}}, namespace=NAMESPACE, field_manager="python"
        )
        assert dict(applied.spec) == {"x": 1, "y": 2, "z": 3}, applied.spec
        custom = client.CustomObjectsApi()
        place = (GROUP, "v1", NAMESPACE, "gadgets", "g")
        custom.patch_namespaced_custom_object_status(*place, {"status": {"phase": "Ready"}})
        assert custom.get_namespaced_custom_object(*place)["status"] == {"phase": "Ready"}
        gadgets.delete(name="g", namespace=NAMESPACE)
    finally:
        definitions.delete_custom_resource_definition(DEFINITION["metadata"]["name"])


run_checks()

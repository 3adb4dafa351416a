"""A stand-in for a Gateway in front of the router: as much of the Gateway API as clients read, and a forwarder at the address it gives."""

import json
import random
import socket
import threading
from urllib.parse import urlsplit

from checks import ROUTER_URL, kubectl

NAME = "sandbox-router"


def apply(document):
    kubectl("apply", "-f", "-", text=json.dumps(document))


def forward(client, target):
    """Copies bytes both ways until either side ends."""
    server = socket.create_connection(target)

    def copy(source, sink):
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for side in (source, sink):
                try:
                    side.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    threading.Thread(target=copy, args=(client, server), daemon=True).start()
    threading.Thread(target=copy, args=(server, client), daemon=True).start()


def start(namespace):
    """A Gateway whose address leads to the router, as a controller of the Gateway API would make it. Clients dial port 80 of it."""
    router = urlsplit(ROUTER_URL)
    listener = socket.socket()
    while True:
        address = f"127.81.{random.randrange(256)}.{random.randrange(1, 255)}"
        try:
            listener.bind((address, 80))
            break
        except OSError:
            continue
    listener.listen()

    def serve():
        while True:
            client, _ = listener.accept()
            forward(client, (router.hostname, router.port))

    threading.Thread(target=serve, daemon=True).start()
    apply({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": "gateways.gateway.networking.k8s.io",
            "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/gateway-api"},
        },
        "spec": {
            "group": "gateway.networking.k8s.io",
            "names": {"plural": "gateways", "singular": "gateway", "kind": "Gateway"},
            "scope": "Namespaced",
            "versions": [{
                "name": "v1", "served": True, "storage": True, "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }],
        },
    })
    kubectl("wait", "--for=condition=Established", "crd/gateways.gateway.networking.k8s.io", "--timeout=180s")
    apply({
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "Gateway",
        "metadata": {"name": NAME, "namespace": namespace},
    })
    status = {"status": {"addresses": [{"type": "IPAddress", "value": address}]}}
    kubectl("patch", "gateway", NAME, "-n", namespace, "--subresource=status", "--type=merge", "-p", json.dumps(status))

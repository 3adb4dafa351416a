package clients

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
)

var gateways = schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: "gateways"}

// startGateway makes a Gateway whose address leads to the router, as a controller of the Gateway API would, and returns its name. The
// SDK dials port 80 of the address.
func startGateway(t *testing.T) string {
	t.Helper()
	ctx := within(t)
	router, err := url.Parse(os.Getenv("ROUTER_URL"))
	must(t, err)
	address := fmt.Sprintf("127.80.%d.%d", os.Getpid()/250%250, os.Getpid()%250+1)
	listener, err := net.Listen("tcp", net.JoinHostPort(address, "80"))
	must(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	go forward(listener, router.Host)

	client, err := dynamic.NewForConfig(config(t))
	must(t, err)
	defineGateways(ctx, t, client)
	objects := client.Resource(gateways).Namespace(namespace)
	gateway := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway", "metadata": map[string]any{"generateName": "sandbox-router-"},
	}}
	gateway, err = objects.Create(ctx, gateway, metav1.CreateOptions{})
	must(t, err)
	t.Cleanup(func() { _ = objects.Delete(context.Background(), gateway.GetName(), metav1.DeleteOptions{}) })
	gateway.Object["status"] = map[string]any{"addresses": []any{map[string]any{"type": "IPAddress", "value": address}}}
	_, err = objects.UpdateStatus(ctx, gateway, metav1.UpdateOptions{})
	must(t, err)
	return gateway.GetName()
}

// forward copies bytes between the clients of a listener and a target.
func forward(listener net.Listener, target string) {
	for {
		client, err := listener.Accept()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = client.Close() }()
			server, err := net.Dial("tcp", target)
			if err != nil {
				return
			}
			defer func() { _ = server.Close() }()
			go func() { _, _ = io.Copy(server, client) }()
			_, _ = io.Copy(client, server)
		}()
	}
}

// defineGateways installs as much of the Gateway API as the SDK reads.
func defineGateways(ctx context.Context, t *testing.T, client dynamic.Interface) {
	t.Helper()
	definitions := client.Resource(schema.GroupVersionResource{
		Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions",
	})
	definition := map[string]any{}
	must(t, json.Unmarshal([]byte(gatewayDefinition), &definition))
	_, err := definitions.Create(ctx, &unstructured.Unstructured{Object: definition}, metav1.CreateOptions{})
	if err != nil && !errors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	for ctx.Err() == nil {
		found, err := definitions.Get(ctx, "gateways.gateway.networking.k8s.io", metav1.GetOptions{})
		must(t, err)
		conditions, _, _ := unstructured.NestedSlice(found.Object, "status", "conditions")
		for _, condition := range conditions {
			if condition := condition.(map[string]any); condition["type"] == "Established" && condition["status"] == "True" {
				return
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Fatal("the definition of gateways is not established")
}

const gatewayDefinition = `{
	"apiVersion": "apiextensions.k8s.io/v1",
	"kind": "CustomResourceDefinition",
	"metadata": {
		"name": "gateways.gateway.networking.k8s.io",
		"annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/gateway-api"}
	},
	"spec": {
		"group": "gateway.networking.k8s.io",
		"names": {"plural": "gateways", "singular": "gateway", "kind": "Gateway"},
		"scope": "Namespaced",
		"versions": [{
			"name": "v1", "served": true, "storage": true, "subresources": {"status": {}},
			"schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}
		}]
	}
}`

package clients

import (
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	corev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
)

func TestServerSideApplyOwnsFieldsByManager(t *testing.T) {
	ctx, config := connect(t)
	client := kubernetes.NewForConfigOrDie(config)
	place := namespace(ctx, t, client)
	maps := client.CoreV1().ConfigMaps(place)

	one := corev1.ConfigMap("shared", place).WithData(map[string]string{"one": "1", "both": "1"})
	_, err := maps.Apply(ctx, one, metav1.ApplyOptions{FieldManager: "one"})
	must(t, err)
	two := corev1.ConfigMap("shared", place).WithData(map[string]string{"two": "2", "both": "2"})
	_, err = maps.Apply(ctx, two, metav1.ApplyOptions{FieldManager: "two"})
	if !apierrors.IsConflict(err) || !strings.Contains(err.Error(), `conflict with "one": .data.both`) {
		t.Fatalf("two managers set one field: %v", err)
	}
	_, err = maps.Apply(ctx, two, metav1.ApplyOptions{FieldManager: "two", Force: true})
	must(t, err)
	// A field that its manager no longer applies, and no other manager owns, is removed.
	applied, err := maps.Apply(ctx, corev1.ConfigMap("shared", place), metav1.ApplyOptions{FieldManager: "one"})
	must(t, err)
	if len(applied.Data) != 2 || applied.Data["both"] != "2" || applied.Data["two"] != "2" {
		t.Fatalf("left: %v", applied.Data)
	}
	// A configuration taken from the live object holds what its manager owns, and nothing else.
	extracted, err := corev1.ExtractConfigMap(applied, "two")
	must(t, err)
	if len(extracted.Data) != 2 || extracted.Data["two"] != "2" {
		t.Fatalf("extracted: %v", extracted.Data)
	}
}

func TestServerSideApplyOfCustomKinds(t *testing.T) {
	ctx, config := connect(t)
	place := namespace(ctx, t, kubernetes.NewForConfigOrDie(config))
	client := dynamic.NewForConfigOrDie(config).Resource(templates).Namespace(place)
	apply := func(manager string, containers ...any) (*unstructured.Unstructured, error) {
		return client.Apply(ctx, "one", &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
			"metadata": map[string]any{"name": "one"},
			"spec":     map[string]any{"podTemplate": map[string]any{"spec": map[string]any{"containers": containers}}},
		}}, metav1.ApplyOptions{FieldManager: manager})
	}
	_, err := apply("one", map[string]any{"name": "main", "image": "host"})
	must(t, err)
	// Containers are a list by name, so a second manager adds its own.
	both, err := apply("two", map[string]any{"name": "side", "image": "host"})
	must(t, err)
	containers, _, err := unstructured.NestedSlice(both.Object, "spec", "podTemplate", "spec", "containers")
	must(t, err)
	if len(containers) != 2 {
		t.Fatalf("containers: %v", containers)
	}
	_, err = apply("three", map[string]any{"name": "main", "image": "other"})
	if !apierrors.IsConflict(err) || !strings.Contains(err.Error(), `.spec.podTemplate.spec.containers[name="main"].image`) {
		t.Fatalf("conflict: %v", err)
	}
}

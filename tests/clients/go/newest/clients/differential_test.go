package clients

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand"
	"reflect"
	"sort"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/util/managedfields/managedfieldstest"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/kube-openapi/pkg/validation/spec"
)

const rounds = 120

var (
	merges      = schema.GroupVersionKind{Group: "differential.example.com", Version: "v1", Kind: "Merge"}
	mergesPlace = schema.GroupVersionResource{Group: merges.Group, Version: merges.Version, Resource: "merges"}
	definitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	managers    = []string{"ann", "bob", "cat"}
)

// The schema has every way in which fields can be owned.
const mergeSchema = `{"type":"object","properties":{"spec":{"type":"object","properties":{
  "text":{"type":"string"},
  "nested":{"type":"object","properties":{"a":{"type":"string"},"b":{"type":"string"}}},
  "map":{"type":"object","additionalProperties":{"type":"string"}},
  "whole":{"type":"object","x-kubernetes-map-type":"atomic","properties":{"a":{"type":"string"},"b":{"type":"string"}}},
  "set":{"type":"array","x-kubernetes-list-type":"set","items":{"type":"string"}},
  "atomic":{"type":"array","x-kubernetes-list-type":"atomic","items":{"type":"string"}},
  "items":{"type":"array","x-kubernetes-list-type":"map","x-kubernetes-list-map-keys":["name"],"items":{"type":"object","required":["name"],"properties":{
    "name":{"type":"string"},"value":{"type":"string"},"inner":{"type":"object","properties":{"a":{"type":"string"},"b":{"type":"string"}}}}}}
}}}}`

// TestServerSideApplyAgreesWithGo runs random histories of applies and updates against the server and against Kubernetes' own
// implementation of field ownership, fed with the server's own description of the kind.
func TestServerSideApplyAgreesWithGo(t *testing.T) {
	ctx, config := connect(t)
	client := dynamic.NewForConfigOrDie(config)
	typed := kubernetes.NewForConfigOrDie(config)
	define(ctx, t, client)
	place := namespace(ctx, t, typed)
	converter := converterOf(ctx, t, typed)
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewSource(seed))

	for round := range rounds {
		name := fmt.Sprintf("m-%d", round)
		objects := client.Resource(mergesPlace).Namespace(place)
		reference := &reference{fields: managedfieldstest.NewFakeFieldManager(converter, merges), live: nothing()}
		history := ""
		for range 5 {
			step := randomStep(random)
			history += fmt.Sprintf("%s %s force=%t %s\n", step.verb, step.manager, step.force, text(step.spec))
			expected, expectedError := reference.do(step, name)
			found, err := step.onServer(ctx, objects, name)
			if (err == nil) != (expectedError == nil) {
				t.Fatalf("%sserver: %v\nGo: %v", history, err, expectedError)
			}
			if err != nil {
				if !apierrors.IsConflict(err) || err.Error() != expectedError.Error() {
					t.Fatalf("%sserver: %v\nGo:     %v", history, err, expectedError)
				}
				continue
			}
			if !reflect.DeepEqual(specOf(found), specOf(expected)) {
				t.Fatalf("%sserver: %s\nGo:     %s", history, text(specOf(found)), text(specOf(expected)))
			}
			if owned, wanted := ownership(found), ownership(expected); !reflect.DeepEqual(owned, wanted) {
				t.Fatalf("%sserver: %s\nGo:     %s", history, text(owned), text(wanted))
			}
		}
	}
}

type step struct {
	verb, manager string
	force         bool
	spec          map[string]any
}

func (s step) object(name string) *unstructured.Unstructured {
	object := &unstructured.Unstructured{Object: map[string]any{"spec": s.spec}}
	object = object.DeepCopy()
	object.SetGroupVersionKind(merges)
	object.SetName(name)
	return object
}

// reference is an object in the care of Kubernetes' own implementation.
type reference struct {
	fields *managedfields.FieldManager
	live   *unstructured.Unstructured
}

func nothing() *unstructured.Unstructured {
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(merges)
	return object
}

func (r *reference) do(s step, name string) (*unstructured.Unstructured, error) {
	var changed runtime.Object
	var err error
	if s.verb == "apply" {
		changed, err = r.fields.Apply(r.live.DeepCopy(), s.object(name), s.manager, s.force)
	} else {
		changed, err = r.fields.Update(r.live.DeepCopy(), s.object(name), s.manager)
	}
	if err != nil {
		return nil, err
	}
	r.live = changed.(*unstructured.Unstructured)
	// What a manager gives up can leave a null, which kube-apiserver drops in its next step.
	dropNulls(r.live.Object)
	return r.live, nil
}

func dropNulls(value any) {
	switch value := value.(type) {
	case map[string]any:
		for name, member := range value {
			if member == nil {
				delete(value, name)
			}
			dropNulls(member)
		}
	case []any:
		for _, item := range value {
			dropNulls(item)
		}
	}
}

func (s step) onServer(ctx context.Context, objects dynamic.ResourceInterface, name string) (*unstructured.Unstructured, error) {
	if s.verb == "apply" {
		return objects.Apply(ctx, name, s.object(name), metav1.ApplyOptions{FieldManager: s.manager, Force: s.force})
	}
	live, err := objects.Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return objects.Create(ctx, s.object(name), metav1.CreateOptions{FieldManager: s.manager})
	}
	if err != nil {
		return nil, err
	}
	object := s.object(name)
	object.SetResourceVersion(live.GetResourceVersion())
	return objects.Update(ctx, object, metav1.UpdateOptions{FieldManager: s.manager})
}

func randomStep(random *rand.Rand) step {
	one := func(choices ...string) string { return choices[random.Intn(len(choices))] }
	some := func() bool { return random.Intn(3) == 0 }
	pair := func() map[string]any {
		made := map[string]any{}
		for _, name := range []string{"a", "b"} {
			if random.Intn(2) == 0 {
				made[name] = one("1", "2")
			}
		}
		return made
	}
	texts := func() []any {
		made := []any{}
		for _, index := range random.Perm(3)[:random.Intn(3)+1] {
			made = append(made, []string{"x", "y", "z"}[index])
		}
		return made
	}
	spec := map[string]any{}
	if some() {
		spec["text"] = one("1", "2")
	}
	for _, name := range []string{"nested", "map", "whole"} {
		if made := pair(); some() && len(made) > 0 {
			spec[name] = made
		}
	}
	for _, name := range []string{"set", "atomic"} {
		if some() {
			spec[name] = texts()
		}
	}
	if random.Intn(2) == 0 {
		items := []any{}
		for _, name := range texts() {
			item := map[string]any{"name": name}
			if some() {
				item["value"] = one("1", "2")
			}
			if inner := pair(); some() && len(inner) > 0 {
				item["inner"] = inner
			}
			items = append(items, item)
		}
		spec["items"] = items
	}
	return step{verb: one("apply", "apply", "update"), manager: one(managers...), force: some(), spec: spec}
}

func specOf(object *unstructured.Unstructured) map[string]any {
	spec, _, _ := unstructured.NestedMap(object.Object, "spec")
	if len(spec) == 0 {
		return nil
	}
	return spec
}

// ownership is what each manager owns, in an order of its own.
func ownership(object *unstructured.Unstructured) []string {
	owned := []string{}
	for _, entry := range object.GetManagedFields() {
		var fields any
		_ = json.Unmarshal(entry.FieldsV1.Raw, &fields)
		owned = append(owned, fmt.Sprintf("%s %s %s %s", entry.Manager, entry.Operation, entry.APIVersion, text(fields)))
	}
	sort.Strings(owned)
	return owned
}

func text(value any) string {
	written, _ := json.Marshal(value)
	return string(written)
}

func define(ctx context.Context, t *testing.T, client dynamic.Interface) {
	t.Helper()
	var described map[string]any
	must(t, json.Unmarshal([]byte(mergeSchema), &described))
	definition := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": map[string]any{"name": "merges." + merges.Group},
		"spec": map[string]any{
			"group": merges.Group, "scope": "Namespaced",
			"names":    map[string]any{"plural": "merges", "kind": merges.Kind},
			"versions": []any{map[string]any{"name": "v1", "served": true, "storage": true, "schema": map[string]any{"openAPIV3Schema": described}}},
		},
	}}
	_, err := client.Resource(definitions).Create(ctx, definition, metav1.CreateOptions{})
	must(t, err)
	t.Cleanup(func() {
		if err := client.Resource(definitions).Delete(context.Background(), definition.GetName(), metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	until(ctx, t, "the kind is served", func() bool {
		_, err := client.Resource(mergesPlace).List(ctx, metav1.ListOptions{})
		return err == nil
	})
}

// converterOf is Go's view of the kind, taken from what the server says of itself.
func converterOf(ctx context.Context, t *testing.T, client kubernetes.Interface) managedfields.TypeConverter {
	t.Helper()
	written, err := client.Discovery().RESTClient().Get().AbsPath("/openapi/v2").SetHeader("Accept", "application/json").DoRaw(ctx)
	must(t, err)
	var document spec.Swagger
	must(t, json.Unmarshal(written, &document))
	schemas := map[string]*spec.Schema{}
	for name, described := range document.Definitions {
		schemas[name] = &described
	}
	converter, err := managedfields.NewTypeConverter(schemas, false)
	must(t, err)
	return converter
}

package clients

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
)

var (
	configMaps = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
	templates  = schema.GroupVersionResource{Group: "extensions.agents.x-k8s.io", Version: "v1beta1", Resource: "sandboxtemplates"}
)

func TestTypedInformersFollowBuiltInKinds(t *testing.T) {
	ctx, config := connect(t)
	client := kubernetes.NewForConfigOrDie(binary(config))
	place := namespace(ctx, t, client)
	_, err := client.CoreV1().ConfigMaps(place).Create(ctx, configMap("before", map[string]string{"a": "1"}), metav1.CreateOptions{})
	must(t, err)

	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(place))
	lister := factory.Core().V1().ConfigMaps().Lister().ConfigMaps(place)
	informer := factory.Core().V1().ConfigMaps().Informer()
	factory.Start(ctx.Done())
	for kind, synced := range factory.WaitForCacheSync(ctx.Done()) {
		if !synced {
			t.Fatalf("%v is not synced", kind)
		}
	}
	if found, err := lister.Get("before"); err != nil || found.Data["a"] != "1" {
		t.Fatalf("what was there before: %v, %v", found, err)
	}

	made, err := client.CoreV1().ConfigMaps(place).Create(ctx, configMap("after", nil), metav1.CreateOptions{})
	must(t, err)
	until(ctx, t, "the new one is seen", func() bool { _, err := lister.Get("after"); return err == nil })
	made.Data = map[string]string{"b": "2"}
	_, err = client.CoreV1().ConfigMaps(place).Update(ctx, made, metav1.UpdateOptions{})
	must(t, err)
	until(ctx, t, "the change is seen", func() bool {
		found, err := lister.Get("after")
		return err == nil && found.Data["b"] == "2"
	})
	must(t, client.CoreV1().ConfigMaps(place).Delete(ctx, "after", metav1.DeleteOptions{}))
	until(ctx, t, "the deletion is seen", func() bool { _, exists, _ := informer.GetStore().GetByKey(place + "/after"); return !exists })
}

func TestDynamicInformersFollowCustomKinds(t *testing.T) {
	ctx, config := connect(t)
	place := namespace(ctx, t, kubernetes.NewForConfigOrDie(config))
	client := dynamic.NewForConfigOrDie(config)
	factory := dynamicinformer.NewFilteredDynamicSharedInformerFactory(client, 0, place, nil)
	lister := factory.ForResource(templates).Lister().ByNamespace(place)
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())

	object := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
		"metadata": map[string]any{"name": "one"},
		"spec": map[string]any{"podTemplate": map[string]any{"spec": map[string]any{
			"containers": []any{map[string]any{"name": "main", "image": "host"}}}}},
	}}
	_, err := client.Resource(templates).Namespace(place).Create(ctx, object, metav1.CreateOptions{FieldValidation: "Strict"})
	must(t, err)
	until(ctx, t, "the template is seen", func() bool { _, err := lister.Get("one"); return err == nil })
	must(t, client.Resource(templates).Namespace(place).Delete(ctx, "one", metav1.DeleteOptions{}))
	until(ctx, t, "the deletion is seen", func() bool { _, err := lister.Get("one"); return err != nil })
}

func TestMetadataInformersCarryNoMore(t *testing.T) {
	ctx, config := connect(t)
	typed := kubernetes.NewForConfigOrDie(config)
	place := namespace(ctx, t, typed)
	_, err := typed.CoreV1().ConfigMaps(place).Create(ctx, configMap("first", map[string]string{"a": "1"}), metav1.CreateOptions{})
	must(t, err)
	factory := metadatainformer.NewFilteredSharedInformerFactory(metadata.NewForConfigOrDie(config), 0, place, nil)
	lister := factory.ForResource(configMaps).Lister().ByNamespace(place)
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	for _, name := range []string{"first", "second"} {
		until(ctx, t, name+" is seen", func() bool {
			found, err := lister.Get(name)
			if err != nil {
				return false
			}
			partial, ok := found.(*metav1.PartialObjectMetadata)
			return ok && partial.UID != "" && partial.Labels["app"] == name
		})
		if name == "first" {
			_, err = typed.CoreV1().ConfigMaps(place).Create(ctx, configMap("second", nil), metav1.CreateOptions{})
			must(t, err)
		}
	}
	client := metadata.NewForConfigOrDie(config)
	must(t, client.Resource(configMaps).Namespace(place).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "app=first"}))
	until(ctx, t, "the deletion is seen", func() bool { _, err := lister.Get("first"); return err != nil })
}

func TestListsComeInPages(t *testing.T) {
	ctx, config := connect(t)
	client := kubernetes.NewForConfigOrDie(binary(config))
	place := namespace(ctx, t, client)
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		_, err := client.CoreV1().Secrets(place).Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		must(t, err)
	}
	seen, next := "", ""
	for {
		page, err := client.CoreV1().Secrets(place).List(ctx, metav1.ListOptions{Limit: 2, Continue: next})
		must(t, err)
		for _, item := range page.Items {
			seen += item.Name
		}
		if next = page.Continue; next == "" {
			break
		}
	}
	if seen != "abcde" {
		t.Fatalf("pages hold %q", seen)
	}
}

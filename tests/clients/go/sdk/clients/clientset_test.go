package clients

import (
	"context"
	"os"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	sandbox "sigs.k8s.io/agent-sandbox/api/v1alpha1"
	sandboxes "sigs.k8s.io/agent-sandbox/clients/k8s/clientset/versioned"
	extensionset "sigs.k8s.io/agent-sandbox/clients/k8s/extensions/clientset/versioned"
	extensioninformers "sigs.k8s.io/agent-sandbox/clients/k8s/extensions/informers/externalversions"
	extensions "sigs.k8s.io/agent-sandbox/extensions/api/v1alpha1"
)

func config(t *testing.T) *rest.Config {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	must(t, err)
	return config
}

// ownNamespace makes a namespace that is deleted after the test.
func ownNamespace(ctx context.Context, t *testing.T) string {
	t.Helper()
	client, err := kubernetes.NewForConfig(config(t))
	must(t, err)
	made, err := client.CoreV1().Namespaces().Create(ctx, &core.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "typed-alpha-"},
	}, metav1.CreateOptions{})
	must(t, err)
	t.Cleanup(func() {
		_ = client.CoreV1().Namespaces().Delete(context.Background(), made.Name, metav1.DeleteOptions{})
	})
	return made.Name
}

func sleeper() core.PodSpec {
	return core.PodSpec{Containers: []core.Container{{Name: "main", Image: "host", Command: []string{"sleep", "infinity"}}}}
}

func TestATypedClientCreatesWatchesAndScalesASandbox(t *testing.T) {
	ctx := within(t)
	client, err := sandboxes.NewForConfig(config(t))
	must(t, err)
	objects := client.AgentsV1alpha1().Sandboxes(ownNamespace(ctx, t))
	made := &sandbox.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: "typed"}}
	made.Spec.PodTemplate.Spec = sleeper()
	created, err := objects.Create(ctx, made, metav1.CreateOptions{})
	must(t, err)
	events, err := objects.Watch(ctx, metav1.ListOptions{ResourceVersion: created.ResourceVersion})
	must(t, err)
	defer events.Stop()
	until := func(what string, holds func(watch.Event) bool) {
		t.Helper()
		for {
			select {
			case event, open := <-events.ResultChan():
				if !open {
					t.Fatalf("the watch ended before %s", what)
				}
				if holds(event) {
					return
				}
			case <-ctx.Done():
				t.Fatalf("not in time: %s", what)
			}
		}
	}
	until("the sandbox is ready", func(event watch.Event) bool {
		seen := event.Object.(*sandbox.Sandbox)
		return meta.IsStatusConditionTrue(seen.Status.Conditions, string(sandbox.SandboxConditionReady)) && seen.Status.Replicas == 1
	})
	_, err = objects.Patch(ctx, "typed", types.MergePatchType, []byte(`{"spec": {"replicas": 0}}`), metav1.PatchOptions{})
	must(t, err)
	until("the sandbox has no pod", func(event watch.Event) bool {
		return event.Object.(*sandbox.Sandbox).Status.Replicas == 0
	})
	must(t, objects.Delete(ctx, "typed", metav1.DeleteOptions{}))
	until("the sandbox is gone", func(event watch.Event) bool { return event.Type == watch.Deleted })
}

func TestATypedClientClaimsFromATemplate(t *testing.T) {
	ctx := within(t)
	space := ownNamespace(ctx, t)
	client, err := extensionset.NewForConfig(config(t))
	must(t, err)
	factory := extensioninformers.NewSharedInformerFactoryWithOptions(client, 0, extensioninformers.WithNamespace(space))
	lister := factory.Extensions().V1alpha1().SandboxClaims().Lister().SandboxClaims(space)
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	kinds := client.ExtensionsV1alpha1()

	template := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Name: "typed"}}
	template.Spec.PodTemplate.Spec = sleeper()
	_, err = kinds.SandboxTemplates(space).Create(ctx, template, metav1.CreateOptions{})
	must(t, err)
	warm := &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{Name: "typed"}}
	warm.Spec.Replicas = 1
	warm.Spec.TemplateRef.Name = template.Name
	_, err = kinds.SandboxWarmPools(space).Create(ctx, warm, metav1.CreateOptions{})
	must(t, err)
	claim := &extensions.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Name: "typed"}}
	claim.Spec.TemplateRef.Name = template.Name
	_, err = kinds.SandboxClaims(space).Create(ctx, claim, metav1.CreateOptions{})
	must(t, err)
	for {
		seen, err := lister.Get("typed")
		if err == nil && seen.Status.SandboxStatus.Name != "" && meta.IsStatusConditionTrue(seen.Status.Conditions, "Ready") {
			break
		}
		if ctx.Err() != nil {
			t.Fatalf("the claim is not ready: %+v, %v", seen, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
	must(t, kinds.SandboxClaims(space).Delete(ctx, "typed", metav1.DeleteOptions{}))
}

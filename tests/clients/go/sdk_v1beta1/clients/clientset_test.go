package clients

import (
	"context"
	"testing"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	sandboxalpha "sigs.k8s.io/agent-sandbox/api/v1alpha1"
	sandbox "sigs.k8s.io/agent-sandbox/api/v1beta1"
	sandboxes "sigs.k8s.io/agent-sandbox/clients/k8s/clientset/versioned"
	extensionset "sigs.k8s.io/agent-sandbox/clients/k8s/extensions/clientset/versioned"
	extensioninformers "sigs.k8s.io/agent-sandbox/clients/k8s/extensions/informers/externalversions"
	informers "sigs.k8s.io/agent-sandbox/clients/k8s/informers/externalversions"
	extensions "sigs.k8s.io/agent-sandbox/extensions/api/v1beta1"
)

// ownNamespace makes a namespace that is deleted after the test.
func ownNamespace(ctx context.Context, t *testing.T) string {
	t.Helper()
	client, err := kubernetes.NewForConfig(config(t))
	must(t, err)
	made, err := client.CoreV1().Namespaces().Create(ctx, &core.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "typed-"},
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

// observe starts an informer and returns a function that waits until a condition holds after one of its events, or at the start.
func observe(ctx context.Context, t *testing.T, informer cache.SharedIndexInformer) func(what string, holds func() bool) {
	t.Helper()
	events := make(chan struct{}, 1)
	notify := func() {
		select {
		case events <- struct{}{}:
		default:
		}
	}
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { notify() },
		UpdateFunc: func(_, _ any) { notify() },
		DeleteFunc: func(any) { notify() },
	})
	must(t, err)
	go informer.RunWithContext(ctx)
	return func(what string, holds func() bool) {
		t.Helper()
		for !holds() {
			select {
			case <-events:
			case <-ctx.Done():
				t.Fatalf("not in time: %s", what)
			}
		}
	}
}

func TestTheTypedClientsOfSandboxesCreateWatchChangeAndDelete(t *testing.T) {
	ctx := within(t)
	space := ownNamespace(ctx, t)
	client, err := sandboxes.NewForConfig(config(t))
	must(t, err)
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(space))
	watched := factory.Agents().V1beta1().Sandboxes()
	until := observe(ctx, t, watched.Informer())
	lister := watched.Lister().Sandboxes(space)

	objects := client.AgentsV1beta1().Sandboxes(space)
	made := &sandbox.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: "typed", Labels: map[string]string{"team": "blue"}}}
	made.Spec.PodTemplate.Spec = sleeper()
	_, err = objects.Create(ctx, made, metav1.CreateOptions{})
	must(t, err)
	until("the sandbox is ready", func() bool {
		seen, err := lister.Get("typed")
		return err == nil && meta.IsStatusConditionTrue(seen.Status.Conditions, string(sandbox.SandboxConditionReady))
	})

	// The older generation of the same object.
	old, err := client.AgentsV1alpha1().Sandboxes(space).Get(ctx, "typed", metav1.GetOptions{})
	must(t, err)
	if !meta.IsStatusConditionTrue(old.Status.Conditions, string(sandboxalpha.SandboxConditionReady)) {
		t.Fatalf("%+v", old.Status)
	}

	suspend := []byte(`{"spec": {"operatingMode": "Suspended"}}`)
	_, err = objects.Patch(ctx, "typed", types.MergePatchType, suspend, metav1.PatchOptions{})
	must(t, err)
	until("the sandbox is suspended", func() bool {
		seen, err := lister.Get("typed")
		return err == nil && meta.IsStatusConditionTrue(seen.Status.Conditions, string(sandbox.SandboxConditionSuspended))
	})

	// A whole object, read and written back, keeps what the server has completed.
	current, err := objects.Get(ctx, "typed", metav1.GetOptions{})
	must(t, err)
	current.Spec.OperatingMode = sandbox.SandboxOperatingModeRunning
	_, err = objects.Update(ctx, current, metav1.UpdateOptions{})
	must(t, err)
	until("the sandbox is ready again", func() bool {
		seen, err := lister.Get("typed")
		return err == nil && meta.IsStatusConditionTrue(seen.Status.Conditions, string(sandbox.SandboxConditionReady))
	})

	listed, err := objects.List(ctx, metav1.ListOptions{LabelSelector: "team=blue"})
	must(t, err)
	if len(listed.Items) != 1 {
		t.Fatalf("%d sandboxes with the label", len(listed.Items))
	}
	must(t, objects.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "team=blue"}))
	until("the sandbox is gone", func() bool {
		_, err := lister.Get("typed")
		return errors.IsNotFound(err)
	})
}

func TestTheTypedClientsOfTheExtensionsClaimFromAPool(t *testing.T) {
	ctx := within(t)
	space := ownNamespace(ctx, t)
	client, err := extensionset.NewForConfig(config(t))
	must(t, err)
	factory := extensioninformers.NewSharedInformerFactoryWithOptions(client, 0, extensioninformers.WithNamespace(space))
	watchedPools := factory.Extensions().V1beta1().SandboxWarmPools()
	untilPool := observe(ctx, t, watchedPools.Informer())
	watchedClaims := factory.Extensions().V1beta1().SandboxClaims()
	untilClaim := observe(ctx, t, watchedClaims.Informer())
	kinds := client.ExtensionsV1beta1()

	template := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Name: "typed"}}
	template.Spec.PodTemplate.Spec = sleeper()
	_, err = kinds.SandboxTemplates(space).Create(ctx, template, metav1.CreateOptions{})
	must(t, err)
	one := int32(1)
	warm := &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{Name: "typed"}}
	warm.Spec.Replicas = &one
	warm.Spec.TemplateRef.Name = template.Name
	_, err = kinds.SandboxWarmPools(space).Create(ctx, warm, metav1.CreateOptions{})
	must(t, err)
	untilPool("the pool is full", func() bool {
		seen, err := watchedPools.Lister().SandboxWarmPools(space).Get("typed")
		return err == nil && seen.Status.ReadyReplicas == 1
	})

	claim := &extensions.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Name: "typed"}}
	claim.Spec.WarmPoolRef.Name = warm.Name
	_, err = kinds.SandboxClaims(space).Create(ctx, claim, metav1.CreateOptions{})
	must(t, err)
	untilClaim("the claim is ready", func() bool {
		seen, err := watchedClaims.Lister().SandboxClaims(space).Get("typed")
		return err == nil && seen.Status.SandboxStatus.Name != "" && meta.IsStatusConditionTrue(seen.Status.Conditions, "Ready")
	})
	old, err := client.ExtensionsV1alpha1().SandboxClaims(space).Get(ctx, "typed", metav1.GetOptions{})
	must(t, err)
	if !meta.IsStatusConditionTrue(old.Status.Conditions, "Ready") {
		t.Fatalf("%+v", old.Status)
	}
	must(t, kinds.SandboxClaims(space).Delete(ctx, "typed", metav1.DeleteOptions{}))
	untilClaim("the claim is gone", func() bool {
		left, err := watchedClaims.Lister().SandboxClaims(space).List(labels.Everything())
		return err == nil && len(left) == 0
	})
}

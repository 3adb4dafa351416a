package clients

import (
	"context"
	"testing"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

const finalizer = "example.com/cleaned-up"

// copier keeps a Secret for each ConfigMap, and a ConfigMap until it has cleaned up after it.
type copier struct {
	client  client.Client
	cleaned chan string
}

func (c *copier) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	var source corev1.ConfigMap
	if err := c.client.Get(ctx, request.NamespacedName, &source); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !source.DeletionTimestamp.IsZero() {
		if controllerutil.RemoveFinalizer(&source, finalizer) {
			if err := c.client.Update(ctx, &source); err != nil {
				return ctrl.Result{}, err
			}
			c.cleaned <- source.Name
		}
		return ctrl.Result{}, nil
	}
	if source.Name == "kube-root-ca.crt" {
		return ctrl.Result{}, nil
	}
	if controllerutil.AddFinalizer(&source, finalizer) {
		return ctrl.Result{}, c.client.Update(ctx, &source)
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: source.Name, Namespace: source.Namespace}}
	_, err := controllerutil.CreateOrPatch(ctx, c.client, secret, func() error {
		secret.Data = map[string][]byte{}
		for key, value := range source.Data {
			secret.Data[key] = []byte(value)
		}
		return controllerutil.SetControllerReference(&source, secret, scheme.Scheme)
	})
	return ctrl.Result{}, err
}

func TestAManagerReconciles(t *testing.T) {
	ctx, config := connect(t)
	typed := kubernetes.NewForConfigOrDie(config)
	place := namespace(ctx, t, typed)
	ctrl.SetLogger(logr.Discard())
	manager, err := ctrl.NewManager(config, ctrl.Options{
		Metrics:                       server.Options{BindAddress: "0"},
		LeaderElection:                true,
		LeaderElectionID:              "copier",
		LeaderElectionNamespace:       place,
		LeaderElectionReleaseOnCancel: true,
		Cache:                         cache.Options{DefaultNamespaces: map[string]cache.Config{place: {}}},
	})
	must(t, err)
	reconciler := &copier{client: manager.GetClient(), cleaned: make(chan string, 1)}
	must(t, ctrl.NewControllerManagedBy(manager).For(&corev1.ConfigMap{}).Owns(&corev1.Secret{}).Complete(reconciler))
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- manager.Start(running) }()
	defer func() {
		stop()
		must(t, <-ended)
	}()

	maps, secrets := typed.CoreV1().ConfigMaps(place), typed.CoreV1().Secrets(place)
	_, err = maps.Create(ctx, configMap("one", map[string]string{"key": "value"}), metav1.CreateOptions{})
	must(t, err)
	holds := func(value string) func() bool {
		return func() bool {
			secret, err := secrets.Get(ctx, "one", metav1.GetOptions{})
			return err == nil && string(secret.Data["key"]) == value
		}
	}
	until(ctx, t, "the secret is made", holds("value"))
	must(t, secrets.Delete(ctx, "one", metav1.DeleteOptions{}))
	until(ctx, t, "the secret is made again", holds("value"))
	changed, err := maps.Get(ctx, "one", metav1.GetOptions{})
	must(t, err)
	changed.Data["key"] = "other"
	_, err = maps.Update(ctx, changed, metav1.UpdateOptions{})
	must(t, err)
	until(ctx, t, "the secret follows", holds("other"))

	must(t, maps.Delete(ctx, "one", metav1.DeleteOptions{}))
	select {
	case <-reconciler.cleaned:
	case <-ctx.Done():
		t.Fatal("the finalizer was never seen to")
	}
	until(ctx, t, "the secret goes with its owner", func() bool {
		_, err := secrets.Get(ctx, "one", metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
}

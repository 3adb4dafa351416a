// Package clients has Go's own Kubernetes libraries do what controllers do, against the server that KUBECONFIG names.
package clients

import (
	"context"
	"os"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const deadline = 3 * time.Minute

// connect returns the settings of a client and a context that ends with the test's deadline.
func connect(t *testing.T) (context.Context, *rest.Config) {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		t.Fatalf("KUBECONFIG: %v", err)
	}
	// The server bounds what it takes on; a client need not.
	config.QPS = -1
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	t.Cleanup(cancel)
	return ctx, config
}

// binary makes a client send protobuf bodies, as controllers do for built-in kinds.
func binary(config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	return config
}

// namespace makes one for the test, and deletes it at its end.
func namespace(ctx context.Context, t *testing.T, client kubernetes.Interface) string {
	t.Helper()
	wanted := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "go-clients-"}}
	made, err := client.CoreV1().Namespaces().Create(ctx, wanted, metav1.CreateOptions{})
	must(t, err)
	t.Cleanup(func() {
		err := client.CoreV1().Namespaces().Delete(context.Background(), made.Name, metav1.DeleteOptions{})
		if err != nil {
			t.Errorf("deleting namespace %s: %v", made.Name, err)
		}
	})
	return made.Name
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// until waits for a condition, which is asked again every few milliseconds.
func until(ctx context.Context, t *testing.T, what string, condition func() bool) {
	t.Helper()
	for !condition() {
		select {
		case <-ctx.Done():
			t.Fatalf("not in time: %s", what)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func configMap(name string, data map[string]string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}}, Data: data}
}

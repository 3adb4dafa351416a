// Package clients tests the published Go SDK and typed clients of the v1beta1 generation, unmodified, against the system that KUBECONFIG
// names.
package clients

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	sdk "sigs.k8s.io/agent-sandbox/clients/go/sandbox"
)

const (
	namespace = "default"
	pool      = "python-warmpool"
	deadline  = 3 * time.Minute
)

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	t.Cleanup(cancel)
	return ctx
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func config(t *testing.T) *rest.Config {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	must(t, err)
	return config
}

func client(ctx context.Context, t *testing.T, options sdk.Options) *sdk.Client {
	t.Helper()
	client, err := sdk.NewClient(ctx, options)
	must(t, err)
	t.Cleanup(func() { client.DeleteAll(context.Background()) })
	return client
}

func TestASandboxOfAPoolRunsCommandsAndKeepsFiles(t *testing.T) {
	gateway := startGateway(t)
	connections := map[string]sdk.Options{
		"tunnel":  {Quiet: true},
		"direct":  {Quiet: true, APIURL: os.Getenv("ROUTER_URL")},
		"gateway": {Quiet: true, GatewayName: gateway, GatewayNamespace: namespace},
	}
	for name, options := range connections {
		t.Run(name, func(t *testing.T) {
			ctx := within(t)
			box, err := client(ctx, t, options).CreateSandbox(ctx, pool, namespace)
			must(t, err)
			if !box.IsReady() || box.PodName() == "" || box.PodIP() == "" {
				t.Fatalf("not ready: pod %q at %q", box.PodName(), box.PodIP())
			}
			result, err := box.Run(ctx, `python3 -c "import sys; print(6*7); print('oh', file=sys.stderr); sys.exit(3)"`)
			must(t, err)
			if result.Stdout != "42\n" || result.Stderr != "oh\n" || result.ExitCode != 3 {
				t.Fatalf("%+v", result)
			}
			content := bytes.Repeat([]byte("line\x00\xff\n"), 10_000)
			must(t, box.Write(ctx, "data.bin", content))
			read, err := box.Read(ctx, "data.bin")
			must(t, err)
			if !bytes.Equal(read, content) {
				t.Fatalf("%d bytes were written, %d others were read", len(content), len(read))
			}
			exists, err := box.Exists(ctx, "nothing.txt")
			must(t, err)
			if exists {
				t.Fatal("nothing.txt exists")
			}
			var refused *sdk.HTTPError
			if _, err = box.Read(ctx, "nothing.txt"); !errors.As(err, &refused) || refused.StatusCode != 404 {
				t.Fatalf("reading what is not there: %v", err)
			}
		})
	}
}

func TestASandboxIsTakenUpAgainAndGoneOnceItIsDeleted(t *testing.T) {
	ctx := within(t)
	direct := sdk.Options{Quiet: true, APIURL: os.Getenv("ROUTER_URL")}
	box, err := client(ctx, t, direct).CreateSandbox(ctx, pool, namespace)
	must(t, err)
	must(t, box.Write(ctx, "note", []byte("still here")))

	second := client(ctx, t, direct)
	again, err := second.GetSandbox(ctx, box.ClaimName(), namespace)
	must(t, err)
	note, err := again.Read(ctx, "note")
	must(t, err)
	if again.SandboxName() != box.SandboxName() || string(note) != "still here" {
		t.Fatalf("%s became %s with %q", box.SandboxName(), again.SandboxName(), note)
	}
	must(t, second.DeleteSandbox(ctx, box.ClaimName(), namespace))
	claims, err := second.ListAllSandboxes(ctx, namespace)
	must(t, err)
	if slices.Contains(claims, box.ClaimName()) {
		t.Fatalf("%s is still there", box.ClaimName())
	}
}

func TestAPoolThatIsMissingIsAnError(t *testing.T) {
	ctx := within(t)
	client := client(ctx, t, sdk.Options{Quiet: true, APIURL: os.Getenv("ROUTER_URL"), SandboxReadyTimeout: 3 * time.Second})
	if box, err := client.CreateSandbox(ctx, "no-such-pool", namespace); err == nil {
		t.Fatalf("a sandbox of no pool: %s", box.ClaimName())
	}
}

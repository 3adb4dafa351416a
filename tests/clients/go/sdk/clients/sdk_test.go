// Package clients tests the published Go SDK, unmodified, against the system that KUBECONFIG names.
package clients

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	sdk "sigs.k8s.io/agent-sandbox/clients/go/sandbox"
)

const (
	namespace = "default"
	template  = "python-runtime-template"
	deadline  = 3 * time.Minute
)

// connections are the ways to the router: a tunnel through the API server, which is what the SDK does by itself, and the router's URL.
var connections = map[string]func() sdk.Options{
	"tunnel": func() sdk.Options { return sdk.Options{TemplateName: template, Quiet: true} },
	"direct": func() sdk.Options {
		return sdk.Options{TemplateName: template, Quiet: true, APIURL: os.Getenv("ROUTER_URL")}
	},
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	t.Cleanup(cancel)
	return ctx
}

func client(ctx context.Context, t *testing.T, options sdk.Options) *sdk.Client {
	t.Helper()
	client, err := sdk.NewClient(ctx, options)
	must(t, err)
	t.Cleanup(func() { client.DeleteAll(context.Background()) })
	return client
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestASandboxRunsCommandsAndKeepsFiles(t *testing.T) {
	for name, options := range connections {
		t.Run(name, func(t *testing.T) {
			ctx := within(t)
			box, err := client(ctx, t, options()).CreateSandbox(ctx, template, namespace)
			must(t, err)
			if !box.IsReady() || box.PodName() == "" || box.SandboxName() == "" {
				t.Fatalf("not ready: pod %q, sandbox %q", box.PodName(), box.SandboxName())
			}

			result, err := box.Run(ctx, `python3 -c "import sys; print(6*7); print('oh', file=sys.stderr); sys.exit(3)"`)
			must(t, err)
			if *result != (sdk.ExecutionResult{Stdout: "42\n", Stderr: "oh\n", ExitCode: 3}) {
				t.Fatalf("%+v", result)
			}

			content := bytes.Repeat([]byte("line\x00\xff\n"), 100_000)
			must(t, box.Write(ctx, "data.bin", content))
			read, err := box.Read(ctx, "data.bin")
			must(t, err)
			if !bytes.Equal(read, content) {
				t.Fatalf("%d bytes were written, %d others were read", len(content), len(read))
			}
			_, err = box.Run(ctx, "mkdir a-directory")
			must(t, err)
			entries, err := box.List(ctx, ".")
			must(t, err)
			kinds := map[string]sdk.FileType{}
			for _, entry := range entries {
				kinds[entry.Name] = entry.Type
			}
			if kinds["data.bin"] != sdk.FileTypeFile || kinds["a-directory"] != sdk.FileTypeDirectory {
				t.Fatalf("%+v", entries)
			}
			for path, want := range map[string]bool{"data.bin": true, "nothing.txt": false} {
				exists, err := box.Exists(ctx, path)
				must(t, err)
				if exists != want {
					t.Fatalf("%s exists: %v", path, exists)
				}
			}
			var refused *sdk.HTTPError
			if _, err = box.Read(ctx, "nothing.txt"); !errors.As(err, &refused) || refused.StatusCode != 404 {
				t.Fatalf("reading what is not there: %v", err)
			}
		})
	}
}

func TestAClosedSandboxIsGone(t *testing.T) {
	ctx := within(t)
	client := client(ctx, t, connections["tunnel"]())
	box, err := client.CreateSandbox(ctx, template, namespace)
	must(t, err)
	claim := box.ClaimName()
	claims, err := client.ListAllSandboxes(ctx, namespace)
	must(t, err)
	if !slices.Contains(claims, claim) {
		t.Fatalf("%s is not among %v", claim, claims)
	}

	must(t, box.Close(ctx))
	if _, err := box.Run(ctx, "true"); !errors.Is(err, sdk.ErrNotReady) {
		t.Fatalf("a command in a closed sandbox: %v", err)
	}
	claims, err = client.ListAllSandboxes(ctx, namespace)
	must(t, err)
	if slices.Contains(claims, claim) {
		t.Fatalf("%s is still there", claim)
	}
	if _, err := client.GetSandbox(ctx, claim, namespace); err == nil {
		t.Fatal("a closed sandbox was taken up again")
	}
}

func TestASandboxIsTakenUpAgain(t *testing.T) {
	ctx := within(t)
	first := client(ctx, t, connections["tunnel"]())
	box, err := first.CreateSandbox(ctx, template, namespace)
	must(t, err)
	must(t, box.Write(ctx, "note", []byte("still here")))

	// By the handle that let go of it.
	must(t, box.Disconnect(ctx))
	if box.IsReady() {
		t.Fatal("disconnected, and ready")
	}
	must(t, box.Open(ctx))
	note, err := box.Read(ctx, "note")
	must(t, err)
	if string(note) != "still here" {
		t.Fatalf("%q", note)
	}

	// By its name, from another client.
	second := client(ctx, t, connections["direct"]())
	again, err := second.GetSandbox(ctx, box.ClaimName(), namespace)
	must(t, err)
	if again.SandboxName() != box.SandboxName() {
		t.Fatalf("%s became %s", box.SandboxName(), again.SandboxName())
	}
	note, err = again.Read(ctx, "note")
	must(t, err)
	if string(note) != "still here" {
		t.Fatalf("%q", note)
	}
	must(t, second.DeleteSandbox(ctx, box.ClaimName(), namespace))
}

func TestATemplateThatIsNotThereIsAnError(t *testing.T) {
	ctx := within(t)
	options := connections["direct"]()
	options.SandboxReadyTimeout = 3 * time.Second
	client := client(ctx, t, options)
	before, err := client.ListAllSandboxes(ctx, namespace)
	must(t, err)
	if _, err := client.CreateSandbox(ctx, "no-such-template", namespace); err == nil {
		t.Fatal("a sandbox of nothing")
	}
	// What was begun is taken back.
	after, err := client.ListAllSandboxes(ctx, namespace)
	must(t, err)
	if len(after) > len(before) {
		t.Fatalf("left behind: %v, and before there was %v", after, before)
	}
}

func TestTheTraceOfTheClientIsCarriedToTheCommand(t *testing.T) {
	ctx := within(t)
	spans := tracetest.NewInMemoryExporter()
	options := connections["direct"]()
	options.TracerProvider = trace.NewTracerProvider(trace.WithSyncer(spans))
	box, err := client(ctx, t, options).CreateSandbox(ctx, template, namespace)
	must(t, err)
	result, err := box.Run(ctx, "sh -c 'echo $TRACEPARENT'")
	must(t, err)
	must(t, box.Close(ctx))
	for _, span := range spans.GetSpans() {
		if span.Name == "sandbox-client.run" {
			if !strings.Contains(result.Stdout, span.SpanContext.TraceID().String()) {
				t.Fatalf("the command got %q in trace %s", result.Stdout, span.SpanContext.TraceID())
			}
			return
		}
	}
	t.Fatal("the SDK made no span of the command")
}

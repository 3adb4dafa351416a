package clients

import (
	"context"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

func TestLeadersFollowOneAnother(t *testing.T) {
	ctx, config := connect(t)
	client := kubernetes.NewForConfigOrDie(config)
	place := namespace(ctx, t, client)
	leads := make(chan string, 4)
	candidate := func(ctx context.Context, name string) <-chan struct{} {
		lock := &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Name: "leader", Namespace: place},
			Client:     client.CoordinationV1(),
			LockConfig: resourcelock.ResourceLockConfig{Identity: name},
		}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			leaderelection.RunOrDie(ctx, leaderelection.LeaderElectionConfig{
				Lock: lock, ReleaseOnCancel: true,
				LeaseDuration: 15 * time.Second, RenewDeadline: 10 * time.Second, RetryPeriod: 100 * time.Millisecond,
				Callbacks: leaderelection.LeaderCallbacks{
					OnStartedLeading: func(ctx context.Context) { leads <- name; <-ctx.Done() },
					OnStoppedLeading: func() {},
				},
			})
		}()
		return ended
	}
	next := func(wanted string) {
		t.Helper()
		select {
		case found := <-leads:
			if found != wanted {
				t.Fatalf("%s leads, not %s", found, wanted)
			}
		case <-ctx.Done():
			t.Fatalf("%s never led", wanted)
		}
	}

	first, stop := context.WithCancel(ctx)
	firstEnded := candidate(first, "first")
	next("first")
	second, stopSecond := context.WithCancel(ctx)
	secondEnded := candidate(second, "second")
	stop()
	<-firstEnded
	next("second")
	lease, err := client.CoordinationV1().Leases(place).Get(ctx, "leader", metav1.GetOptions{})
	must(t, err)
	if lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity != "second" || *lease.Spec.LeaseTransitions < 1 {
		t.Fatalf("lease: %+v", lease.Spec)
	}
	stopSecond()
	<-secondEnded
}

package clients

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"
)

// A pod is the kind whose update may change least: whatever an encoding adds to its spec or loses of it is refused.
func TestPodsAreUpdatedInEitherEncodingWhicheverMadeThem(t *testing.T) {
	ctx, config := connect(t)
	asJSON, asProtobuf := kubernetes.NewForConfigOrDie(config), kubernetes.NewForConfigOrDie(binary(config))
	place := namespace(ctx, t, asJSON)
	encodings := map[string]*kubernetes.Clientset{"json": asJSON, "protobuf": asProtobuf}
	for made, maker := range encodings {
		for changed, changer := range encodings {
			wanted := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: made + "-" + changed},
				Spec: corev1.PodSpec{
					// Stays as it is: no node has the label.
					NodeSelector: map[string]string{"example.com/absent": "true"},
					Containers: []corev1.Container{{
						Name: "main", Image: "host", Command: []string{"true"},
						ReadinessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}},
						VolumeMounts:   []corev1.VolumeMount{{Name: "scratch", MountPath: "/scratch"}},
					}},
					Volumes: []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}},
				},
			}
			_, err := maker.CoreV1().Pods(place).Create(ctx, wanted, metav1.CreateOptions{})
			must(t, err)
			pods := changer.CoreV1().Pods(place)
			// The scheduler writes that no node fits, between two requests of ours.
			err = retry.RetryOnConflict(retry.DefaultRetry, func() error {
				pod, err := pods.Get(ctx, wanted.Name, metav1.GetOptions{})
				if err != nil {
					return err
				}
				pod.Labels = map[string]string{"changed-by": changed}
				updated, err := pods.Update(ctx, pod, metav1.UpdateOptions{})
				if err == nil && (updated.Labels["changed-by"] != changed || updated.Generation != pod.Generation) {
					t.Errorf("made by %s, changed by %s: labels %v, generation %d after %d", made, changed, updated.Labels, updated.Generation, pod.Generation)
				}
				return err
			})
			if err != nil {
				t.Errorf("made by %s, changed by %s: %v", made, changed, err)
			}
		}
	}
}

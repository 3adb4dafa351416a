{{/*
The flags of the controller: one line for each value that is set. `false` is left out where it is the controller's own default,
which is everywhere but for leaderElect. Whole numbers go through int64, or a large one would be written as 1e+06.
*/}}
{{- define "agent-sandbox.controllerArgs" -}}
{{- $controller := .Values.controller }}
{{- $text := list
  (list "leaderElect" "leader-elect")
  (list "leaderElectionNamespace" "leader-election-namespace")
  (list "clusterDomain" "cluster-domain")
  (list "extensions" "extensions")
  (list "enableTracing" "enable-tracing")
  (list "enablePprof" "enable-pprof")
  (list "enablePprofDebug" "enable-pprof-debug")
  (list "kubeApiQps" "kube-api-qps") }}
{{- $whole := list
  (list "pprofBlockProfileRate" "pprof-block-profile-rate")
  (list "pprofMutexProfileFraction" "pprof-mutex-profile-fraction")
  (list "kubeApiBurst" "kube-api-burst")
  (list "sandboxConcurrentWorkers" "sandbox-concurrent-workers")
  (list "sandboxClaimConcurrentWorkers" "sandbox-claim-concurrent-workers")
  (list "sandboxWarmPoolConcurrentWorkers" "sandbox-warm-pool-concurrent-workers")
  (list "sandboxTemplateConcurrentWorkers" "sandbox-template-concurrent-workers") }}
{{- range $text }}
{{- $value := get $controller (first .) }}
{{- if and (hasKey $controller (first .)) (not (kindIs "invalid" $value)) (ne (toString $value) "") (or (ne (toString $value) "false") (eq (first .) "leaderElect")) }}
- --{{ last . }}={{ $value }}
{{- end }}
{{- end }}
{{- range $whole }}
{{- $value := get $controller (first .) }}
{{- if and (hasKey $controller (first .)) (not (kindIs "invalid" $value)) }}
- --{{ last . }}={{ int64 $value }}
{{- end }}
{{- end }}
{{- range $controller.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* The chart's name, or its override. */}}
{{- define "agent-sandbox.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* The namespace of every object. */}}
{{- define "agent-sandbox.namespace" -}}
{{- default .Release.Namespace .Values.namespace.name }}
{{- end }}

{{/* The selector labels of the Deployment and the Service: none that changes with a release, since a selector is immutable. */}}
{{- define "agent-sandbox.selectorLabels" -}}
app.kubernetes.io/name: {{ include "agent-sandbox.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "agent-sandbox.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "agent-sandbox.selectorLabels" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.image.tag }}
app.kubernetes.io/version: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "agent-sandbox.image" -}}
{{- $repository := required "image.repository is required: set it to where your image of this controller is, for example registry.example/agent-sandbox-controller" .Values.image.repository }}
{{- printf "%s:%s" $repository (required "image.tag is required: set it to the release to run" .Values.image.tag) }}
{{- end }}

{{/* Labels of monitoring objects, including those by which a monitoring stack selects them; the chart's own take precedence. */}}
{{- define "agent-sandbox.monitoringLabels" -}}
{{- toYaml (merge (dict) (include "agent-sandbox.labels" .root | fromYaml) (default (dict) .labels)) }}
{{- end }}

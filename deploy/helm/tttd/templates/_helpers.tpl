{{- define "tttd.fullname" -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels of every object. */}}
{{- define "tttd.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ default .Chart.AppVersion .Values.image.tag | quote }}
{{- end -}}

{{/* Labels that select a role's pods: dict "root" . "role" ROLE */}}
{{- define "tttd.selector" -}}
app.kubernetes.io/name: tttd
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{/* Image of a role. The embedded engine runs in the trainer's image. */}}
{{- define "tttd.image" -}}
{{- $target := .role -}}
{{- if and (eq .role "engine") (eq .config.kind "embedded") -}}{{- $target = "train" -}}{{- end -}}
{{ .root.Values.image.registry }}/tttd-{{ $target }}:{{ default .root.Chart.AppVersion .root.Values.image.tag }}
{{- end -}}

{{/* Environment of a role: Temporal's own variables, the store, what the role alone needs. */}}
{{- define "tttd.env" -}}
{{- $values := .root.Values -}}
- name: TEMPORAL_ADDRESS
  value: {{ $values.temporal.address | quote }}
- name: TEMPORAL_NAMESPACE
  value: {{ $values.temporal.namespace | quote }}
{{- if $values.temporal.tls.enabled }}
- name: TEMPORAL_TLS
  value: "true"
{{- with $values.temporal.tls.serverName }}
- name: TEMPORAL_TLS_SERVER_NAME
  value: {{ . | quote }}
{{- end }}
{{- if $values.temporal.tls.secret }}
- name: TEMPORAL_TLS_SERVER_CA_CERT_PATH
  value: /etc/temporal-tls/ca.crt
- name: TEMPORAL_TLS_CLIENT_CERT_PATH
  value: /etc/temporal-tls/tls.crt
- name: TEMPORAL_TLS_CLIENT_KEY_PATH
  value: /etc/temporal-tls/tls.key
{{- end }}
{{- end }}
{{- with $values.temporal.apiKeySecret }}
- name: TEMPORAL_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: api-key
{{- end }}
- name: TTTD_STORE
  value: {{ $values.store.url | quote }}
{{- with $values.store.endpoint }}
- name: TTTD_S3_ENDPOINT
  value: {{ . | quote }}
{{- end }}
- name: AWS_DEFAULT_REGION
  value: {{ $values.store.region | quote }}
- name: TTTD_LOG_LEVEL
  value: {{ $values.logLevel | quote }}
- name: TTTD_DRAIN_SECONDS
  value: {{ .config.drainSeconds | quote }}
{{- if ne .role "judge" }}
- name: TTTD_MODEL_DIRS
  value: '["/models"]'
{{- end }}
{{- if eq .role "engine" }}
- name: TTTD_ENGINE_KIND
  value: {{ .config.kind | quote }}
- name: TTTD_ENGINE_MODEL
  value: {{ .config.model | quote }}
- name: TTTD_ENGINE_ID
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: TTTD_ENGINE_HOST
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: TTTD_ENGINE_PORT
  value: "30000"
{{- end }}
{{- range $name, $value := .config.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

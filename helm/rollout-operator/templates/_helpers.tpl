{{- define "rollout-operator.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "rollout-operator.fullname" -}}
{{- $name := include "rollout-operator.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "rollout-operator.selectorLabels" -}}
app.kubernetes.io/name: {{ include "rollout-operator.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "rollout-operator.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "rollout-operator.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: rollout-replica
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "rollout-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "rollout-operator.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* The namespaces that are watched, as JSON; empty where the operator is cluster-wide. */}}
{{- define "rollout-operator.namespaces" -}}
{{- if and .Values.clusterWide .Values.watchNamespaces }}
{{- fail "clusterWide and watchNamespaces exclude each other: leave one of them at its default" }}
{{- end }}
{{- if .Values.clusterWide }}
{{- list | toJson }}
{{- else }}
{{- default (list .Release.Namespace) .Values.watchNamespaces | toJson }}
{{- end }}
{{- end }}

{{/* All that the operator may do where it watches. */}}
{{- define "rollout-operator.rules" -}}
- apiGroups: [rollout.dev]
  resources: [rolloutreplicas]
  verbs: [get, list, watch]
- apiGroups: [rollout.dev]
  resources: [rolloutreplicas/status]
  verbs: [patch]
# where the API server asks who may set blockOwnerDeletion
- apiGroups: [rollout.dev]
  resources: [rolloutreplicas/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch]
# no list: one secret's name does not lead to the others
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, get, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}

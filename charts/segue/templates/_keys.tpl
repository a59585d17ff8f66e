{{/* The Secrets of links and clients: a Job makes them in the cluster before an installation or upgrade, so that two renderings
are the same, and another one removes them when the release is gone (shared/local/release_keys.py). Each has an account, a Role
and a way out to the API server that live as long as it does. */}}

{{/* root → a JSON list of the Secrets that are made by the Job; empty: no Job. */}}
{{- define "segue.madeSecrets" -}}
{{- $names := list -}}
{{- if eq .Values.keys.from "hook" -}}
{{- if not .Values.links.routerSecret -}}
{{- $names = append $names (include "segue.linksSecret" (list . "router")) -}}
{{- $names = append $names (include "segue.linksSecret" (list . "worker")) -}}
{{- end -}}
{{- if and .Values.auth.enabled (not .Values.auth.existingSecret) -}}
{{- $names = append $names (include "segue.apiKeysSecret" .) -}}
{{- end -}}
{{- end -}}
{{- toJson $names -}}
{{- end -}}

{{/* (root, name) → the live Secret as JSON, where the manifest has to have it: with keys.from render, or because an older chart
rendered it, and Helm would remove what the manifest has no longer. */}}
{{- define "segue.keptSecret" -}}
{{- $root := index . 0 -}}
{{- $found := lookup "v1" "Secret" $root.Release.Namespace (index . 1) | default dict -}}
{{- $release := dig "metadata" "annotations" "meta.helm.sh/release-name" "" $found -}}
{{- if or (eq $root.Values.keys.from "render") (eq $release $root.Release.Name) -}}{{- toJson $found -}}{{- else -}}{}{{- end -}}
{{- end -}}

{{- define "segue.refuseKeys" -}}
{{- if eq .Values.keys.from "render" -}}
{{- range $name := list (include "segue.linksSecret" (list . "router")) (include "segue.linksSecret" (list . "worker")) (include "segue.apiKeysSecret" .) -}}
{{- $found := lookup "v1" "Secret" $.Release.Namespace $name | default dict -}}
{{- if eq (dig "metadata" "labels" "app.kubernetes.io/managed-by" "" $found) "segue-keys" -}}
{{- fail (printf "keys.from is render, but Secret %s was made by the Job of keys.from hook, and Helm takes over no object that it has not made: leave keys.from at hook" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.rbac.create) (include "segue.madeSecrets" . | fromJsonArray) -}}
{{- fail "rbac.create is false, but the Job of keys.from hook needs a Role to make Secrets: name Secrets of yours in links.routerSecret, links.workerSecret and auth.existingSecret, or set keys.from to render" -}}
{{- end -}}
{{- end -}}

{{/* (root, verb, event, weight, more policies) → metadata of an object of the hook: made anew each time, gone when the Job has succeeded. */}}
{{- define "segue.keysMetadata" -}}
{{- $root := index . 0 -}}
{{- $hook := dict "helm.sh/hook" (index . 2) "helm.sh/hook-weight" (index . 3) "helm.sh/hook-delete-policy" (printf "before-hook-creation,hook-succeeded%s" (index . 4)) "helm.sh/hook-output-log-policy" "hook-failed" -}}
name: {{ include "segue.fullname" $root }}-keys-{{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "segue.labels" (list $root (printf "keys-%s" (index . 1))) | nindent 2 }}
{{ include "segue.annotations" (list $root $hook) }}
{{- end -}}

{{/* (root, verb, event, rules, arguments) → a Job and what it needs. */}}
{{- define "segue.keysJob" -}}
{{- $root := index . 0 -}}{{- $verb := index . 1 -}}
{{- /* The right to make Secrets does not outlive a failed Job, which itself is kept for its log. */ -}}
{{- $metadata := include "segue.keysMetadata" (list $root $verb (index . 2) "-5" ",hook-failed") -}}
{{- $name := printf "%s-keys-%s" (include "segue.fullname" $root) $verb -}}
{{- $component := printf "keys-%s" $verb -}}
{{- $policy := $root.Values.networkPolicy -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- $metadata | nindent 2 }}
automountServiceAccountToken: false
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  {{- $metadata | nindent 2 }}
rules:
  {{- index . 3 | toYaml | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  {{- $metadata | nindent 2 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ $name }}
subjects:
  - kind: ServiceAccount
    name: {{ $name }}
    namespace: {{ $root.Release.Namespace }}
{{- if $policy.enabled }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- $metadata | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "segue.selectorLabels" (list $root $component) | nindent 6 }}
  policyTypes: [Ingress{{ if $policy.egress.enabled }}, Egress{{ end }}]
  {{- if $policy.egress.enabled }}
  egress:
    {{- include "segue.egressToApiServer" $root | nindent 4 }}
  {{- end }}
{{- end }}
---
apiVersion: batch/v1
kind: Job
metadata:
  {{- include "segue.keysMetadata" (list $root $verb (index . 2) "0" "") | nindent 2 }}
spec:
  # The program itself waits for the API server; what else fails is for a person, soon.
  backoffLimit: 1
  # Below the five minutes that Helm waits for a hook, so that it says what happened.
  activeDeadlineSeconds: 280
  # A failed one is kept for its log until the next attempt, or so long.
  ttlSecondsAfterFinished: 3600
  template:
    metadata:
      # The proxy of a mesh would never end, and neither would the Job.
      labels:
        {{- merge (dict "sidecar.istio.io/inject" "false") (include "segue.podLabels" (list $root $component) | fromYaml) | toYaml | nindent 8 }}
      annotations:
        linkerd.io/inject: disabled
    spec:
      serviceAccountName: {{ $name }}
      automountServiceAccountToken: true
      {{- include "segue.hookPodSpec" $root | nindent 6 }}
      containers:
        - name: keys
          command: [python, -m, shared.local.release_keys]
          args:
            - {{ $verb }}
            {{- index . 4 | toYaml | nindent 12 }}
          {{- include "segue.hookContainer" $root | nindent 10 }}
{{- end -}}

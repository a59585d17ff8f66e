{{/* Where the model comes from, and how it gets into a pod. */}}

{{- define "segue.modelKind" -}}
{{- if ne .Values.modelSource.kind "auto" -}}{{ .Values.modelSource.kind }}
{{- else if hasPrefix "/" .Values.model -}}path
{{- else if contains "/" .Values.model -}}hub
{{- else -}}image
{{- end -}}
{{- end -}}

{{/* The folder that the processes read. */}}
{{- define "segue.modelFolder" -}}
{{- if eq (include "segue.modelKind" .) "path" -}}{{ .Values.model }}{{- else -}}/models{{- end -}}
{{- end -}}

{{- define "segue.servedModelName" -}}
{{- if .Values.servedModelName -}}{{ .Values.servedModelName }}
{{- else if eq (include "segue.modelKind" .) "path" -}}{{ base .Values.model }}
{{- else -}}{{ .Values.model }}
{{- end -}}
{{- end -}}

{{- define "segue.modelImage" -}}
{{- $image := .Values.modelSource.image -}}
{{- $repository := default (printf "segue-model-%s" (lower .Values.model)) $image.repository -}}
{{- $tag := coalesce $image.tag .Values.image.tag .Chart.AppVersion -}}
{{- include "segue.imageReference" (list . (dict "repository" $repository "tag" $tag "digest" $image.digest)) -}}
{{- end -}}

{{/* (root, role) → the volume with the model's files. */}}
{{- define "segue.modelVolume" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}
{{- $kind := include "segue.modelKind" $root -}}
{{- if eq $kind "pvc" -}}
- name: model
  persistentVolumeClaim:
    claimName: {{ $root.Values.modelSource.pvc.claimName }}
    readOnly: true
{{- else if ne $kind "path" -}}
{{- $known := ternary "1Gi" "" (and (eq $kind "image") (eq $root.Values.model "smollm2")) -}}
{{- $limit := ternary "256Mi" (default $known $root.Values.modelSource.sizeLimit) (eq $role "router") -}}
- name: model
  emptyDir:
    {{- if $limit }}
    sizeLimit: {{ $limit }}
    {{- else }} {}
    {{- end }}
{{- end -}}
{{- end -}}

{{- define "segue.modelMount" -}}
{{- $kind := include "segue.modelKind" . -}}
{{- if ne $kind "path" -}}
- name: model
  mountPath: /models
  readOnly: true
  {{- if and (eq $kind "pvc") .Values.modelSource.pvc.subPath }}
  subPath: {{ .Values.modelSource.pvc.subPath }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* (root, role, of) → the init container that fills /models; a router's has no weights. */}}
{{- define "segue.modelInit" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}{{- $of := index . 2 -}}
{{- $kind := include "segue.modelKind" $root -}}
{{- if has $kind (list "image" "hub") -}}
- name: model
  {{- if eq $kind "image" }}
  image: {{ include "segue.modelImage" $root }}
  command: [sh, -euc]
  args:
    {{- if eq $of "router" }}
    - |
      for file in /model/*; do
        case $file in *.safetensors | *.packed) ;; *) cp -R "$file" /models/ ;; esac
      done
    {{- else }}
    - cp -R /model/. /models/
    {{- end }}
  {{- else }}
  image: {{ include "segue.image" (list $root $of) }}
  command: [hf, download]
  args:
    - {{ $root.Values.model }}
    - --revision={{ $root.Values.modelSource.hub.revision }}
    - --local-dir=/models
    {{- range list "*.json" "*.jinja" "tokenizer.model" "merges.txt" "vocab.txt" }}
    - --include={{ . }}
    {{- end }}
    {{- if eq $of "worker" }}
    - --include=*.safetensors
    {{- end }}
    {{- range list "*/*" "consolidated*" }}
    - --exclude={{ . }}
    {{- end }}
  env:
    - name: HF_HOME
      value: /tmp/huggingface
    - name: HF_XET_CHUNK_CACHE_SIZE_BYTES  # of a download into an empty folder nothing is asked for twice
      value: "0"
    {{- with $root.Values.modelSource.hub.endpoint }}
    - name: HF_ENDPOINT
      value: {{ . }}
    {{- end }}
    {{- with $root.Values.modelSource.hub.existingSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ . }}
          key: {{ $root.Values.modelSource.hub.secretKey }}
    {{- end }}
  {{- end }}
  imagePullPolicy: {{ include "segue.pullPolicy" (list $root (eq $kind "image" | ternary (include "segue.modelImage" $root) (include "segue.image" (list $root $of)))) }}
  {{- /* The scheduler counts the larger of init and main containers, so these cost nothing. */}}
  {{- with include "segue.plainResources" (list $root $role) }}
  resources:
    {{- . | trim | nindent 4 }}
  {{- end }}
  {{- with $root.Values.securityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    - name: model
      mountPath: /models
    - name: scratch
      mountPath: /tmp
{{- end -}}
{{- end -}}

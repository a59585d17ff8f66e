{{/* Where the model comes from, and how it gets into a pod. Kinds hub and fetch fill a folder of a cache, or of an emptyDir, by
shared/model_cache; image is copied; all others are mounted as they are. */}}

{{- define "segue.modelKind" -}}
{{- if ne .Values.modelSource.kind "auto" -}}{{ .Values.modelSource.kind }}
{{- else if hasPrefix "/" .Values.model -}}path
{{- else if contains "/" .Values.model -}}hub
{{- else -}}image
{{- end -}}
{{- end -}}

{{/* root → what keeps the model for several pods: claim, hostPath or nothing. */}}
{{- define "segue.modelCache" -}}
{{- $cache := .Values.modelSource.cache -}}
{{- if or $cache.claimName $cache.create.size -}}claim{{- else if $cache.hostPath -}}hostPath{{- end -}}
{{- end -}}

{{- define "segue.modelCacheClaim" -}}
{{- .Values.modelSource.cache.claimName | default (printf "%s-model-cache" (include "segue.fullname" .)) -}}
{{- end -}}

{{/* (root, role) → whether its pods have a folder of their own, without weights. */}}
{{- define "segue.tokenizerAlone" -}}
{{- $root := index . 0 -}}{{- $kind := include "segue.modelKind" $root -}}{{- $source := $root.Values.modelSource -}}
{{- if and (eq (index . 1) "router") (not $source.gguf) (or (eq $kind "hub") (and (eq $kind "fetch") $source.fetch.routerCommand)) -}}
true
{{- end -}}
{{- end -}}

{{/* (root, role) → whether its pods leave the conversion of a GGUF file to those of workers, which fill the same volume. In a folder of
the node, a router may be alone with it. */}}
{{- define "segue.awaitsWorkers" -}}
{{- if and (eq (index . 1) "router") (index . 0).Values.modelSource.gguf (eq (include "segue.modelCache" (index . 0)) "claim") }}true{{ end -}}
{{- end -}}

{{/* root → the folder of the weights that kinds hub and fetch fill: another commit, file or command is another folder. */}}
{{- define "segue.fetchedFolder" -}}
{{- $source := .Values.modelSource -}}
{{- $version := $source.hub.revision -}}
{{- if eq (include "segue.modelKind" .) "fetch" -}}{{- $version = toJson $source.fetch.command | sha256sum | trunc 12 -}}{{- end -}}
/models/{{ .Values.model }}@{{ $version }}{{ with $source.gguf }}+{{ . }}{{ end }}
{{- end -}}

{{/* (root, role) → the folder that its processes read. */}}
{{- define "segue.modelFolder" -}}
{{- $root := index . 0 -}}{{- $kind := include "segue.modelKind" $root -}}
{{- if eq $kind "path" -}}{{ $root.Values.model }}
{{- else if has $kind (list "hub" "fetch") -}}
{{- include "segue.fetchedFolder" $root }}
{{- if include "segue.tokenizerAlone" . }}+tokenizer{{ if eq $kind "fetch" }}@{{ toJson $root.Values.modelSource.fetch.routerCommand | sha256sum | trunc 12 }}{{ end }}{{ end }}
{{- else if and (eq $kind "imageVolume") $root.Values.modelSource.image.folder -}}/models/{{ $root.Values.modelSource.image.folder }}
{{- else -}}/models
{{- end -}}
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

{{/* (root, role) → how much the emptyDir with the model may hold, where there is one and its size is known. */}}
{{- define "segue.modelSizeLimit" -}}
{{- $root := index . 0 -}}{{- $kind := include "segue.modelKind" $root -}}
{{- if and (has $kind (list "image" "hub" "fetch")) (not (include "segue.modelCache" $root)) -}}
{{- $known := ternary "1Gi" "" (and (eq $kind "image") (eq $root.Values.model "smollm2")) -}}
{{- ternary "256Mi" (default $known $root.Values.modelSource.sizeLimit) (eq (index . 1) "router") -}}
{{- end -}}
{{- end -}}

{{/* (root, role) → the volume with the model's files. */}}
{{- define "segue.modelVolume" -}}
{{- $root := index . 0 -}}{{- $source := $root.Values.modelSource -}}
{{- $kind := include "segue.modelKind" $root -}}{{- $cache := include "segue.modelCache" $root -}}
{{- if ne $kind "path" -}}
- name: model
  {{- if eq $kind "pvc" }}
  persistentVolumeClaim:
    claimName: {{ $source.pvc.claimName | quote }}
    readOnly: true
  {{- else if eq $kind "hostPath" }}
  hostPath:
    path: {{ $source.hostPath | quote }}
    type: Directory
  {{- else if eq $kind "imageVolume" }}
  image:
    reference: {{ include "segue.modelImage" $root | quote }}
    pullPolicy: {{ include "segue.pullPolicy" (list $root (include "segue.modelImage" $root) $root.Values.modelSource.image.pullPolicy) }}
  {{- else if eq $cache "claim" }}
  persistentVolumeClaim:
    claimName: {{ include "segue.modelCacheClaim" $root | quote }}
  {{- else if eq $cache "hostPath" }}
  hostPath:
    path: {{ $source.cache.hostPath | quote }}
    type: DirectoryOrCreate
  {{- else }}
  emptyDir:
    {{- with include "segue.modelSizeLimit" . }}
    sizeLimit: {{ . }}
    {{- else }} {}
    {{- end }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "segue.modelMount" -}}
{{- $kind := include "segue.modelKind" . -}}
{{- if ne $kind "path" -}}
- name: model
  mountPath: /models
  readOnly: true
  {{- if and (eq $kind "pvc") .Values.modelSource.pvc.subPath }}
  subPath: {{ .Values.modelSource.pvc.subPath | quote }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* (root, role, of) → the init containers that fill /models; a router's has no weights. */}}
{{- define "segue.modelInit" -}}
{{- $root := index . 0 -}}
{{- $kind := include "segue.modelKind" $root -}}
{{- if include "segue.awaitsWorkers" (list $root (index . 1)) }}{{ include "segue.modelStep" (list . "model" "wait") }}
{{- else if eq $kind "image" }}{{ include "segue.modelCopy" . }}
{{- else if eq $kind "hub" }}{{ include "segue.modelStep" (list . "model" "hub") }}
{{- else if eq $kind "fetch" }}
{{- include "segue.modelStep" (list . "model-claim" "claim") }}
{{ include "segue.modelFetch" . }}
{{ include "segue.modelStep" (list . "model-finish" "finish") }}
{{- end -}}
{{- end -}}

{{/* (root, role, of) → the data image, copied. */}}
{{- define "segue.modelCopy" -}}
{{- $root := index . 0 -}}
- name: model
  image: {{ include "segue.modelImage" $root }}
  imagePullPolicy: {{ include "segue.pullPolicy" (list $root (include "segue.modelImage" $root) $root.Values.modelSource.image.pullPolicy) }}
  command: [sh, -euc]
  args:
    {{- if eq (index . 2) "router" }}
    - |
      for file in /model/*; do
        case $file in *.safetensors | *.packed) ;; *) cp -R "$file" /models/ ;; esac
      done
    {{- else }}
    - cp -R /model/. /models/
    {{- end }}
  {{- include "segue.modelContainer" (list . list) | nindent 2 }}
{{- end -}}

{{/* ((root, role, of), name, step) → a container of shared/model_cache, in the image that the pod has anyway: GGUF asks for torch. */}}
{{- define "segue.modelStep" -}}
{{- $pod := index . 0 -}}{{- $name := index . 1 -}}{{- $step := index . 2 -}}
{{- $root := index $pod 0 -}}{{- $role := index $pod 1 -}}{{- $source := $root.Values.modelSource -}}
{{- $given := list $root $role -}}{{- $alone := include "segue.tokenizerAlone" $given -}}
{{- $converts := and (ne $source.gguf "") (ne $step "wait") -}}
{{- $image := include "segue.image" (list $root (ternary "worker" (index $pod 2) $converts)) -}}
- name: {{ $name }}
  image: {{ $image }}
  imagePullPolicy: {{ include "segue.pullPolicy" (list $root $image) }}
  command: [python, -m, shared.model_cache.fetch_model]
  args:
    - {{ include "segue.modelFolder" $given | quote }}
    - {{ $step }}
    {{- if eq $step "hub" }}
    - {{ printf "--model=%s" $root.Values.model | quote }}
    - {{ printf "--revision=%s" $source.hub.revision | quote }}
    {{- with $source.hub.endpoint }}
    - {{ printf "--endpoint=%s" . | quote }}
    {{- end }}
    {{- with $source.hub.existingSecret }}
    - {{ printf "--token-source=Secret %s" . | quote }}
    {{- end }}
    {{- with include "segue.modelSizeLimit" $given }}
    - {{ printf "--size-limit=%s" . | quote }}
    {{- end }}
    {{- if $alone }}
    - --tokenizer
    {{- if include "segue.modelCache" $root }}
    - {{ printf "--copy-from=%s" (include "segue.fetchedFolder" $root) | quote }}
    {{- end }}
    {{- end }}
    {{- else if ne $step "wait" }}
    - --script=/tmp/fetch-model
    {{- end }}
    {{- if and $converts (ne $step "claim") }}
    - {{ printf "--gguf=%s" $source.gguf | quote }}
    {{- end }}
  {{- $variables := list (dict "name" "SEGUE_UID" "valueFrom" (dict "fieldRef" (dict "fieldPath" "metadata.uid"))) -}}
  {{- $variables = append $variables (dict "name" "HF_HOME" "value" "/tmp/huggingface") -}}
  {{- with $source.hub.existingSecret -}}
  {{- $variables = append $variables (dict "name" "HF_TOKEN" "valueFrom" (dict "secretKeyRef" (dict "name" . "key" $source.hub.secretKey))) -}}
  {{- end }}
  {{- include "segue.modelContainer" (list $pod $variables) | nindent 2 }}
{{- end -}}

{{/* (root, role, of) → the user's container, whose command runs under the lock: shared/model_cache/users_container.py. */}}
{{- define "segue.modelFetch" -}}
{{- $root := index . 0 -}}{{- $fetch := $root.Values.modelSource.fetch -}}
- name: model
  image: {{ $fetch.image | quote }}
  imagePullPolicy: {{ include "segue.pullPolicy" (list $root $fetch.image) }}
  command: [sh, /tmp/fetch-model]
  args:
    {{- if include "segue.tokenizerAlone" (list $root (index . 1)) }}
    {{- toYaml $fetch.routerCommand | nindent 4 }}
    {{- else }}
    {{- toYaml $fetch.command | nindent 4 }}
    {{- end }}
  {{- include "segue.modelContainer" (list . (list (dict "name" "HOME" "value" "/tmp"))) | nindent 2 }}
{{- end -}}

{{/* ((root, role, of), variables) → what all these containers have: what modelSource gives them, and what a quota asks for. */}}
{{- define "segue.modelContainer" -}}
{{- $pod := index . 0 -}}{{- $root := index $pod 0 -}}{{- $role := index $pod 1 -}}{{- $source := $root.Values.modelSource -}}
terminationMessagePolicy: FallbackToLogsOnError
{{- $ours := include "segue.variablesBeside" (list (index . 1) $source.extraEnv) | fromYamlArray }}
{{- with concat $ours (default list $source.extraEnv) }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $source.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "segue.modelResources" (list $root $role) }}
resources:
  {{- . | nindent 2 }}
{{- end }}
{{- with mergeOverwrite (deepCopy (default dict $root.Values.securityContext)) (include "segue.modelRoot" $root | fromYaml) (deepCopy (default dict $source.securityContext)) }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - name: model
    mountPath: /models
  - name: scratch
    mountPath: /tmp
  {{- with $source.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* root → what root needs beside runAsUser: pods say runAsNonRoot, and the kubelet starts no container that contradicts it. */}}
{{- define "segue.modelRoot" -}}
{{- if eq (dig "runAsUser" "" (default dict .Values.modelSource.securityContext) | toString) "0" }}runAsNonRoot: false{{ end -}}
{{- end -}}

{{/* (root, role) → the role's resources without devices, which cost nothing: the scheduler counts the larger of init and main
containers. The emptyDir is requested whole, or the node would evict the pod when its disk fills up. */}}
{{- define "segue.modelResources" -}}
{{- $root := index . 0 -}}
{{- $resources := include "segue.plainResources" . | fromYaml -}}
{{- with include "segue.modelSizeLimit" . -}}
{{- $size := dict "ephemeral-storage" . -}}
{{- $_ := set $resources "requests" (mergeOverwrite (default dict $resources.requests) $size) -}}
{{- if hasKey (default dict $resources.limits) "ephemeral-storage" -}}
{{- $_ := set $resources "limits" (mergeOverwrite $resources.limits $size) -}}
{{- end -}}
{{- end -}}
{{- if not (include "segue.awaitsWorkers" .) -}}
{{- $resources = mergeOverwrite $resources (deepCopy (default dict $root.Values.modelSource.resources)) -}}
{{- end -}}
{{- with include "segue.guaranteedResources" (list $root (index . 1) $resources) | fromYaml -}}{{- toYaml . -}}{{- end -}}
{{- end -}}

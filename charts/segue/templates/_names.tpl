{{/* Names, labels and images: what everything here is called, and how it finds the others. */}}

{{- define "segue.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 50 characters, so that the longest suffix still makes a label value. */}}
{{- define "segue.fullname" -}}
{{- $name := include "segue.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Of the release as a whole: name *and* instance, so that two releases share a namespace. */}}
{{- define "segue.releaseLabels" -}}
app.kubernetes.io/name: {{ include "segue.name" . | toYaml }}
app.kubernetes.io/instance: {{ .Release.Name | toYaml }}
{{- end -}}

{{/* (root, component) → what selects the pods of one component; never changes, for selectors cannot. */}}
{{- define "segue.selectorLabels" -}}
{{ include "segue.releaseLabels" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* (root, component) → labels of pods: no version in them, or each upgrade of the chart would roll all pods. */}}
{{- define "segue.podLabels" -}}
{{- $root := index . 0 -}}
{{- $ours := dict "app.kubernetes.io/part-of" "segue" "app.kubernetes.io/managed-by" $root.Release.Service -}}
{{ include "segue.selectorLabels" . }}
{{ merge (dict) (default dict $root.Values.commonLabels) $ours | toYaml }}
{{- end -}}

{{/* (root, component) → labels of every other object; a key that is there twice is no YAML to kustomize, and so to Flux. */}}
{{- define "segue.labels" -}}
{{- $root := index . 0 -}}
{{- $ours := dict "app.kubernetes.io/version" $root.Chart.AppVersion -}}
{{- $_ := set $ours "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_") -}}
{{- merge (include "segue.podLabels" . | fromYaml) $ours | toYaml -}}
{{- end -}}

{{/* (root, role) → the headless Service whose EndpointSlices name the pods of this role. */}}
{{- define "segue.discoveryService" -}}
{{- printf "%s-%s" (include "segue.fullname" (index . 0)) (ternary "routers" (index . 1) (eq (index . 1) "router")) -}}
{{- end -}}

{{/* The label selector, in the API's own words, of their EndpointSlices. */}}
{{- define "segue.sliceSelector" -}}
{{- $names := list -}}
{{- range $role := list "router" "prefill" "decode" -}}
{{- $names = append $names (include "segue.discoveryService" (list $ $role)) -}}
{{- end -}}
{{- printf "kubernetes.io/service-name in (%s)" (join "," $names) -}}
{{- end -}}

{{/* A LabelSelector of this release's workers. */}}
{{- define "segue.workerLabelSelector" -}}
matchLabels:
  {{- include "segue.releaseLabels" . | nindent 2 }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [prefill, decode]
{{- end -}}

{{/* (root, "router" | "worker") → the Secret with the link keys of its pods. */}}
{{- define "segue.linksSecret" -}}
{{- $root := index . 0 -}}{{- $of := index . 1 -}}
{{- default (printf "%s-links-%s" (include "segue.fullname" $root) $of) (index $root.Values.links (printf "%sSecret" $of)) -}}
{{- end -}}

{{/* The Secret with the clients' API keys. */}}
{{- define "segue.apiKeysSecret" -}}
{{- default (printf "%s-api-keys" (include "segue.fullname" .)) .Values.auth.existingSecret -}}
{{- end -}}

{{/* (root, "router" | "worker") → the service account of its pods. */}}
{{- define "segue.serviceAccount" -}}
{{- $root := index . 0 -}}{{- $of := index . 1 -}}
{{- $account := (index $root.Values $of).serviceAccount -}}
{{- if $account.create -}}
{{- default (printf "%s-%s" (include "segue.fullname" $root) $of) $account.name -}}
{{- else -}}
{{- default "default" $account.name -}}
{{- end -}}
{{- end -}}

{{/* (root, {repository, tag, digest}) → a complete reference; a digest beats a tag. A released chart has a file of the
digests that its own tags had, so that they are pulled by digest from any registry that copies them. */}}
{{- define "segue.imageReference" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}
{{- $name := $image.repository -}}
{{- with dig "imageRegistry" "" (default dict $root.Values.global) | default $root.Values.image.registry -}}{{- $name = printf "%s/%s" (trimSuffix "/" .) $name -}}{{- end -}}
{{- $released := default dict ($root.Files.Get "digests.json" | default "{}" | fromJson) -}}
{{- $digest := default (get $released (printf "%s:%s" $image.repository $image.tag)) $image.digest -}}
{{- if $digest -}}{{ $name }}@{{ $digest }}{{- else -}}{{ $name }}:{{ $image.tag }}{{- end -}}
{{- end -}}

{{/* (root, reference[, a policy of its own]) → its pull policy. A node may keep what cannot change: a digest, or an image that
was loaded onto it. A tag in a registry can be another image today. */}}
{{- define "segue.pullPolicy" -}}
{{- $root := index . 0 -}}{{- $reference := index . 1 -}}
{{- $fixed := or (contains "@" $reference) (hasPrefix "localhost/" $reference) -}}
{{- $own := "" -}}{{- if gt (len .) 2 -}}{{- $own = index . 2 -}}{{- end -}}
{{- coalesce $own $root.Values.image.pullPolicy (ternary "IfNotPresent" "Always" $fixed) -}}
{{- end -}}

{{/* (root, "router" | "worker" | a worker's role) → its image. What it says itself beats what `image` says for both, and a
role beats `worker`. */}}
{{- define "segue.image" -}}
{{- $root := index . 0 -}}{{- $of := index . 1 -}}
{{- $values := $root.Values -}}{{- $both := $values.image -}}
{{- $own := (index $values $of).image -}}
{{- if has $of (list "prefill" "decode") -}}
{{- $shared := $values.worker.image -}}
{{- $said := or $own.tag $own.digest -}}
{{- $own = dict "repository" (default $shared.repository $own.repository) "tag" (ternary $own.tag $shared.tag (not (empty $said))) "digest" (ternary $own.digest $shared.digest (not (empty $said))) -}}
{{- end -}}
{{- $digest := $own.digest -}}
{{- if and (not $own.digest) (not $own.tag) -}}{{- $digest = $both.digest -}}{{- end -}}
{{- $tag := $own.tag -}}
{{- if not $tag -}}
{{- $tag = default $root.Chart.AppVersion $both.tag -}}
{{- if and (ne $of "router") (eq $root.Values.device "cuda") -}}{{- $tag = printf "%s-cuda" $tag -}}{{- end -}}
{{- end -}}
{{- include "segue.imageReference" (list $root (dict "repository" $own.repository "tag" $tag "digest" $digest)) -}}
{{- end -}}

{{/* (root, annotations of one object) → `annotations:` with those of all objects, or nothing. */}}
{{- define "segue.annotations" -}}
{{- with merge (dict) (default dict (index . 1)) (default dict (index . 0).Values.commonAnnotations) -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

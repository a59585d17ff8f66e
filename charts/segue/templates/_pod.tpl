{{/* What the pods of all three roles have in common. "of" is whose image and account they take: router or worker. */}}

{{/* Ports inside the pods. Nobody else listens there, so they are not values. */}}
{{- define "segue.httpPort" -}}8000{{- end -}}
{{- define "segue.adminPort" -}}8001{{- end -}}
{{- define "segue.linksPort" -}}8002{{- end -}}

{{/* (root, role) → `replicas:` or nothing. An upgrade says what is live: scaling belongs to kubectl and autoscalers. */}}
{{- define "segue.replicas" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}
{{- $wanted := (index $root.Values $role).replicas -}}
{{- if not (kindIs "invalid" $wanted) -}}
{{- $name := printf "%s-%s" (include "segue.fullname" $root) $role -}}
{{- $live := lookup "apps/v1" "Deployment" $root.Release.Namespace $name -}}
replicas: {{ dig "spec" "replicas" $wanted (default dict $live) | int }}
{{- end -}}
{{- end -}}

{{/* (root, role) → metadata of the pod; a changed config file rolls the pods that read it, and no others. */}}
{{- define "segue.podMetadata" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}{{- $values := index $root.Values $role -}}
{{- $ours := dict "checksum/config" (include "segue.configFile" . | sha256sum) "kubectl.kubernetes.io/default-container" $role -}}
{{- $ours = merge $ours (include "segue.meshAnnotations" . | fromYaml) -}}
labels:
  {{- merge (dict) (default dict $values.podLabels) (include "segue.podLabels" . | fromYaml) | toYaml | nindent 2 }}
annotations:
  {{- merge (dict) (default dict $values.podAnnotations) $ours | toYaml | nindent 2 }}
{{- end -}}

{{/* (root, role) → annotations that keep the ports of links, KV and admin out of a mesh's proxy, on both ends; and the ways to the
API server and to a model, since the proxy may start later than who needs them. */}}
{{- define "segue.meshAnnotations" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.mesh -}}
{{- $admin := include "segue.adminPort" . -}}{{- $links := include "segue.linksPort" . -}}{{- $kv := $root.Values.kv.ports -}}
{{- $in := list $admin $links $kv -}}{{- $out := list $links $kv -}}
{{- if eq (index . 1) "router" -}}
{{- $in = list $admin -}}{{- $out = concat (list $admin $links) $root.Values.networkPolicy.egress.apiServerPorts -}}
{{- end -}}
{{- if has (include "segue.modelKind" $root) (list "hub" "fetch") -}}
{{- $out = concat $out ($root.Values.networkPolicy.egress.modelPorts | default (list (include "segue.hubPort" $root))) -}}
{{- end -}}
{{- $out = $out | uniq -}}
{{- if eq $root.Values.mesh "linkerd" -}}
config.linkerd.io/skip-inbound-ports: {{ join "," $in | quote }}
config.linkerd.io/skip-outbound-ports: {{ join "," $out | quote }}
{{- else -}}
traffic.sidecar.istio.io/excludeInboundPorts: {{ include "segue.portList" $in | quote }}
traffic.sidecar.istio.io/excludeOutboundPorts: {{ include "segue.portList" $out | quote }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Ports and ranges → all of them, one by one: Istio knows no ranges. */}}
{{- define "segue.portList" -}}
{{- $ports := list -}}
{{- range . -}}
{{- $ends := splitList "-" (toString .) -}}
{{- range untilStep (first $ends | int) (last $ends | int | add1 | int) 1 -}}{{- $ports = append $ports . -}}{{- end -}}
{{- end -}}
{{- join "," $ports -}}
{{- end -}}

{{/* (root, role) → the file that --config names. */}}
{{- define "segue.configFile" -}}
{{- toYaml (index (index . 0).Values (index . 1)).config -}}
{{- end -}}

{{/* (root, role, of) → the pod's security context, the role's own last. Workers that share the host's processes have a user id
of their own. */}}
{{- define "segue.podSecurityContext" -}}
{{- $root := index . 0 -}}{{- $of := index . 2 -}}
{{- $own := deepCopy (default dict (index $root.Values (index . 1)).podSecurityContext) -}}
{{- $context := mergeOverwrite (deepCopy (default dict $root.Values.podSecurityContext)) $own -}}
{{- if and $root.Values.sameNodeGpuIpc.enabled (eq $of "worker") -}}
{{- $_ := set $context "runAsUser" ($root.Values.sameNodeGpuIpc.runAsUser | int) -}}
{{- end -}}
{{- with $context -}}{{- toYaml . -}}{{- end -}}
{{- end -}}

{{/* (root, role, of) → the first fields of a pod's spec. */}}
{{- define "segue.podFields" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}{{- $of := index . 2 -}}{{- $values := index $root.Values $role -}}
serviceAccountName: {{ include "segue.serviceAccount" (list $root $of) | quote }}
automountServiceAccountToken: {{ eq $of "router" }}
enableServiceLinks: false
{{- if not (kindIs "invalid" $root.Values.hostUsers) }}
hostUsers: {{ $root.Values.hostUsers }}
{{- end }}
{{- with include "segue.podSecurityContext" . }}
securityContext:
  {{- . | nindent 2 }}
{{- end }}
{{- include "segue.pullSecrets" $root }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- $onGpu := and (eq $of "worker") (eq $root.Values.device "cuda") }}
{{- with default (ternary $root.Values.gpu.runtimeClassName "" $onGpu) $values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- include "segue.placement" (list $root $role "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints") }}
{{- include "segue.network" $values }}
{{- with $values.resourceClaims }}
resourceClaims:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $model := include "segue.modelInit" . }}
{{- if or $model $values.extraInitContainers }}
initContainers:
  {{- with $model }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $values.extraInitContainers }}
  {{- tpl (toYaml .) $root | nindent 2 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The values of a role → its fields of a pod's spec about network and scheduler. With the node's network, names are still
looked up in the cluster. */}}
{{- define "segue.network" -}}
{{- if .hostNetwork }}
hostNetwork: true
{{- end }}
{{- with default (ternary "ClusterFirstWithHostNet" "" .hostNetwork) .dnsPolicy }}
dnsPolicy: {{ . }}
{{- end }}
{{- range $field, $value := pick . "dnsConfig" "hostAliases" }}
{{- with $value }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with .schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* (root, role) → containers of the user's beside the one of Segue. */}}
{{- define "segue.extraContainers" -}}
{{- with (index (index . 0).Values (index . 1)).extraContainers }}
{{- tpl (toYaml .) (index $ 0) }}
{{- end }}
{{- end -}}

{{/* (root, role, field…) → those of them that have a value; templates may stand in it, for selectors need the release's name. */}}
{{- define "segue.placement" -}}
{{- $root := index . 0 -}}{{- $values := deepCopy (index $root.Values (index . 1)) -}}
{{- if and (ne (index . 1) "router") (eq $root.Values.device "cuda") -}}
{{- $taint := dict "key" $root.Values.gpu.resourceName "operator" "Exists" "effect" "NoSchedule" -}}
{{- $_ := set $values "tolerations" (append (default list $values.tolerations) $taint | uniq) -}}
{{- end -}}
{{- if and (eq (index . 1) "decode") $root.Values.placement.pairTopologyKey -}}
{{- $_ := set $values "affinity" (include "segue.nearPrefill" $root | fromYaml) -}}
{{- end -}}
{{- range $field := slice . 2 }}
{{- with index $values $field }}
{{ $field }}:
  {{- tpl (toYaml .) $root | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* root → decode's affinity, with the wish to be near prefill. The scheduler counts it both ways, whichever pod comes first. */}}
{{- define "segue.nearPrefill" -}}
{{- $affinity := deepCopy (default dict .Values.decode.affinity) -}}
{{- $pods := default dict $affinity.podAffinity -}}
{{- $selector := dict "matchLabels" (include "segue.selectorLabels" (list . "prefill") | fromYaml) -}}
{{- $near := dict "weight" 100 "podAffinityTerm" (dict "topologyKey" .Values.placement.pairTopologyKey "labelSelector" $selector) -}}
{{- $wishes := "preferredDuringSchedulingIgnoredDuringExecution" -}}
{{- $_ := set $pods $wishes (append (get $pods $wishes | default list) $near) -}}
{{- toYaml (set $affinity "podAffinity" $pods) -}}
{{- end -}}

{{/* (root, role) → its resources without devices, for what runs before it or beside it: quotas ask them of every container. */}}
{{- define "segue.plainResources" -}}
{{- $values := index (index . 0).Values (index . 1) -}}
{{- range $side := list "requests" "limits" }}
{{- with pick (dig $side dict (default dict $values.resources) | default dict) "cpu" "memory" "ephemeral-storage" }}
{{ $side }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* (root, role, of) → the first fields of its own container. */}}
{{- define "segue.containerFields" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}{{- $of := index . 2 -}}{{- $values := index $root.Values $role -}}
name: {{ $role }}
{{- $image := include "segue.image" (list $root $role) }}
image: {{ $image | quote }}
imagePullPolicy: {{ include "segue.pullPolicy" (list $root $image) }}
terminationMessagePolicy: FallbackToLogsOnError
command: [python, -m, {{ $role }}]
args: [--config, /etc/segue/config.yaml]
{{- with $values.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - name: config
    mountPath: /etc/segue
    readOnly: true
  - name: links
    mountPath: /etc/segue-links
    readOnly: true
  {{- if and $root.Values.auth.enabled (eq $role "router") }}
  - name: api-keys
    mountPath: /etc/segue-api-keys
    readOnly: true
  {{- end }}
  {{- if and (eq $role "router") $root.Values.router.tls.existingSecret }}
  - name: tls
    mountPath: /etc/segue-tls
    readOnly: true
  {{- end }}
  - name: scratch
    mountPath: /tmp
  {{- if include "segue.sharedMemory" (list $root $role) }}
  - name: shared-memory
    mountPath: /dev/shm
  {{- end }}
  {{- with include "segue.modelMount" $root }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* (root, role) → variables that every process is given; a variable beats the config file, and these are no values there. */}}
{{- define "segue.environment" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}
- name: SEGUE_UID
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: SEGUE_HOST
  value: "*"
- name: SEGUE_LINK_KEYS_FILE
  value: /etc/segue-links/keys.pem
- name: SEGUE_MODEL
  value: {{ include "segue.modelFolder" . | quote }}
- name: SEGUE_SERVED_MODEL_NAME
  value: {{ include "segue.servedModelName" $root | quote }}
- name: SEGUE_SILENCE_SECONDS
  value: {{ $root.Values.silenceSeconds | quote }}
{{- $ours := list (dict "name" "HOME" "value" "/tmp") (dict "name" "HF_HUB_OFFLINE" "value" "1") -}}
{{- with include "segue.variablesBeside" (list $ours (index $root.Values $role).extraEnv) | fromYamlArray }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (variables, the user's) → those of the first that the user does not set: server-side apply refuses a name that is there twice. */}}
{{- define "segue.variablesBeside" -}}
{{- $names := list -}}{{- range index . 1 -}}{{- $names = append $names .name -}}{{- end -}}
{{- $kept := list -}}{{- range index . 0 -}}{{- if not (has .name $names) -}}{{- $kept = append $kept . -}}{{- end -}}{{- end -}}
{{- toYaml $kept -}}
{{- end -}}

{{/* (root, role) → the size of its own /dev/shm, or nothing: with the host's IPC namespace it has the host's. */}}
{{- define "segue.sharedMemory" -}}
{{- $root := index . 0 -}}
{{- if and (ne (index . 1) "router") (eq $root.Values.device "cuda") (not $root.Values.sameNodeGpuIpc.enabled) -}}
{{- $root.Values.gpu.sharedMemorySize -}}
{{- end -}}
{{- end -}}

{{/* (root, role) → the pod's volumes. The keys' file must be closed to others, or the processes refuse it. */}}
{{- define "segue.volumes" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}
- name: config
  configMap:
    name: {{ include "segue.fullname" $root }}-{{ $role }}
- name: links
  secret:
    secretName: {{ include "segue.linksSecret" (list $root (eq $role "router" | ternary "router" "worker")) | quote }}
    defaultMode: 0440
    items:
      - key: keys.pem
        path: keys.pem
{{- if and $root.Values.auth.enabled (eq $role "router") }}
- name: api-keys
  secret:
    secretName: {{ include "segue.apiKeysSecret" $root | quote }}
    defaultMode: 0440
    items:
      - key: keys
        path: keys
{{- end }}
{{- if and (eq $role "router") $root.Values.router.tls.existingSecret }}
- name: tls
  secret:
    secretName: {{ $root.Values.router.tls.existingSecret | quote }}
    defaultMode: 0440
    items:
      - key: tls.crt
        path: tls.crt
      - key: tls.key
        path: tls.key
{{- end }}
- name: scratch
  emptyDir:
    sizeLimit: {{ $root.Values.scratchSizeLimit | quote }}
{{- with include "segue.sharedMemory" . }}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ . | quote }}
{{- end }}
{{- with include "segue.modelVolume" (list $root $role) }}
{{ . }}
{{- end }}
{{- /* A CA for what fetches the model and for a role is one volume, said in both places. */}}
{{- with concat (default list $root.Values.modelSource.extraVolumes) (default list (index $root.Values $role).extraVolumes) | uniq }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* root → liveness: the loop has turned lately. Three misses, since a probe can be late where cores are shared. */}}
{{- define "segue.livenessProbe" -}}
httpGet:
  path: /livez
  port: admin
periodSeconds: 10
timeoutSeconds: 5
failureThreshold: 3
{{- end -}}

{{/* Readiness is looked at each second: a new pod should be found within two. */}}
{{- define "segue.readinessProbe" -}}
httpGet:
  path: /readyz
  port: admin
periodSeconds: 1
timeoutSeconds: 5
failureThreshold: 3
{{- end -}}

{{/* (root, role, path) → a probe that gives the process its seconds to start. */}}
{{- define "segue.startupProbe" -}}
httpGet:
  path: {{ index . 2 }}
  port: admin
periodSeconds: 1
timeoutSeconds: 5
failureThreshold: {{ include "segue.startupSeconds" . }}
{{- end -}}

{{/* root → `imagePullSecrets:` of all pods, or nothing; Helm's `global` may name some for all charts. */}}
{{- define "segue.pullSecrets" -}}
{{- $secrets := concat (default list .Values.image.pullSecrets) (dig "imagePullSecrets" list (default dict .Values.global)) -}}
{{- $named := list -}}
{{- range $secrets -}}{{- $named = append $named (kindIs "string" . | ternary (dict "name" .) .) -}}{{- end -}}
{{- with $named | uniq }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

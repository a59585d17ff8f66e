{{/* (root, role) → the Deployment of prefill or decode: they differ in name, values and the module they start. */}}
{{- define "segue.workerDeployment" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}
{{- $values := index $root.Values $role -}}
{{- $name := printf "%s-%s" (include "segue.fullname" $root) $role -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "segue.labels" . | nindent 4 }}
  {{- with include "segue.annotations" (list $root $values.annotations) }}{{ . | nindent 2 }}{{ end }}
spec:
  {{- with include "segue.replicas" . }}
  {{- . | nindent 2 }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "segue.selectorLabels" . | nindent 6 }}
  strategy:
    {{- include "segue.strategy" . | nindent 4 }}
  progressDeadlineSeconds: {{ include "segue.progressSeconds" . }}
  template:
    metadata:
      {{- include "segue.podMetadata" . | nindent 6 }}
    spec:
      {{- include "segue.podFields" (list $root $role "worker") | nindent 6 }}
      terminationGracePeriodSeconds: {{ add 15 (include "segue.drainSeconds" . | float64 | ceil | int) }}
      {{- if $root.Values.sameNodeGpuIpc.enabled }}
      hostIPC: true
      hostPID: true
      {{- end }}
      containers:
        - {{ include "segue.containerFields" (list $root $role "worker") | indent 10 | trim }}
          env:
            {{- include "segue.environment" . | nindent 12 }}
            - name: SEGUE_ADMIN_PORT
              value: {{ include "segue.adminPort" . | quote }}
            - name: SEGUE_LINKS_PORT
              value: {{ include "segue.linksPort" $role | quote }}
            - name: SEGUE_KV_TRANSPORT
              value: {{ include "segue.kvTransport" $root }}
            - name: SEGUE_KV_ALLOW_UNAUTHENTICATED_TCP
              value: {{ $root.Values.kv.allowUnauthenticatedTcp | quote }}
            - name: SEGUE_KV_PORTS
              value: {{ $root.Values.kv.ports | quote }}
            - name: SEGUE_KV_INTERFACE
              value: {{ $root.Values.kv.interface | quote }}
            - name: SEGUE_KV_DEVICES
              value: {{ default $root.Values.rdma.devices $values.rdma.devices | quote }}
            - name: SEGUE_DEVICE
              value: {{ $root.Values.device }}
            {{- if and (ne $root.Values.device "cpu") (gt ($values.gpus | int) 1) }}
            - name: SEGUE_TENSOR_PARALLEL_SIZE
              value: {{ $values.gpus | int | quote }}
            {{- end }}
            {{- if and (ne $root.Values.device "cpu") (gt (max ($root.Values.prefill.gpus | int) ($root.Values.decode.gpus | int)) 1) }}
            - name: SEGUE_KV_LAYOUT
              value: head-major-1
            {{- end }}
            - name: SEGUE_DRAIN_SECONDS
              value: {{ include "segue.drainSeconds" . | quote }}
            {{- with $values.extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            - name: admin
              containerPort: {{ include "segue.adminPort" . }}
            - name: links
              containerPort: {{ include "segue.linksPort" $role }}
            - name: kv
              containerPort: {{ splitList "-" $root.Values.kv.ports | first }}
          startupProbe:
            {{- include "segue.startupProbe" (list $root $role "/readyz") | nindent 12 }}
          readinessProbe:
            {{- include "segue.readinessProbe" $root | nindent 12 }}
          livenessProbe:
            {{- include "segue.livenessProbe" $root | nindent 12 }}
          resources:
            {{- include "segue.workerResources" . | nindent 12 }}
          securityContext:
            {{- include "segue.containerSecurityContext" . | nindent 12 }}
        {{- with include "segue.extraContainers" . }}
        {{- . | trim | nindent 8 }}
        {{- end }}
      volumes:
        {{- include "segue.volumes" . | nindent 8 }}
{{- end -}}

{{/* root → nixl or tls: a pod cannot see whether it was given RDMA on purpose, so `auto` ends here. */}}
{{- define "segue.kvTransport" -}}
{{- if ne .Values.kv.transport "auto" }}{{ .Values.kv.transport }}{{ else if .Values.rdma.enabled }}nixl{{ else }}tls{{ end -}}
{{- end -}}

{{/* (root, role, resources) → them, with requests as large as limits where `qos` says so. Init containers count, too. */}}
{{- define "segue.guaranteedResources" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}{{- $resources := index . 2 -}}
{{- if and (eq $root.Values.qos "guaranteed") (ne $role "router") -}}
{{- $own := default dict (index $root.Values $role).resources -}}
{{- $memory := dig "limits" "memory" (dig "limits" "memory" "" $own) $resources -}}
{{- $equal := dict "cpu" (dig "requests" "cpu" "" $own | toString) "memory" $memory -}}
{{- range $side := list "requests" "limits" -}}
{{- $_ := set $resources $side (mergeOverwrite (deepCopy (default dict (index $resources $side))) $equal) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* (root, role) → its resources, and the devices that `device` and `rdma` ask for. */}}
{{- define "segue.workerResources" -}}
{{- $root := index . 0 -}}
{{- $resources := deepCopy (default dict (index $root.Values (index . 1)).resources) -}}
{{- $resources = include "segue.guaranteedResources" (list $root (index . 1) $resources) | fromYaml -}}
{{- $devices := dict -}}
{{- $values := index $root.Values (index . 1) -}}
{{- if and (eq $root.Values.device "cuda") $values.gpus -}}
{{- $_ := set $devices $root.Values.gpu.resourceName ($values.gpus | int) -}}
{{- end -}}
{{- if $root.Values.rdma.enabled -}}
{{- $_ := set $devices $root.Values.rdma.resourceName (default $root.Values.rdma.perPod $values.rdma.perPod | int) -}}
{{- end -}}
{{- if $devices -}}
{{- $_ := set $resources "limits" (merge dict (default dict $resources.limits) $devices) -}}
{{- end -}}
{{- with $values.resourceClaims -}}
{{- $claims := list -}}
{{- range . -}}{{- $claims = append $claims (dict "name" .name) -}}{{- end -}}
{{- $_ := set $resources "claims" $claims -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* (root, role) → the container's security context: what all have, what a device needs, what the role says itself.
A container with a GPU may write to its root file system, since hooks of NVIDIA's container toolkit write there before it
starts. IPC_LOCK is added for root alone: Kubernetes has no ambient capabilities, so for others it would do nothing. */}}
{{- define "segue.containerSecurityContext" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}
{{- $context := deepCopy (default dict $root.Values.securityContext) -}}
{{- if ne $role "router" -}}
{{- if eq $root.Values.device "cuda" -}}
{{- $_ := set $context "readOnlyRootFilesystem" false -}}
{{- end -}}
{{- if and $root.Values.rdma.enabled $root.Values.rdma.runAsRoot -}}
{{- $_ := set $context "runAsUser" 0 -}}
{{- $_ := set $context "runAsNonRoot" false -}}
{{- $_ := set $context "capabilities" (dict "drop" (list "ALL") "add" (list "IPC_LOCK")) -}}
{{- end -}}
{{- end -}}
{{- toYaml (mergeOverwrite $context (deepCopy (default dict (index $root.Values $role).securityContext))) -}}
{{- end -}}

{{/* (root, role) → the Deployment's strategy; Kubernetes takes no rollingUpdate beside Recreate. */}}
{{- define "segue.strategy" -}}
{{- $strategy := default dict (index (index . 0).Values (index . 1)).strategy -}}
{{- if and (eq (index . 0).Values.roll "inPlace") (ne (index . 1) "router") -}}
rollingUpdate:
  maxSurge: 0
  maxUnavailable: 1
{{- else if eq (default "" $strategy.type) "Recreate" -}}
type: Recreate
{{- else -}}
{{- toYaml $strategy -}}
{{- end -}}
{{- end -}}

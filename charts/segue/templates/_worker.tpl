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
spec:
  {{- with include "segue.replicas" . }}
  {{- . | nindent 2 }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "segue.selectorLabels" . | nindent 6 }}
  strategy:
    {{- toYaml $values.strategy | nindent 4 }}
  progressDeadlineSeconds: {{ add 600 $root.Values.startupSeconds }}
  template:
    metadata:
      {{- include "segue.podMetadata" . | nindent 6 }}
    spec:
      {{- include "segue.podFields" (list $root $role "worker") | nindent 6 }}
      terminationGracePeriodSeconds: {{ add 15 (ceil $root.Values.drainSeconds | int) }}
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
              value: {{ $root.Values.rdma.devices | quote }}
            - name: SEGUE_DEVICE
              value: {{ $root.Values.device }}
            - name: SEGUE_DRAIN_SECONDS
              value: {{ $root.Values.drainSeconds | quote }}
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
            {{- include "segue.startupProbe" (list $root "/readyz") | nindent 12 }}
          readinessProbe:
            {{- include "segue.readinessProbe" $root | nindent 12 }}
          livenessProbe:
            {{- include "segue.livenessProbe" $root | nindent 12 }}
          resources:
            {{- include "segue.workerResources" . | nindent 12 }}
          securityContext:
            {{- include "segue.workerSecurityContext" $root | nindent 12 }}
      volumes:
        {{- include "segue.volumes" . | nindent 8 }}
{{- end -}}

{{/* root → nixl or tls: a pod cannot see whether it was given RDMA on purpose, so `auto` ends here. */}}
{{- define "segue.kvTransport" -}}
{{- if ne .Values.kv.transport "auto" }}{{ .Values.kv.transport }}{{ else if .Values.rdma.enabled }}nixl{{ else }}tls{{ end -}}
{{- end -}}

{{/* (root, role) → its resources, and the devices that `device` and `rdma` ask for. */}}
{{- define "segue.workerResources" -}}
{{- $root := index . 0 -}}
{{- $resources := deepCopy (default dict (index $root.Values (index . 1)).resources) -}}
{{- $devices := dict -}}
{{- if eq $root.Values.device "cuda" -}}
{{- $_ := set $devices $root.Values.gpu.resourceName ($root.Values.gpu.perPod | int) -}}
{{- end -}}
{{- if $root.Values.rdma.enabled -}}
{{- $_ := set $devices $root.Values.rdma.resourceName ($root.Values.rdma.perPod | int) -}}
{{- end -}}
{{- if $devices -}}
{{- $_ := set $resources "limits" (merge dict (default dict $resources.limits) $devices) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "segue.workerSecurityContext" -}}
{{- $context := deepCopy (default dict .Values.securityContext) -}}
{{- if .Values.rdma.enabled -}}
{{- $capabilities := default dict $context.capabilities -}}
{{- $_ := set $capabilities "add" (append (default list $capabilities.add) "IPC_LOCK" | uniq) -}}
{{- $_ := set $context "capabilities" $capabilities -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

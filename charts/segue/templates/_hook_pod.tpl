{{/* What the pods of hooks have in common, those of `helm test` and of keys: the image and the place of a router, few resources. */}}

{{- define "segue.hookPodSpec" -}}
restartPolicy: Never
enableServiceLinks: false
{{- with .Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- include "segue.pullSecrets" . }}
{{- include "segue.placement" (list . "router" "nodeSelector" "tolerations") }}
{{- end -}}

{{- define "segue.hookContainer" -}}
image: {{ include "segue.image" (list . "router") }}
imagePullPolicy: {{ include "segue.pullPolicy" (list . (include "segue.image" (list . "router"))) }}
terminationMessagePolicy: FallbackToLogsOnError
resources:
  requests:
    cpu: 50m
    memory: 128Mi
  limits:
    memory: 256Mi
{{- with .Values.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

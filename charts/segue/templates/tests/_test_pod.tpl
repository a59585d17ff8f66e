{{/* What the pods of `helm test` have in common: no token, the image and the place of a router, few resources. */}}

{{- define "segue.testPodSpec" -}}
restartPolicy: Never
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- include "segue.pullSecrets" . }}
{{- include "segue.placement" (list . "router" "nodeSelector" "tolerations") }}
{{- end -}}

{{- define "segue.testContainer" -}}
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

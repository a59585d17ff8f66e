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
{{- with (default dict .Values.router.affinity).nodeAffinity }}
affinity:
  nodeAffinity:
    {{- tpl (toYaml .) $ | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "segue.hookContainer" -}}
image: {{ include "segue.image" (list . "router") }}
imagePullPolicy: {{ include "segue.pullPolicy" (list . (include "segue.image" (list . "router"))) }}
terminationMessagePolicy: FallbackToLogsOnError
{{- /* A quota admits a pod only if it names all that the quota counts, which routers name. */}}
{{- $small := dict "requests" (dict "cpu" "50m" "memory" "128Mi") "limits" (dict "memory" "256Mi") }}
resources:
  {{- mergeOverwrite (include "segue.plainResources" (list . "router") | fromYaml) $small | toYaml | nindent 2 }}
{{- with .Values.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

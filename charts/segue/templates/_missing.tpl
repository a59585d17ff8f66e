{{/* Sections of the values that are not there: set to null, or of an older chart. A template would meet a nil pointer. */}}

{{/* All that values.yaml has, but those whose content is Kubernetes' own; a section stands behind the one that it is in. */}}
{{- define "segue.sections" -}}
modelSource modelSource.cache modelSource.cache.create modelSource.hub modelSource.fetch modelSource.image modelSource.pvc gpu image
auth links keys placement kv rdma sameNodeGpuIpc router router.image router.service router.tls router.ingress router.httpRoute
router.serviceAccount worker worker.image worker.serviceAccount prefill prefill.rdma prefill.image decode decode.rdma decode.image rbac
podDisruptionBudget networkPolicy networkPolicy.egress monitoring monitoring.podMonitor monitoring.rules monitoring.slo
monitoring.dashboard inferencePool inferencePool.endpointPicker
{{- end -}}

{{- define "segue.refuseMissing" -}}
{{- range $path := regexSplit "\\s+" (include "segue.sections" .) -1 -}}
{{- $section := $.Values -}}
{{- range splitList "." $path -}}{{- $section = index $section . -}}{{- end -}}
{{- if not (kindIs "map" $section) -}}
{{- fail (printf "%s is not there: leave it out of your values, and the chart's own count. If an upgrade says so, `--reuse-values` has kept the values of an older chart, which had no such section: say --reset-then-reuse-values, or give your values again (--values)" $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Settings and values that have other names now, or have gone: the old ones are refused with the new one, as processes do it
(shared/process/settings.py). The schema lets the old ones through, so that a person reads this sentence. */}}
{{- define "segue.refuseRenamed" -}}
{{- range $role := list "router" "prefill" "decode" -}}
{{- range $old, $new := dict "overtakesMax" "backfillMax" -}}
{{- if hasKey (default dict (index $.Values $role).config) $old -}}
{{- fail (printf "%s.config.%s is called %s.config.%s now" $role $old $role $new) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if hasKey (default dict .Values.router.config) "readySecondsMax" -}}
{{- fail "router.config.readySecondsMax has gone: a stream that has begun waits for room as long as it takes; leave it out" -}}
{{- end -}}
{{- if hasKey .Values.gpu "perPod" -}}
{{- fail "gpu.perPod is called prefill.gpus and decode.gpus now, one for each role" -}}
{{- end -}}
{{- if eq .Values.kv.transport "sealed" -}}
{{- fail "kv.transport sealed is called tls now" -}}
{{- end -}}
{{- end -}}

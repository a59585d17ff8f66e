{{/* What Prometheus' operator and Grafana's sidecar are given. */}}

{{/* (root, extra labels) → labels of such an object: those by which an operator selects come last. */}}
{{- define "segue.monitoringLabels" -}}
{{- merge (dict) (default dict (index . 1)) (include "segue.labels" (list (index . 0) "monitoring") | fromYaml) | toYaml -}}
{{- end -}}

{{/* The roles without which nothing is served: decode workers compute prompts, too, unless they may not. */}}
{{- define "segue.neededRoles" -}}
{{- ternary "prefill|decode" "decode" (eq (dig "localPrefill" "" (default dict .Values.router.config)) "never") -}}
{{- end -}}

{{/* Where docs/alerts.md is read: an anchor of it is an alert. */}}
{{- define "segue.runbookUrl" -}}
{{- $page := "docs/alerts.md" -}}
{{- with .Chart.Home }}{{ $page = printf "%s/blob/main/docs/alerts.md" (trimSuffix "/" .) }}{{ end -}}
{{- default $page .Values.monitoring.rules.runbookUrl -}}
{{- end -}}

{{/* The groups of rules of this release, out of files/rules.yaml. */}}
{{- define "segue.ruleGroups" -}}
{{- $rules := .Values.monitoring.rules -}}{{- $slo := .Values.monitoring.slo -}}
{{- $mine := dict "namespace" .Release.Namespace "segue_release" .Release.Name -}}
{{- $text := .Files.Get "files/rules.yaml" -}}
{{- $text = $text | replace "<release>" (printf "namespace=%q,segue_release=%q" .Release.Namespace .Release.Name) -}}
{{- $text = $text | replace "<roles>" (include "segue.neededRoles" .) -}}
{{- $text = $text | replace "<ttft>" (toJson $slo.ttftSeconds) | replace "<itl>" (toJson $slo.itlSeconds) | replace "<lag>" (toJson $slo.loopLagSeconds) -}}
{{- $when := dict "rdma" .Values.rdma.enabled -}}
{{- $runbooks := include "segue.runbookUrl" . -}}
{{- $groups := list -}}
{{- range $group := (fromYaml $text).groups -}}
{{- $kept := list -}}
{{- range $rule := $group.rules -}}
{{- if or (not $rule.when) (get $when (toString $rule.when)) -}}
{{- $_ := set $rule "labels" (merge (dict) (default dict $rule.labels) $mine) -}}
{{- if $rule.alert -}}
{{- $_ := set $rule.annotations "runbook_url" (printf "%s#%s" $runbooks (lower $rule.alert)) -}}
{{- end -}}
{{- if and (hasKey $rule "for") $rules.for -}}{{- $_ := set $rule "for" $rules.for -}}{{- end -}}
{{- $kept = append $kept (omit $rule "when") -}}
{{- end -}}
{{- end -}}
{{- $groups = append $groups (dict "name" (printf "%s.%s.%s" $.Release.Namespace (include "segue.fullname" $) $group.name) "rules" $kept) -}}
{{- end -}}
{{- toYaml $groups -}}
{{- end -}}

{{/* Values by which a release would install and never serve, never roll or never be found: one sentence each. */}}
{{- define "segue.refuseDeadPods" -}}
{{- $own := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" -}}
{{- range $of, $labels := dict "commonLabels" .Values.commonLabels "router.podLabels" .Values.router.podLabels "prefill.podLabels" .Values.prefill.podLabels "decode.podLabels" .Values.decode.podLabels -}}
{{- range $key, $value := default dict $labels -}}
{{- if has $key $own -}}
{{- fail (printf "%s sets %s, by which Services, policies and budgets of this release find its pods: take another key" $of $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.podDisruptionBudget.enabled (regexMatch "^0+%?$" (toString .Values.podDisruptionBudget.maxUnavailable)) -}}
{{- fail (printf "podDisruptionBudget.maxUnavailable is %v, so no pod could be evicted and the drain of a node would wait for ever: give at least 1, or set podDisruptionBudget.enabled to false" .Values.podDisruptionBudget.maxUnavailable) -}}
{{- end -}}
{{- range $role := list "router" "prefill" "decode" -}}
{{- if and (index $.Values $role).hostNetwork $.Values.networkPolicy.enabled -}}
{{- fail (printf "%s.hostNetwork gives pods the addresses of their nodes, which network policies do not know as pods, so routers and workers could not reach each other: set networkPolicy.enabled to false, and close the ports by other means" $role) -}}
{{- end -}}
{{- $strategy := default dict (index $.Values $role).strategy -}}
{{- $rolling := default dict $strategy.rollingUpdate -}}
{{- if and (ne (default "RollingUpdate" $strategy.type) "Recreate") (has (toString $rolling.maxSurge) (list "0" "0%")) (has (toString $rolling.maxUnavailable) (list "0" "0%")) -}}
{{- fail (printf "%s.strategy.rollingUpdate has maxSurge and maxUnavailable 0, so no pod could ever be replaced: give one of them at least 1" $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* `roll: inPlace` beside what speaks against it. */}}
{{- define "segue.refuseRoll" -}}
{{- if eq .Values.roll "inPlace" -}}
{{- $usual := dict "rollingUpdate" (dict "maxSurge" 1 "maxUnavailable" 0) | toJson -}}
{{- range $role := list "prefill" "decode" -}}
{{- with (index $.Values $role).strategy -}}
{{- if ne (toJson .) $usual -}}
{{- fail (printf "roll is inPlace, which says how workers are replaced, and so does %s.strategy: leave one of them out" $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $start := include "segue.startupSeconds" (list . "decode") | int -}}
{{- $return := dig "workerReturnSeconds" 60.0 (default dict .Values.router.config) | float64 -}}
{{- if and (eq (toString .Values.decode.replicas) "1") (lt $return (float64 $start)) -}}
{{- fail (printf "roll is inPlace and decode.replicas is 1, so streams have nowhere to go while the only pod is replaced, which may take %d s, and router.config.workerReturnSeconds ends them after %v: set decode.replicas to 2, or raise workerReturnSeconds" $start $return) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Times of one process that another one, or the kubelet, does not wait for. Defaults are those of the processes. */}}
{{- define "segue.refuseTimes" -}}
{{- $router := default dict .Values.router.config -}}
{{- range $role := list "router" "prefill" "decode" -}}
{{- $config := default dict (index $.Values $role).config -}}
{{- $heartbeat := dig "heartbeatSeconds" 1.0 $config | float64 -}}
{{- if ge $heartbeat (float64 $.Values.silenceSeconds) -}}
{{- fail (printf "%s.config.heartbeatSeconds is %v, but a peer that is silent for silenceSeconds (%v) counts as lost, so links would break all the time: keep it at a third of silenceSeconds" $role $heartbeat $.Values.silenceSeconds) -}}
{{- end -}}
{{- $start := include "segue.startupSeconds" (list $ $role) | int -}}
{{- if lt $start 30 -}}
{{- fail (printf "the startup seconds of %s are %d, but a process alone takes some seconds to begin, and more on a busy node, so its pod would be killed again and again: give at least 30" $role $start) -}}
{{- end -}}
{{- if ne $role "router" -}}
{{- $lease := dig "leaseSeconds" 10.0 $config | float64 -}}
{{- $renew := dig "renewSeconds" 1.0 $router | float64 -}}
{{- if ge (mulf 2 $renew) $lease -}}
{{- fail (printf "router.config.renewSeconds is %v and %s.config.leaseSeconds is %v: several renewals must fit into a lease, or requests are lost while they wait; make the lease at least three times as long" $renew $role $lease) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $waiting := dig "waitingSecondsMax" 30.0 $router | float64 -}}
{{- $start := include "segue.startupSeconds" (list . "decode") | float64 -}}
{{- if and (eq (toString .Values.decode.replicas) "0") (ne (toString .Values.router.replicas) "0") (lt $waiting $start) -}}
{{- fail (printf "decode.replicas is 0, and a pod may take %v s to start, but router.config.waitingSecondsMax is %v, so whoever asks first would get 503: set it to at least the startup seconds, or router.replicas to 0, too, for a release that is parked" $start $waiting) -}}
{{- end -}}
{{- end -}}

{{/* (root, role) → seconds in which a pod may load its model: its own, those of all, or what the device takes. */}}
{{- define "segue.startupSeconds" -}}
{{- $root := index . 0 -}}
{{- $usual := ternary 1800 600 (and (eq $root.Values.device "cuda") (ne (index . 1) "router")) -}}
{{- $own := (index $root.Values (index . 1)).startupSeconds -}}
{{- if kindIs "invalid" $own -}}{{- $own = $root.Values.startupSeconds -}}{{- end -}}
{{- if kindIs "invalid" $own -}}{{- $own = $usual -}}{{- end -}}
{{- int $own -}}
{{- end -}}

{{/* (root, role) → seconds after which a Deployment counts as failed, to Flux and to `kubectl rollout status`: what a pod takes to be
scheduled, to fetch its model (100 GB in two hours are 14 MB a second) and to load it. */}}
{{- define "segue.progressSeconds" -}}
{{- $fetched := has (include "segue.modelKind" (index . 0)) (list "hub" "fetch") -}}
{{- add 600 (ternary 7200 0 $fetched) (include "segue.startupSeconds" . | int) -}}
{{- end -}}

{{/* (root, role) → seconds in which its requests end or migrate. */}}
{{- define "segue.drainSeconds" -}}
{{- $own := (index (index . 0).Values (index . 1)).drainSeconds -}}
{{- if kindIs "invalid" $own -}}{{- (index . 0).Values.drainSeconds -}}{{- else -}}{{- $own -}}{{- end -}}
{{- end -}}

{{/* root → whether it is installed without a pod: `kubectl scale` starts it. */}}
{{- define "segue.isParked" -}}
{{- $all := list -}}
{{- range $role := list "router" "prefill" "decode" -}}{{- $all = append $all (toString (index $.Values $role).replicas) -}}{{- end -}}
{{- if eq (uniq $all | join "") "0" }}true{{ end -}}
{{- end -}}

{{/* Values that are each allowed and together mean nothing: one sentence each, before anything is rendered. */}}
{{- define "segue.refuseContradictions" -}}
{{- include "segue.refuseRenamed" . -}}
{{- include "segue.refuseModel" . -}}
{{- include "segue.refuseDevices" . -}}
{{- include "segue.refuseDeadPods" . -}}
{{- include "segue.refuseTimes" . -}}
{{- include "segue.refuseRoll" . -}}
{{- include "segue.refuseBodies" . -}}
{{- include "segue.refuseRequests" . -}}
{{- if and .Values.image.digest (ne .Values.router.image.repository .Values.worker.image.repository) (not (and .Values.router.image.digest .Values.worker.image.digest)) -}}
{{- fail "image.digest names one image, but router.image.repository and worker.image.repository are two: set router.image.digest and worker.image.digest" -}}
{{- end -}}
{{- if ne (empty .Values.links.routerSecret) (empty .Values.links.workerSecret) -}}
{{- fail "links.routerSecret and links.workerSecret belong together: name both, or neither, and the chart makes both" -}}
{{- end -}}
{{- range $of := list "router" "worker" -}}
{{- $given := index $.Values.links (printf "%sSecret" $of) -}}
{{- if eq $given (printf "%s-links-%s" (include "segue.fullname" $) $of) -}}
{{- fail (printf "links.%sSecret is %s, the name of the Secret that this chart makes without it, and would then remove: give yours another name" $of $given) -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.auth.existingSecret (printf "%s-api-keys" (include "segue.fullname" .)) -}}
{{- fail (printf "auth.existingSecret is %s, the name of the Secret that this chart makes without it, and would then remove: give yours another name" .Values.auth.existingSecret) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "segue.fullname" .)) -}}
{{- fail (printf "%s cannot be the beginning of a Service's name (lower case letters, digits and -): choose another name for the release, or set fullnameOverride" (include "segue.fullname" .)) -}}
{{- end -}}
{{- if not (regexMatch "^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$" (include "segue.name" .)) -}}
{{- fail (printf "nameOverride is %s, which cannot be the value of a label (letters, digits, - _ and . between them): give another one" (include "segue.name" .)) -}}
{{- end -}}
{{- range $setting := list "pageSize" "kvCacheDtype" "dtype" -}}
{{- $prefill := get (default dict $.Values.prefill.config) $setting | toString -}}
{{- $decode := get (default dict $.Values.decode.config) $setting | toString -}}
{{- if ne $prefill $decode -}}
{{- fail (printf "prefill.config.%s is %s and decode.config.%s is %s: decode fetches pages only of its own KV format, so no request could be served" $setting (default "not set" $prefill) $setting (default "not set" $decode)) -}}
{{- end -}}
{{- end -}}
{{- include "segue.refuseOpenKv" . -}}
{{- $kv := splitList "-" .Values.kv.ports -}}
{{- if and (eq (include "segue.kvTransport" .) "nixl") (lt (sub (last $kv | int) (first $kv | int)) 1) -}}
{{- fail (printf "kv.ports %s is one port, but KV travels by nixl, which needs two for each interface: give a range" .Values.kv.ports) -}}
{{- end -}}
{{- $each := ternary 2 1 (eq (include "segue.kvTransport" .) "nixl") -}}
{{- range $role := list "prefill" "decode" -}}
{{- $gpus := (index $.Values $role).gpus | int -}}
{{- if and (ne $.Values.device "cpu") (gt $gpus 1) (lt (add1 (sub (last $kv | int) (first $kv | int)) | int) (mul $each $gpus | int)) -}}
{{- fail (printf "kv.ports %s are %d, but %s.gpus is %d, and each GPU of a worker takes %d of them: give a longer range" $.Values.kv.ports (add1 (sub (last $kv | int) (first $kv | int))) $role $gpus $each) -}}
{{- end -}}
{{- end -}}
{{- if or (gt (first $kv | int) (last $kv | int)) (gt (last $kv | int) 65535) (lt (first $kv | int) 1024) -}}
{{- fail (printf "kv.ports must be a range within 1024-65535, first before last, not %s" .Values.kv.ports) -}}
{{- end -}}
{{- if gt (sub (last $kv | int) (first $kv | int)) 63 -}}
{{- fail (printf "kv.ports %s are more than the 64 that a network policy lists one by one" .Values.kv.ports) -}}
{{- end -}}
{{- if and (le (first $kv | int) 8002) (ge (last $kv | int) 8001) -}}
{{- fail (printf "kv.ports %s contains 8001 or 8002, where workers listen for probes and links" .Values.kv.ports) -}}
{{- end -}}
{{- range $role := list "router" "prefill" "decode" -}}
{{- range (index $.Values $role).extraEnv -}}
{{- if hasPrefix "SEGUE_" .name -}}
{{- fail (printf "%s.extraEnv sets %s: settings of Segue belong into %s.config, or are values of this chart" $role .name $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $account := include "segue.serviceAccount" (list . "router") -}}
{{- if and .Values.router.serviceAccount.create .Values.worker.serviceAccount.create (eq $account (include "segue.serviceAccount" (list . "worker"))) -}}
{{- fail (printf "router.serviceAccount.name and worker.serviceAccount.name are both %s, but workers may not ask the API server, as routers may: give two names" $account) -}}
{{- end -}}
{{- if and (not .Values.rbac.create) (not .Values.router.serviceAccount.name) -}}
{{- fail "rbac.create is false, and router.serviceAccount.name is empty: name the account that you have allowed to list and watch endpointslices" -}}
{{- end -}}
{{- if and .Values.monitoring.podMonitor.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.metricsFrom) -}}
{{- fail "monitoring.podMonitor.enabled, but networkPolicy.metricsFrom is empty: name the pods or the namespace of Prometheus there, or it could reach no pod" -}}
{{- end -}}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPicker.name) -}}
{{- fail "inferencePool.enabled, but inferencePool.endpointPicker.name is empty: name the Service of your endpoint picker" -}}
{{- end -}}
{{- if and .Values.inferencePool.enabled (not (default dict .Values.router.config).metricsOnApiPort) -}}
{{- fail "inferencePool.enabled, but router.config.metricsOnApiPort is false: the endpoint picker would find no metrics at the pool's port; set it to true" -}}
{{- end -}}
{{- range $ports := list "apiServerPorts" "dnsPorts" -}}
{{- if and $.Values.networkPolicy.enabled $.Values.networkPolicy.egress.enabled (not (index $.Values.networkPolicy.egress $ports)) -}}
{{- fail (printf "networkPolicy.egress.%s is empty, which to Kubernetes means every port: name the ports, or set networkPolicy.egress.enabled to false" $ports) -}}
{{- end -}}
{{- end -}}
{{- $clients := .Values.networkPolicy.clientsFrom -}}
{{- range $edge := list "ingress" "httpRoute" -}}
{{- if and (index $.Values.router $edge).enabled $.Values.networkPolicy.enabled (not (regexMatch "\"(ipBlock|namespaceSelector)\":" (toJson $clients))) -}}
{{- fail (printf "router.%s.enabled, but networkPolicy.clientsFrom admits pods of this namespace alone: add the namespace of its controller, or no client could connect" $edge) -}}
{{- end -}}
{{- if and (index $.Values.router $edge).enabled (default dict $.Values.router.config).metricsOnApiPort -}}
{{- fail (printf "router.%s.enabled sends every path of the API's port outside, and router.config.metricsOnApiPort serves /metrics there without a key: leave one of them off" $edge) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.router.httpRoute.enabled (not .Values.router.httpRoute.parentRefs) -}}
{{- fail "router.httpRoute.enabled, but router.httpRoute.parentRefs is empty: name the Gateway" -}}
{{- end -}}
{{- if and (ne .Values.router.service.type "ClusterIP") .Values.networkPolicy.enabled (not (regexMatch "\"ipBlock\":\\{" (toJson $clients))) -}}
{{- fail (printf "router.service.type is %s, but networkPolicy.clientsFrom admits no address, so no client could connect: add an ipBlock ({ipBlock: {cidr: 0.0.0.0/0}} is every IPv4 address)" .Values.router.service.type) -}}
{{- end -}}
{{- if and .Values.router.service.nodePort (eq .Values.router.service.type "ClusterIP") -}}
{{- fail "router.service.nodePort is given, but router.service.type is ClusterIP, which has none" -}}
{{- end -}}
{{- include "segue.refuseKeys" . -}}
{{- end -}}

{{/* What lets strangers at the workers' memory is never on without a value that says so. */}}
{{- define "segue.refuseOpenKv" -}}
{{- if and .Values.rdma.enabled (not .Values.rdma.acknowledgeOpenFabric) -}}
{{- fail "rdma.enabled opens the workers' memory to everybody on the RDMA fabric, which network policies do not filter: give this release a partition (pkey), VLAN or virtual functions of its own, and set rdma.acknowledgeOpenFabric" -}}
{{- end -}}
{{- if and .Values.rdma.enabled (not .Values.rdma.devices) (not (and .Values.prefill.rdma.devices .Values.decode.rdma.devices)) -}}
{{- fail "rdma.enabled claims a device, but rdma.devices is empty, so KV would not use it: name it with its port, as in mlx5_0:1" -}}
{{- end -}}
{{- if and .Values.rdma.devices (not .Values.rdma.enabled) -}}
{{- fail (printf "rdma.devices is %s, but rdma.enabled is false, so no pod has the device: set rdma.enabled, or leave rdma.devices empty" .Values.rdma.devices) -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $devices := (index $.Values $role).rdma.devices -}}
{{- if and $devices (not $.Values.rdma.enabled) -}}
{{- fail (printf "%s.rdma.devices is %s, but rdma.enabled is false, so no pod has the device: set rdma.enabled" $role $devices) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.rdma.runAsRoot (not .Values.rdma.enabled) -}}
{{- fail "rdma.runAsRoot lets workers pin memory for RDMA, but rdma.enabled is false: leave it false" -}}
{{- end -}}
{{- if and .Values.rdma.enabled (eq .Values.kv.transport "tls") -}}
{{- fail "rdma.enabled claims a device, but kv.transport is tls, which uses TCP: leave kv.transport at auto" -}}
{{- end -}}
{{- if and (eq .Values.kv.transport "nixl") (not .Values.rdma.enabled) (not .Values.kv.allowUnauthenticatedTcp) -}}
{{- fail "kv.transport is nixl and rdma.enabled is false, so whoever reaches kv.ports could write all memory of a worker: leave kv.transport at auto, or set kv.allowUnauthenticatedTcp" -}}
{{- end -}}
{{- end -}}

{{/* What requests may take leaves the router half of its memory. The default is that of the process. */}}
{{- define "segue.refuseBodies" -}}
{{- $bodies := dig "routerBytesMax" 268435456 (default dict .Values.router.config) -}}
{{- $memory := dig "limits" "memory" "" (default dict .Values.router.resources) -}}
{{- if and $memory (gt (mulf 2 (float64 $bodies)) (include "segue.bytes" $memory | float64)) -}}
{{- fail (printf "router.config.routerBytesMax is %d, more than half of router.resources.limits.memory, which is %v: lower the one or raise the other, the router needs memory for more than requests" (int64 $bodies) $memory) -}}
{{- end -}}
{{- end -}}

{{/* A size as Kubernetes writes it (1Gi, 500M, 1e9), in bytes. */}}
{{- define "segue.bytes" -}}
{{- $number := regexFind "^[0-9.]+([eE][+-]?[0-9]+)?" (toString .) -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf (float64 $number) (get $units (trimPrefix $number (toString .)) | default 1000000000000 | float64) -}}
{{- end -}}

{{- define "segue.refuseModel" -}}
{{- $kind := include "segue.modelKind" . -}}{{- $source := .Values.modelSource -}}
{{- if and (eq $kind "pvc") (not $source.pvc.claimName) -}}
{{- fail "modelSource.kind is pvc, but modelSource.pvc.claimName is empty" -}}
{{- end -}}
{{- if and $source.pvc.claimName (ne $kind "pvc") -}}
{{- fail (printf "modelSource.pvc.claimName is given, but the model %s comes from modelSource.kind %s: set it to pvc" .Values.model $kind) -}}
{{- end -}}
{{- if and (eq $kind "hub") (not (regexMatch "^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+$" .Values.model)) -}}
{{- fail (printf "model %s is no id on the Hub (owner/name), which modelSource.kind hub asks for" .Values.model) -}}
{{- end -}}
{{- if and (eq $kind "hub") (not (regexMatch "^[0-9a-f]{40}$" $source.hub.revision)) (not $source.hub.allowMovingRevision) -}}
{{- fail (printf "modelSource.hub.revision is %s, which can move, so that pods that start later serve other weights: give the hash of a commit (40 hexadecimal digits), or set modelSource.hub.allowMovingRevision to true" $source.hub.revision) -}}
{{- end -}}
{{- include "segue.refuseModelCache" . -}}
{{- include "segue.refuseFetch" . -}}
{{- if and (eq $kind "path") (not (hasPrefix "/" .Values.model)) -}}
{{- fail (printf "model %s is no folder (/…), which modelSource.kind path asks for" .Values.model) -}}
{{- end -}}
{{- include "segue.refuseModelImage" . -}}
{{- end -}}

{{/* An image of a model has a life of its own: Segue's tag is that of the demo's alone. */}}
{{- define "segue.refuseModelImage" -}}
{{- $kind := include "segue.modelKind" . -}}{{- $image := .Values.modelSource.image -}}
{{- $used := has $kind (list "image" "imageVolume") -}}
{{- if and $used (not $image.repository) (not (regexMatch "^[A-Za-z0-9][A-Za-z0-9._-]*$" .Values.model)) -}}
{{- fail (printf "modelSource.image.repository is empty, and model %s cannot be part of an image's name" .Values.model) -}}
{{- end -}}
{{- if and $used (not $image.tag) (not $image.digest) (or $image.repository (ne .Values.model "smollm2")) -}}
{{- fail (printf "modelSource.image has neither tag nor digest, so %s would be asked for with the tag of Segue, and anew with each release: give the model's image a tag or a digest of its own" (include "segue.modelImage" .)) -}}
{{- end -}}
{{- if and $image.pullPolicy (not $used) -}}
{{- fail (printf "modelSource.image.pullPolicy is %s, but the model %s comes from modelSource.kind %s, which pulls no image of it: leave it empty" $image.pullPolicy .Values.model $kind) -}}
{{- end -}}
{{- end -}}

{{/* What several pods share of a model, and what a pod without that needs. */}}
{{- define "segue.refuseModelCache" -}}
{{- $kind := include "segue.modelKind" . -}}{{- $source := .Values.modelSource -}}{{- $cache := $source.cache -}}
{{- $fetched := has $kind (list "hub" "fetch") -}}
{{- $given := list -}}
{{- range $name, $value := dict "claimName" $cache.claimName "create.size" $cache.create.size "hostPath" $cache.hostPath -}}
{{- if $value -}}{{- $given = append $given (printf "modelSource.cache.%s" $name) -}}{{- end -}}
{{- end -}}
{{- if gt (len $given) 1 -}}
{{- fail (printf "%s are given, but a model has one cache: leave one of them" (join " and " $given)) -}}
{{- end -}}
{{- if and $given (not $fetched) -}}
{{- fail (printf "%s is given, but modelSource.kind is %s, of which nothing is fetched: a cache is for the kinds hub and fetch" (first $given) $kind) -}}
{{- end -}}
{{- if and $cache.create.storageClass (not $cache.create.size) -}}
{{- fail "modelSource.cache.create.storageClass is given, but modelSource.cache.create.size is empty: give the size of the claim" -}}
{{- end -}}
{{- if and $given (eq $kind "hub") $source.hub.allowMovingRevision (not (regexMatch "^[0-9a-f]{40}$" $source.hub.revision)) -}}
{{- fail (printf "modelSource.hub.revision is %s, which can move, but %s keeps what was fetched first: give the hash of a commit" $source.hub.revision (first $given)) -}}
{{- end -}}
{{- if and $given $source.sizeLimit -}}
{{- fail (printf "modelSource.sizeLimit bounds an emptyDir, but the model goes into %s: leave it out" (first $given)) -}}
{{- end -}}
{{- if and $fetched (not $given) (not $source.sizeLimit) -}}
{{- fail (printf "modelSource.sizeLimit is empty: each pod writes %s to its node's disk, so give what its files weigh and some more, or modelSource.cache, which all pods share" .Values.model) -}}
{{- end -}}
{{- if and (eq $kind "hostPath") (not $source.hostPath) -}}
{{- fail "modelSource.kind is hostPath, but modelSource.hostPath is empty" -}}
{{- end -}}
{{- if and $source.hostPath (ne $kind "hostPath") -}}
{{- fail (printf "modelSource.hostPath is given, but the model %s comes from modelSource.kind %s: set it to hostPath" .Values.model $kind) -}}
{{- end -}}
{{- if and (eq $kind "imageVolume") (semverCompare "<1.31.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "modelSource.kind imageVolume asks for Kubernetes 1.31 or newer, and this is %s: use image" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and $source.image.folder (ne $kind "imageVolume") -}}
{{- fail (printf "modelSource.image.folder is a folder in an imageVolume, but modelSource.kind is %s" $kind) -}}
{{- end -}}
{{- end -}}

{{/* A command of the user's, and what is converted. */}}
{{- define "segue.refuseFetch" -}}
{{- $kind := include "segue.modelKind" . -}}{{- $source := .Values.modelSource -}}{{- $fetch := $source.fetch -}}
{{- if and (eq $kind "fetch") (or (not $fetch.image) (not $fetch.command)) -}}
{{- fail "modelSource.kind is fetch, but modelSource.fetch.image or modelSource.fetch.command is empty" -}}
{{- end -}}
{{- if and (ne $kind "fetch") (or $fetch.image $fetch.command $fetch.routerCommand) -}}
{{- fail (printf "modelSource.fetch is given, but the model %s comes from modelSource.kind %s: set it to fetch" .Values.model $kind) -}}
{{- end -}}
{{- if and (eq $kind "fetch") (not (regexMatch "^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*$" .Values.model)) -}}
{{- fail (printf "model %s is no name, which modelSource.kind fetch asks for: clients call the model so, and its folder in the cache, too (letters, digits, . _ - and / between them)" .Values.model) -}}
{{- end -}}
{{- if and (eq $kind "fetch") (not (include "segue.modelCache" .)) (not $fetch.routerCommand) -}}
{{- fail "modelSource.kind is fetch without modelSource.cache, so each router would fetch all weights: give a cache, or modelSource.fetch.routerCommand, which leaves them out" -}}
{{- end -}}
{{- if and $source.gguf (not (has $kind (list "hub" "fetch"))) -}}
{{- fail (printf "modelSource.gguf is given, but modelSource.kind is %s: GGUF files are converted of the kinds hub and fetch" $kind) -}}
{{- end -}}
{{- if and $source.gguf (not (include "segue.modelCache" .)) -}}
{{- fail "modelSource.gguf is given without modelSource.cache, so each pod would convert it anew: give a cache" -}}
{{- end -}}
{{- if and $source.gguf (not (dig "limits" "memory" "" (default dict $source.resources))) -}}
{{- fail "modelSource.gguf is given, but modelSource.resources.limits.memory is empty: converting takes up to 24 bytes for each byte of the file, and 4Gi beside that" -}}
{{- end -}}
{{- range $source.extraEnv -}}
{{- if hasPrefix "SEGUE_" .name -}}
{{- fail (printf "modelSource.extraEnv sets %s: what fetches a model takes no settings by variables" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What the API server would refuse after half of the release is there. */}}
{{- define "segue.refuseRequests" -}}
{{- range $role := list "router" "prefill" "decode" -}}
{{- $resources := default dict (index $.Values $role).resources -}}
{{- $asked := dig "requests" "memory" "" $resources -}}{{- $most := dig "limits" "memory" "" $resources -}}
{{- if and $asked $most (gt (include "segue.bytes" $asked | float64) (include "segue.bytes" $most | float64)) -}}
{{- fail (printf "%s.resources.requests.memory is %v and limits.memory is %v, which Kubernetes refuses: raise the limit, too" $role $asked $most) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "segue.refuseDevices" -}}
{{- range $role := list "prefill" "decode" -}}
{{- $limits := dig "limits" dict (default dict (index $.Values $role).resources) | default dict -}}
{{- $config := default dict (index $.Values $role).config -}}
{{- if and (ne $.Values.device "cuda") (hasKey $limits $.Values.gpu.resourceName) -}}
{{- fail (printf "%s.resources asks for %s, but device is %s: set device to cuda" $role $.Values.gpu.resourceName $.Values.device) -}}
{{- end -}}
{{- if hasKey $limits $.Values.gpu.resourceName -}}
{{- fail (printf "%s.resources asks for %s, which is said by %s.gpus: leave it out of the resources" $role $.Values.gpu.resourceName $role) -}}
{{- end -}}
{{- $gpus := (index $.Values $role).gpus | int -}}
{{- if and (eq $.Values.device "cpu") (gt $gpus 1) -}}
{{- fail (printf "%s.gpus is %d, but device is cpu, where a worker has no GPU: set device to cuda, or leave it at 1" $role $gpus) -}}
{{- end -}}
{{- if and (eq $.Values.device "cuda") (eq $gpus 0) (not (index $.Values $role).resourceClaims) -}}
{{- fail (printf "%s.gpus is 0 and %s.resourceClaims is empty, but device is cuda: the pod would have no GPU; set one of them" $role $role) -}}
{{- end -}}
{{- if and (eq $.Values.device "cuda") $limits.memory (lt (include "segue.bytes" $limits.memory | float64) 8589934592.0) -}}
{{- fail (printf "%s.resources.limits.memory is %v, but device is cuda: CUDA and the loading of weights alone take some GiB; give at least 8Gi, and what %s.config.hostFraction adds, with requests to match (ci/gpu.yaml has 32Gi)" $role $limits.memory $role) -}}
{{- end -}}
{{- if and (ne $.Values.device "cuda") (not $limits.memory) (not $config.memoryBytes) (not $config.kvPages) -}}
{{- fail (printf "%s.resources.limits.memory is empty: it sizes the KV pool, and without it a pod takes half of its node; set it, %s.config.memoryBytes or %s.config.kvPages" $role $role $role) -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.qos "guaranteed" -}}
{{- range $role := list "prefill" "decode" -}}
{{- $resources := default dict (index $.Values $role).resources -}}
{{- $cpu := dig "requests" "cpu" "" $resources | toString -}}
{{- if not (regexMatch "^[1-9][0-9]*$" $cpu) -}}
{{- fail (printf "qos is guaranteed, but %s.resources.requests.cpu is %s: a node gives whole cores alone to a pod of its own, so ask for a whole number of them" $role (default "empty" $cpu)) -}}
{{- end -}}
{{- if ne (dig "limits" "cpu" $cpu $resources | toString) $cpu -}}
{{- fail (printf "qos is guaranteed, but %s.resources.limits.cpu is not what requests.cpu asks for: leave it out" $role) -}}
{{- end -}}
{{- if not (dig "limits" "memory" "" $resources) -}}
{{- fail (printf "qos is guaranteed, but %s.resources.limits.memory is empty: give it" $role) -}}
{{- end -}}
{{- range $of := list "extraContainers" "extraInitContainers" -}}
{{- range index $.Values $role $of -}}
{{- $limits := dig "resources" "limits" dict . | default dict -}}
{{- if not (and $limits.cpu $limits.memory) -}}
{{- fail (printf "qos is guaranteed, but container %s of %s.%s has no limits of CPU and memory, so the pod would not be: give it both, with equal requests" .name $role $of) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq (toString .Values.prefill.replicas) "0" -}}
{{- if eq (dig "localPrefill" "" (default dict .Values.router.config)) "never" -}}
{{- fail "prefill.replicas is 0 and router.config.localPrefill is never: nobody would compute prompts; change one of them" -}}
{{- end -}}
{{- if eq (toString (dig "localTokensMax" 1 (default dict .Values.decode.config))) "0" -}}
{{- fail "prefill.replicas is 0 and decode.config.localTokensMax is 0: nobody would compute prompts; change one of them" -}}
{{- end -}}
{{- end -}}
{{- $shared := .Values.sameNodeGpuIpc -}}
{{- if and $shared.enabled (ne .Values.device "cuda") -}}
{{- fail "sameNodeGpuIpc shares GPU memory between pods, but device is not cuda" -}}
{{- end -}}
{{- if and $shared.enabled (ne (include "segue.kvTransport" .) "nixl") -}}
{{- fail "sameNodeGpuIpc lets NIXL read GPU memory of another pod, but kv.transport ends up as tls, which is TCP: set kv.transport to nixl" -}}
{{- end -}}
{{- if and $shared.enabled (not $shared.runAsUser) -}}
{{- fail "sameNodeGpuIpc shares the host's processes, where one user id reads the memory and keys of all its processes: set sameNodeGpuIpc.runAsUser to a user id that no other release or workload on these nodes has" -}}
{{- end -}}
{{- if and $shared.enabled (eq (toString .Values.hostUsers) "false") -}}
{{- fail "hostUsers is false, but sameNodeGpuIpc takes the host's processes: Kubernetes refuses both together" -}}
{{- end -}}
{{- end -}}

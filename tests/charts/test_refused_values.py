"""Values that the chart refuses, by their key or in a sentence, and those at the edge that it takes."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic.alias_generators import to_camel

from router.config import RouterConfig
from shared.local.config import ROLE_CONFIGS
from shared.process import settings
from tests.charts.rendering import CHART, CUDA, RefusedError, manifest, objects, run_helm

# What a person types → words of the answer; the key is always among them.
MISTAKES = {
    "replica=3": ["replica", "not allowed"],
    "decode.replica=3": ["/decode", "replica", "not allowed"],
    "decode.replicas=-1": ["/decode/replicas", "minimum"],
    "decode.replicas=two": ["/decode/replicas", "want"],
    "device=tpu": ["/device", "cpu", "cuda"],
    "model=": ["/model", "minLength"],
    "model=null": ["model"],
    "decode.config.slotz=8": ["/decode/config", "slotz", "not allowed"],
    "decode.config.maxRunningRequests=0": ["/decode/config/maxRunningRequests", "minimum"],
    "router.config.decodePolicy=best": ["/router/config/decodePolicy", "round_robin"],
    "router.config.port=9000": ["/router/config", "port", "not allowed"],
    "prefill.config.leaseFraction=2": ["/prefill/config/leaseFraction", "maximum"],
    "router.service.type=External": ["/router/service/type", "LoadBalancer"],
    "router.service.port=70000": ["/router/service/port", "maximum"],
    "image.pullPolicy=Sometimes": ["/image/pullPolicy", "IfNotPresent"],
    "router.image.digest=abc": ["/router/image/digest", "pattern"],
    "drainSeconds=0": ["/drainSeconds", "exclusiveMinimum"],
    "kv.ports=20000:20999": ["/kv/ports", "pattern"],
    "decode.resources.limit.memory=1Gi": ["/decode/resources", "limit", "not allowed"],
    "decode.tolerations[0].effects=NoSchedule": ["/decode/tolerations/0", "effects", "not allowed"],
    "networkPolicy.enable=false": ["/networkPolicy", "enable", "not allowed"],
    "kv.transport=tcp": ["/kv/transport", "tls"],
    "modelSource.kind=s3": ["/modelSource/kind", "hub"],
    "modelSource.gguf=a.safetensors": ["/modelSource/gguf", "pattern"],
    "modelSource.hostPath=models": ["/modelSource/hostPath", "pattern"],
    "modelSource.cache.create.accessModes={ReadOnlyMany}": [
        "/modelSource/cache/create/accessModes",
        "ReadWriteMany",
    ],
    # One pod of three roles would start.
    "modelSource.cache.create.accessModes={ReadWriteOncePod}": [
        "/modelSource/cache/create/accessModes",
        "ReadWriteMany",
    ],
    "router.config.allowedOrigins[0]=https://Chat.example.com/": [
        "/router/config/allowedOrigins/0",
        "pattern",
    ],
    "router.config.allowedOrigins[0]=chat.example.com": ["/router/config/allowedOrigins/0", "pattern"],
    "router.config.allowedHosts[0]=https://api.example.com": ["/router/config/allowedHosts/0", "pattern"],
    "auth.enabled=maybe": ["/auth/enabled", "want boolean"],
    "router.config.apiKeysFile=/keys": ["/router/config", "apiKeysFile", "not allowed"],
    "decode.gpus=-1": ["/decode/gpus", "minimum"],
    "prefill.gpus=17": ["/prefill/gpus", "maximum"],
    "prefill.dnsPolicy=Cluster": ["/prefill/dnsPolicy", "ClusterFirst"],
    "podDisruptionBudget.unhealthyPodEvictionPolicy=Never": ["unhealthyPodEvictionPolicy", "AlwaysAllow"],
    "extraObjects=3": ["/extraObjects", "want array"],
    "gpu.sharedMemorySize=1": ["/gpu/sharedMemorySize", "want string"],
    "sameNodeGpuIpc.runAsUser=10001": ["/sameNodeGpuIpc/runAsUser", "minimum"],
    "decode.resources.limits.memory=2GB": ["/decode/resources/limits/memory", "2GB"],
    "modelSource.cache.create.size=40 Gi": ["/modelSource/cache/create/size", "40 Gi"],
    "modelSource.sizeLimit=1.2.3Gi": ["/modelSource/sizeLimit", "1.2.3Gi"],
    "scratchSizeLimit=lots": ["/scratchSizeLimit", "lots"],
    "modelSource.hub.endpoint=hub.corp": ["/modelSource/hub/endpoint", "https"],
}
IN_THE_CHART = {"kv_transport": "kv.transport"}  # settings of processes that are values of the chart itself
ON_CUDA = ",".join(CUDA)
NIXL = "kv.transport=nixl,kv.allowUnauthenticatedTcp=true"
HUB = f"model=a/b,modelSource.hub.revision={'0' * 40}"
FETCH = "modelSource.kind=fetch,modelSource.fetch.image=s5cmd,modelSource.fetch.command={s5cmd}"
MODEL_CONTRADICTIONS = {
    HUB: "modelSource.sizeLimit is empty: each pod writes a/b to its node's disk",
    f"{HUB},modelSource.cache.claimName=a,modelSource.cache.hostPath=/b": (
        "modelSource.cache.claimName and modelSource.cache.hostPath are given, but a model has one cache"
    ),
    f"{HUB},modelSource.cache.claimName=a,modelSource.cache.create.size=1Gi": "and modelSource.cache.create.size are",
    f"{HUB},modelSource.cache.claimName=a,modelSource.sizeLimit=1Gi": "modelSource.sizeLimit bounds an emptyDir",
    f"{HUB},modelSource.cache.create.storageClass=nfs": "modelSource.cache.create.size is empty",
    "model=a/b,modelSource.hub.allowMovingRevision=true,modelSource.cache.claimName=a": "keeps what was fetched first",
    "modelSource.cache.claimName=a": "modelSource.kind is image, of which nothing is fetched",
    "modelSource.kind=hostPath": "modelSource.hostPath is empty",
    "modelSource.hostPath=/srv": "comes from modelSource.kind image: set it to hostPath",
    "modelSource.image.folder=model": "is a folder in an imageVolume, but modelSource.kind is image",
    "modelSource.kind=fetch,modelSource.cache.hostPath=/a": "modelSource.fetch.image or modelSource.fetch.command is",
    f"{FETCH},modelSource.sizeLimit=1Gi": "so each router would fetch all weights",
    f"{FETCH},model=/models/a,modelSource.cache.hostPath=/a": "model /models/a is no name, which",
    f"{FETCH},model=../x,modelSource.cache.hostPath=/a": r"model \.\./x is no name, which modelSource.kind fetch asks",
    f"{FETCH},model=a/../b,modelSource.cache.hostPath=/a": "is no name, which modelSource.kind fetch asks",
    f"{FETCH},model=a//b,modelSource.cache.hostPath=/a": "is no name, which modelSource.kind fetch asks",
    "modelSource.fetch.image=s5cmd": "comes from modelSource.kind image: set it to fetch",
    f"{HUB},modelSource.sizeLimit=1Gi,modelSource.gguf=a.gguf": "modelSource.gguf is given without modelSource.cache",
    f"{HUB},modelSource.cache.claimName=a,modelSource.gguf=a.gguf": "modelSource.resources.limits.memory is empty",
    "modelSource.gguf=a.gguf": "GGUF files are converted of the kinds hub and fetch",
    f"{HUB},modelSource.cache.claimName=a,modelSource.extraEnv[0].name=SEGUE_UID": "extraEnv sets SEGUE_UID",
}
WHOLE = "prefill.resources.requests.cpu=2,decode.resources.requests.cpu=2"
# Each value is allowed, together they mean nothing.
CONTRADICTIONS = {
    "qos=guaranteed": "resources.requests.cpu is (250|500)m: a node gives whole cores alone",
    f"qos=guaranteed,{WHOLE},decode.resources.limits.cpu=3": "decode.resources.limits.cpu is not what requests.cpu",
    f"qos=guaranteed,{WHOLE},prefill.resources.limits.memory=null": "prefill.resources.limits.memory is empty",
    "modelSource.kind=pvc": "modelSource.pvc.claimName is empty",
    "modelSource.pvc.claimName=models": "modelSource.pvc.claimName is given",
    "modelSource.kind=hub": "model smollm2 is no id on the Hub",
    "modelSource.kind=path": "model smollm2 is no folder",
    "modelSource.kind=image,model=owner/name": "modelSource.image.repository is empty",
    "model=qwen": "segue-model-qwen:.* would be asked for with the tag of Segue.* or a digest of its own",
    "model=qwen,image.tag=v1": "segue-model-qwen:v1 would be asked for with the tag of Segue",
    "modelSource.image.repository=mine": "modelSource.image has neither tag nor digest",
    "modelSource.kind=imageVolume,model=qwen": "modelSource.image has neither tag nor digest",
    "model=/opt/tiny,modelSource.image.pullPolicy=Always": "modelSource.kind path, which pulls no image of it",
    "image.digest=sha256:" + "0" * 64: "set router.image.digest and worker.image.digest",
    "kv.ports=20999-20000": "kv.ports must be a range",
    "kv.ports=20000-20999": "kv.ports 20000-20999 are more than the 64",
    "kv.ports=8000-8007": "kv.ports 8000-8007 contains 8001 or 8002",
    "decode.extraEnv[0].name=SEGUE_MAX_RUNNING_REQUESTS": "decode.extraEnv sets SEGUE_MAX_RUNNING_REQUESTS",
    "decode.resources.limits.nvidia\\.com/gpu=1": "decode.resources asks for nvidia.com/gpu, but device is cpu",
    "prefill.resources.limits.memory=null": "prefill.resources.limits.memory is empty",
    "router.config.routerBytesMax=1073741824": "router.config.routerBytesMax is 1073741824",
    "router.resources.limits.memory=1M,router.config.routerBytesMax=500001": "more than half of router.resources",
    "router.resources.limits.memory=400Mi": "router.config.routerBytesMax is 268435456",
    "sameNodeGpuIpc.enabled=true": "device is not cuda",
    f"sameNodeGpuIpc.enabled=true,{ON_CUDA}": "set kv.transport to nixl",
    f"sameNodeGpuIpc.enabled=true,{ON_CUDA},{NIXL}": "set sameNodeGpuIpc.runAsUser to a user id",
    f"sameNodeGpuIpc.enabled=true,sameNodeGpuIpc.runAsUser=10007,{ON_CUDA},{NIXL},hostUsers=false": "hostUsers is",
    "gpu.perPod=1": "gpu.perPod is called prefill.gpus and decode.gpus now",
    "decode.gpus=2": "decode.gpus is 2, but device is cpu",
    f"{ON_CUDA},decode.gpus=16": "kv.ports 20000-20007 are 8, but decode.gpus is 16, and each GPU of a worker takes 1",
    "device=cuda-on-cpu,decode.resources.limits.nvidia\\.com/gpu=1": "nvidia.com/gpu, but device is cuda-on-cpu",
    "device=cuda-on-cpu,decode.resources.limits.memory=null": "decode.resources.limits.memory is empty",
    f"{ON_CUDA},decode.gpus=0": "decode.gpus is 0 and decode.resourceClaims is empty",
    f"{ON_CUDA},decode.resources.limits.nvidia\\.com/gpu=4": "leave it out of the resources",
    "device=cuda": "decode.resources.limits.memory is 2Gi|prefill.resources.limits.memory is 2Gi",
    f"{ON_CUDA},decode.resources.limits.memory=7Gi": "decode.resources.limits.memory is 7Gi, but device is cuda",
    "router.config.heartbeatSeconds=10": "router.config.heartbeatSeconds is 10, but a peer that is silent",
    "decode.config.heartbeatSeconds=3": "decode.config.heartbeatSeconds is 3",
    "silenceSeconds=1": "heartbeatSeconds is 1, but a peer that is silent for silenceSeconds .1.",
    "decode.config.leaseSeconds=1": "renewSeconds is 1 and decode.config.leaseSeconds is 1",
    "router.config.renewSeconds=20": "renewSeconds is 20 and prefill.config.leaseSeconds is 10",
    "prefill.config.leaseSeconds=2": "renewSeconds is 1 and prefill.config.leaseSeconds is 2",
    "startupSeconds=1": "the startup seconds of router are 1, but a process alone",
    "decode.startupSeconds=29": "the startup seconds of decode are 29",
    "decode.replicas=0": "may take 600 s to start, but router.config.waitingSecondsMax is 30",
    "decode.replicas=0,prefill.replicas=0": "or router.replicas to 0, too, for a release that is parked",
    "decode.replicas=0,decode.startupSeconds=60,router.config.waitingSecondsMax=59": "may take 60 s to start",
    "podDisruptionBudget.maxUnavailable=0": "the drain of a node would wait for ever",
    "podDisruptionBudget.maxUnavailable=00%": "the drain of a node would wait for ever",
    "decode.strategy.rollingUpdate.maxSurge=0": "no pod could ever be replaced",
    f"{NIXL},kv.ports=20000-20000": "needs two for each interface",
    "commonLabels.app\\.kubernetes\\.io/name=mine": "commonLabels sets app.kubernetes.io/name, by which",
    "decode.podLabels.app\\.kubernetes\\.io/component=x": "decode.podLabels sets app.kubernetes.io/component",
    "router.podLabels.app\\.kubernetes\\.io/instance=x": "router.podLabels sets app.kubernetes.io/instance",
    "decode.hostNetwork=true": "decode.hostNetwork gives pods the addresses of their nodes",
    "router.hostNetwork=true": "router.hostNetwork gives pods the addresses of their nodes",
    "rdma.runAsRoot=true": "rdma.runAsRoot lets workers pin memory for RDMA, but rdma.enabled is false",
    "decode.rdma.devices=mlx5_0:1": "decode.rdma.devices is mlx5_0:1, but rdma.enabled is false",
    "rdma.enabled=true,rdma.acknowledgeOpenFabric=true,decode.rdma.devices=mlx5_0:1": "name it with its port",
    "prefill.replicas=0,router.config.localPrefill=never": "nobody would compute prompts",
    "prefill.replicas=0,decode.config.localTokensMax=0": "nobody would compute prompts",
    "model=a/b": "modelSource.hub.revision is main, which can move",
    **MODEL_CONTRADICTIONS,
    "model=a/b,modelSource.hub.revision=v1.0": "modelSource.hub.revision is v1.0, which can move",
    "inferencePool.enabled=true": "inferencePool.endpointPicker.name is empty",
    "inferencePool.enabled=true,inferencePool.endpointPicker.name=picker": "router.config.metricsOnApiPort is false",
    "rdma.enabled=true": "set rdma.acknowledgeOpenFabric",
    "rdma.enabled=true,rdma.acknowledgeOpenFabric=true": "name it with its port, as in mlx5_0:1",
    "rdma.devices=mlx5_0:1": "rdma.devices is mlx5_0:1, but rdma.enabled is false",
    "rdma.enabled=true,rdma.acknowledgeOpenFabric=true,rdma.devices=mlx5_0:1,kv.transport=tls": (
        "leave kv.transport at auto"
    ),
    "kv.transport=nixl": "set kv.allowUnauthenticatedTcp",
    "nameOverride=Our Segue,fullnameOverride=ours": "nameOverride is Our Segue, which cannot be the value of a label",
    "networkPolicy.egress.apiServerPorts=null": "apiServerPorts is empty, which to Kubernetes means every port",
    "networkPolicy.egress.dnsPorts=null": "dnsPorts is empty, which to Kubernetes means every port",
    f"qos=guaranteed,{WHOLE},decode.extraContainers[0].name=x": "container x of decode.extraContainers has no limits",
    "roll=inPlace,decode.replicas=2,prefill.strategy.type=Recreate": "and so does prefill.strategy: leave one",
    "roll=inPlace": "roll is inPlace and decode.replicas is 1, so streams have nowhere to go",
    "decode.resources.requests.memory=3Gi": "requests.memory is 3Gi and limits.memory is 2Gi, which Kubernetes refuses",
    "router.serviceAccount.name=a,worker.serviceAccount.name=a": "are both a, but workers may not ask the API server",
    "keys=null": "keys is not there: .* --reset-then-reuse-values",
    "modelSource.cache=null": "modelSource.cache is not there",
    "rbac.create=false": "name the account",
    "rbac.create=false,router.serviceAccount.create=false": "name the account",
    "rbac.create=false,router.serviceAccount.name=mine": "the Job of keys.from hook needs a Role",
    "rbac.create=false,router.serviceAccount.name=mine,auth.enabled=false": "or set keys.from to render",
    "fullnameOverride=Team_A": "Team_A cannot be the beginning of a Service's name",
    "decode.config.pageSize=32": "prefill.config.pageSize is not set and decode.config.pageSize is 32",
    "links.routerSecret=segue-links-router,links.workerSecret=mine": "give yours another name",
    "auth.existingSecret=segue-api-keys": "is segue-api-keys, the name of the Secret that this chart",
    "links.routerSecret=mine": "belong together",
    "router.service.nodePort=30000": "router.service.type is ClusterIP",
    "router.service.type=LoadBalancer,networkPolicy.clientsFrom=null": "networkPolicy.clientsFrom admits no address",
    "router.service.type=LoadBalancer": "networkPolicy.clientsFrom admits no address, so no client could connect",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_by_its_key(mistake: str) -> None:
    with pytest.raises(RefusedError) as refused:
        manifest(None, mistake)
    assert [word for word in MISTAKES[mistake] if word not in str(refused.value)] == []


@pytest.mark.parametrize("values", CONTRADICTIONS)
def test_a_contradiction_is_refused_in_a_sentence(values: str) -> None:
    with pytest.raises(RefusedError, match=CONTRADICTIONS[values]):
        manifest(None, values)


# What stands in these sections are fields of Kubernetes', which templates take as they are, also when they are empty.
KUBERNETES_OWN = {"resources", "strategy", "securityContext", "podSecurityContext", "annotations", "labels"}


def sections(values: dict[str, Any], above: str = "") -> list[str]:
    """Every section of the chart's values that templates look into, as `router.image`."""
    found: list[str] = []
    for name, value in values.items():
        if isinstance(value, dict) and value and name not in KUBERNETES_OWN:
            found += [f"{above}{name}", *sections(value, f"{above}{name}.")]
    return found


def test_the_chart_looks_for_every_section_of_its_values() -> None:
    """Helm keeps the values of an older chart with --reuse-values; what is new since then is missing in them."""
    template = (CHART / "templates" / "_missing.tpl").read_text(encoding="utf-8")
    listed = template.split('define "segue.sections" -}}')[1].split("{{- end")[0].split()
    assert listed == sections(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")))


def test_an_upgrade_that_reuses_the_values_of_an_older_chart_is_told_what_to_do(tmp_path: Path) -> None:
    older = tmp_path / "segue"
    shutil.copytree(CHART, older)
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for section in ("keys", "monitoring", "inferencePool"):
        del values[section]
    (older / "values.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    with pytest.raises(RefusedError, match=r"keys is not there: .* say --reset-then-reuse-values"):
        run_helm("template", "segue", str(older))


EMPTY = """\
router: {config: , extraEnv: , strategy: , tolerations: , service: {annotations: }}
decode: {config: , resources: {limits: {memory: 2Gi}}, extraContainers: , dnsConfig: , podSecurityContext: }
modelSource: {extraEnv: , extraEnvFrom: , extraVolumes: , resources: , securityContext: }
image: {pullSecrets: }
extraObjects:
securityContext:
global:
"""


def test_a_key_without_a_value_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    """YAML calls it null, Helm takes the default away, and a template must not meet it unprepared."""
    (tmp_path / "empty.yaml").write_text(EMPTY, encoding="utf-8")
    rendered = run_helm("template", "segue", str(CHART), "--values", str(tmp_path / "empty.yaml"))
    names = {(each["kind"], each["metadata"]["name"]) for each in yaml.safe_load_all(rendered) if each}
    assert names == {(each["kind"], each["metadata"]["name"]) for each in objects(None)}


@pytest.mark.parametrize(("old", "new"), settings.FORMER_SETTINGS.items())
def test_an_old_name_is_refused_with_the_new_one(old: str, new: str) -> None:
    roles = [role for role, model in ROLE_CONFIGS.items() if new in model.model_fields]
    assert roles
    for role in roles:
        sentence = f"{role}.config.{to_camel(old)} is called {role}.config.{to_camel(new)} now"
        with pytest.raises(RefusedError, match=sentence):
            manifest(None, f"{role}.config.{to_camel(old)}=3")
        manifest(None, f"{role}.config.{to_camel(new)}=3")


@pytest.mark.parametrize(
    ("old", "beside", "why"), [(old, *told) for old, told in settings.GONE_SETTINGS.items()]
)
def test_a_setting_that_has_gone_is_refused_with_what_became_of_it(old: str, beside: str, why: str) -> None:
    roles = [role for role, model in ROLE_CONFIGS.items() if beside in model.model_fields]
    assert roles
    for role in roles:
        with pytest.raises(RefusedError, match=f"{role}.config.{to_camel(old)} {why}"):
            manifest(None, f"{role}.config.{to_camel(old)}=3")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [(name, *pair) for name, renamed in settings.FORMER_VALUES.items() for pair in renamed.items()],
)
def test_an_old_value_is_refused_with_the_new_one(name: str, old: str, new: str) -> None:
    with pytest.raises(RefusedError, match=rf"{IN_THE_CHART[name]} {old} is called {new} now"):
        manifest(None, f"{IN_THE_CHART[name]}={old}")
    manifest(None, f"{IN_THE_CHART[name]}={new}")


@pytest.mark.parametrize(
    "origin", ["*", "https://chat.example.com:8443", "app://obsidian.md", "http://[::1]:3000"]
)
def test_an_origin_that_a_router_takes_is_accepted(origin: str) -> None:
    assert origin in manifest(None, f"router.config.allowedOrigins[0]={origin}")
    assert RouterConfig(allowed_origins=(origin,)).allowed_origins == (origin,)


MEMORY = {
    "536870912": 0,
    "512Mi": 0,
    "0.5Gi": 0,
    "537M": 0,
    "5.4e8": 0,
    "536870911": 1,
    "524287Ki": 1,
    "0.4G": 1,
}


@pytest.mark.parametrize(("memory", "refused"), MEMORY.items())
def test_the_routers_memory_is_twice_what_its_requests_may_take(memory: str, refused: int) -> None:
    """The default of `router_bytes_max` is known to the chart, too, and so is each way to write a size."""
    assert RouterConfig().router_bytes_max * 2 == 536870912
    with pytest.raises(RefusedError, match="routerBytesMax") if refused else contextlib.nullcontext():
        manifest(None, *(f"router.resources.{side}.memory={memory}" for side in ("requests", "limits")))

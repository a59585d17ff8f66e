"""Decode pods whose workers are two processes that compute one model together: scaled, killed and rolled under streams.

Over gloo, by `device: cuda-on-cpu`, which is for this: no GPU is asked for. The model is a tiny one in a folder of the
node, since the heads of the demo's cannot be cut in two. A namespace of its own, for there are no prefill pods. One and
two ranks round otherwise, so transformers judges the streams: each token is its own after those before, or a near tie.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.cluster import node
from tests.cluster.conftest import CLUSTER, NOTES
from tests.cluster.kubernetes import Cluster, ClusterPod
from tests.cluster.load import STREAMS_AT_FAULT_MIN, LoadStream, Plan, run_streams
from tests.cluster.release import LASTING_VALUES, NAME, HelmRelease
from tests.integration.deployments.running import ended_within
from tests.integration.deployments.streams import StreamedAnswer
from tests.integration.models.answers_of_transformers import assert_answers_of_transformers
from tests.integration.models.served_models import saved_as_clients_call_it, vocab_size
from tests.unit.engine.tiny_models import SIZES
from tests.waiting import soon, until

pytestmark = [
    pytest.mark.timeout(600, func_only=True),
    pytest.mark.skipif(
        "SEGUE_TEST_CONTEXT" in os.environ, reason="the model lies on this machine, which is the node"
    ),
]

# Tokens. SHORT: a killed worker ends within a second; LONG: a pod that is replaced leaves when the new one has started;
# LONGEST: and one rank alone is quicker.
SHORT, LONG, LONGEST, CONTEXT = 240, 420, 640, 704
PROMPTS = [f"Chapter {number}. The expedition left the harbour at dawn" for number in range(8)]
LATER = [Plan(f"Letter {number}. Dear friend", 20) for number in range(2)]
# A rank keeps 1 GiB for graphs, and lets half of the limit alone; the node has another release.
RESOURCES = "decode.resources.limits.memory=6Gi,decode.resources.requests.cpu=100m"
SIZES_OF_DECODE = "localTokensMax=256,decode.config.kvPages=800,decode.config.maxRunningRequests=10"
DECODE = f"decode.config.contextLen={CONTEXT},decode.config.{SIZES_OF_DECODE},{RESOURCES}"
VALUES = f"{LASTING_VALUES},device=cuda-on-cpu,prefill.replicas=0,servedModelName=smollm2,{DECODE}"

Disturbed = Callable[[str, Callable[[], object], Callable[[], bool], int], None]


def tiny() -> PreTrainedModel:
    sizes = SIZES | {"hidden_size": 192, "vocab_size": vocab_size(), "max_position_embeddings": CONTEXT}
    return LlamaForCausalLM(LlamaConfig(**sizes | {"num_hidden_layers": 12}, head_dim=32))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder, which pods read."""
    folder = tmp_path_factory.mktemp("models")
    _, model = saved_as_clients_call_it(tiny, folder)
    for path in (folder, *folder.parents[:2], *folder.rglob("*")):
        path.chmod(0o755)  # pods are another user
    return model


@pytest.fixture(scope="module")
def ranked(cluster: Cluster, model: Path, pytestconfig: pytest.Config) -> Iterator[HelmRelease]:
    """A release of one decode pod, of one rank yet."""
    source = f"model={model.name},modelSource.kind=hostPath,modelSource.hostPath={model}"
    other = Cluster("segue-ranks", cluster.environment, cluster.context)
    other.kubectl("create", "namespace", other.namespace)
    release = HelmRelease(other, values=f"{VALUES},{source}")
    pytestconfig.stash[CLUSTER] = other  # whose state is kept where a test fails
    try:
        release.install()
        yield release
    finally:
        pytestconfig.stash[CLUSTER] = cluster
        other.helm("uninstall", NAME, "--wait", "--ignore-not-found")
        until(lambda: not other.pods(), 120, "the end of its pods")
        other.kubectl("delete", "namespace", other.namespace, "--wait=true")


@pytest.fixture
def disturbed(ranked: HelmRelease, model: Path, pytestconfig: pytest.Config) -> Disturbed:
    def run(name: str, fault: Callable[[], object], struck: Callable[[], bool], tokens: int) -> None:
        """All streams say what transformers says, and each ends once."""
        plans = [Plan(prompt, tokens) for prompt in PROMPTS]
        report = run_streams(ranked.url, ranked.api_key, plans, name, fault, LATER, struck)
        assert report.running >= STREAMS_AT_FAULT_MIN
        assert all(stream.ends == ["length"] for stream in report.streams)
        for length, streams in itertools.groupby(report.streams, lambda stream: stream.plan.max_tokens):
            judge(model, list(streams), length)
        until(lambda: not ranked.held(), 60, "everything given back")
        note = f"two ranks a pod, {name}: {report.running} ran, longest pause {report.pauses[-1]:.1f} s"
        note += f", the last stream ended after {report.last_end:.0f} s"
        pytestconfig.stash.setdefault(NOTES, []).append(note)

    return run


def test_a_release_is_rolled_to_two_ranks(ranked: HelmRelease, disturbed: Disturbed) -> None:
    roll(ranked, disturbed, 2, LONGEST)


def test_pods_of_two_ranks_are_scaled_up_and_down(ranked: HelmRelease, disturbed: Disturbed) -> None:
    before: list[ClusterPod] = []

    def scale() -> None:
        ranked.scale("decode", 2)
        ranked.wait_for("decode", 2)
        before.extend(ranked.cluster.pods("decode"))
        assert [len(followers_of(pod)) for pod in before] == [1, 1]
        ranked.scale("decode", 1)

    disturbed("decode 1 → 2 → 1", scale, lambda: bool(before) and changed(ranked, before), LONG)
    ranked.wait_for("decode", 1)


def test_a_killed_rank_is_a_killed_container(ranked: HelmRelease, disturbed: Disturbed) -> None:
    (pod,) = ranked.cluster.pods("decode")
    pids = [node.process_of(pod), *followers_of(pod)]
    assert len(pids) == 2

    def kill() -> None:
        os.kill(pids[1], signal.SIGKILL)
        assert ended_within(pids, soon(1))

    disturbed("`kill -9` of rank 1, the only decode pod", kill, lambda: not node.is_running(pids[0]), SHORT)
    (now,) = ranked.cluster.pods("decode")
    assert (now.name, now.restarts) == (pod.name, pod.restarts + 1)
    said = ranked.cluster.kubectl("logs", pod.name, "--previous")
    (line,) = [line for line in said.splitlines() if "rank.lost" in line]
    assert "it was ended by SIGKILL" in line
    ranked.wait_for("decode", 1)


def test_a_release_is_rolled_back_to_one_rank(ranked: HelmRelease, disturbed: Disturbed) -> None:
    roll(ranked, disturbed, 1, LONG)


def judge(model: Path, streams: list[LoadStream], tokens: int) -> None:
    """Tokens of each are transformers' own."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer.encode(stream.plan.prompt) for stream in streams]
    answers = [
        StreamedAnswer(stream.text, stream.ends[0], stream.tokens, tuple(stream.token_ids))
        for stream in streams
    ]
    assert_answers_of_transformers(model, prompts, answers, tokens)


def roll(release: HelmRelease, disturbed: Disturbed, gpus: int, tokens: int) -> None:
    """Upgrade to pods of so many ranks under streams."""
    before = release.cluster.pods("decode")
    upgrade = lambda: release.upgrade("--set", f"decode.gpus={gpus}")  # noqa: E731
    disturbed(f"`helm upgrade` to decode.gpus: {gpus}", upgrade, lambda: changed(release, before), tokens)
    release.wait_for("decode", 1)
    (pod,) = release.cluster.pods("decode")
    assert len(followers_of(pod)) == gpus - 1


def changed(release: HelmRelease, before: list[ClusterPod]) -> bool:
    return any(map(release.has_changed, before))


def followers_of(pod: ClusterPod) -> list[int]:
    """The processes of the other ranks of a pod's worker, by their numbers on this machine."""
    worker = node.process_of(pod)
    return [int(each) for each in Path(f"/proc/{worker}/task/{worker}/children").read_text().split()]

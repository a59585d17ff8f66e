"""Models whose weights have 8 bits compute what transformers computes with the same weights, dequantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.engine.checkpoint.model_config import parse_model_config, read_model_config
from shared.engine.cuda.counters import EAGER, DeviceCounters
from shared.engine.model import names as weight_names
from shared.engine.model.loading import load_decoder
from shared.engine.model.ops import Linear
from shared.engine.model.torch_ops import TorchOps
from shared.engine.model.weights import Weights
from shared.engine.quantized.fp8 import Fp8Weight, joined
from shared.engine.quantized.linears import NarrowWeight
from tests.doubles.no_sync import no_sync
from tests.unit.engine.checkpoint.published_models import PUBLISHED, MetaWeights
from tests.unit.engine.cuda.test_no_sync import NoAttention
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.fp8_models import FORMATS, input_scales, rounding, tiny_fp8
from tests.unit.engine.tiny_models import VOCAB_SIZE

RELATIVE_GAP_MAX = 4e-5  # as without 8 bits, see test_model_families
NEAR_TIE = 1e-3
LLAMA, QWEN3 = "llama, biases, llama3 rope, inner size 1100", "qwen3, qk-norm, head_dim 40"
PHI3 = "phi3, partial rotation, window"  # q, k and v are stored as one
CASES = [(name, LLAMA) for name in FORMATS] + [
    (name, family) for name in ("channel", "tensor, static", "block") for family in (QWEN3, PHI3)
]
PROMPT, SHORT = tokens_of(3, 131, VOCAB_SIZE), tokens_of(4, 30, VOCAB_SIZE)


class Served:
    """A prompt and 13 greedy tokens, computed by the engine, in chunks and steps."""

    def __init__(self, folder: Path, prompt: list[int] = PROMPT, **settings: Any) -> None:
        driver = Driver(folder, slots=2, **settings)
        driver.prefill(0, prompt, range(20), chunk=50)
        driver.decode([0], 12)
        driver.close()
        self.counters = driver.device.counters
        self.tokens, self.logits, self._prompt = driver.tokens[0], driver.logits[0], prompt

    def expected(self, model: PreTrainedModel) -> Tensor:
        """transformers' logits of the tokens that were chosen."""
        with torch.inference_mode():
            found: Tensor = model(torch.tensor([[*self._prompt, *self.tokens[:-1]]])).logits[0]
        return found[len(self._prompt) - 1 :]

    def gaps(self, model: PreTrainedModel) -> list[float]:
        """Largest difference of each row's logits, of its largest logit."""
        return [
            float((logits - row).abs().max() / row.abs().max())
            for logits, row in zip(self.logits, self.expected(model), strict=True)
        ]

    def assert_greedy(self, model: Any) -> None:
        """Each token is the model's likeliest, but for near ties."""
        for token, row in zip(self.tokens, self.expected(model), strict=True):
            best, second = row.topk(2).values.tolist()
            assert token == int(row.argmax()) or best - second < NEAR_TIE
        assert len(set(self.tokens)) > 2, "a model that repeats one token shows little"


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(("name", "family"), CASES)
def test_on_a_cpu_logits_are_those_of_the_dequantized_weights(
    name: str, family: str, kernels: str, tmp_path: Path
) -> None:
    model = tiny_fp8(name, family, tmp_path)
    served = Served(tmp_path, kernels=kernels)
    assert max(served.gaps(model)) < RELATIVE_GAP_MAX
    served.assert_greedy(model)


@pytest.mark.parametrize(("name", "family"), CASES)
def test_by_the_path_of_a_gpu_inputs_are_rounded_as_transformers_would_round_them(
    name: str, family: str, tmp_path: Path
) -> None:
    """Blocks are multiplied on a GPU of compute capability 9.0 alone: elsewhere nothing is rounded.

    Two float32 sums of another order differ in the last bits, and now and then one of them rounds to the next number
    of e4m3. Rows behind that differ by a rounding's error, so most rows are compared tightly, not all.
    """
    model = tiny_fp8(name, family, tmp_path)
    served = Served(tmp_path, SHORT, device="cuda-on-cpu")
    assert isinstance(served.counters, DeviceCounters)
    assert sum(served.counters.graph_steps.values()) > served.counters.graph_steps[EAGER]
    exact = served.gaps(model)
    if FORMATS[name].blocks:
        assert max(exact) < RELATIVE_GAP_MAX
        return
    with rounding(model, input_scales(model) if FORMATS[name].input_scale_name else None):
        assert median(served.gaps(model)) < RELATIVE_GAP_MAX
    assert min(exact) > 100 * RELATIVE_GAP_MAX, "rounding is seen"


def _of_another_part(parts: Sequence[Fp8Weight]) -> Fp8Weight:
    return joined([replace(each, scales=parts[-1].scales[:1].expand_as(each.scales)) for each in parts])


def _inverted(parts: Sequence[Fp8Weight]) -> Fp8Weight:
    return joined([replace(each, scales=1 / each.scales) for each in parts])


@pytest.mark.parametrize("mistake", [_of_another_part, _inverted])
@pytest.mark.parametrize("name", ["channel", "tensor, static", "block"])
def test_a_mistake_with_scales_would_be_seen(
    name: str,
    mistake: Callable[[Sequence[Fp8Weight]], Fp8Weight],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_names, "joined", mistake)
    model = tiny_fp8(name, LLAMA, tmp_path)
    served = Served(tmp_path, SHORT, device="cuda-on-cpu")
    scales = input_scales(model) if FORMATS[name].input_scale_name else None
    with nullcontext() if FORMATS[name].blocks else rounding(model, scales):
        assert median(served.gaps(model)) > 100 * RELATIVE_GAP_MAX


@pytest.mark.parametrize("device", ["cpu", "cuda-on-cpu"])
@pytest.mark.parametrize("name", ["channel", "block"])
def test_linears_that_are_left_out_are_read_in_16_bits(name: str, device: str, tmp_path: Path) -> None:
    kept = ("model.layers.0.mlp.down_proj", *(f"model.layers.1.self_attn.{part}_proj" for part in "qkv"))
    model = tiny_fp8(name, QWEN3, tmp_path, kept)
    served = Served(tmp_path, SHORT, device=device)
    shape = read_model_config(tmp_path)
    assert shape.quantization is not None
    assert set(shape.quantization.kept) == set(kept)
    if device == "cpu" or FORMATS[name].blocks:
        assert max(served.gaps(model)) < RELATIVE_GAP_MAX
        return
    with rounding(model, kept=kept):
        assert median(served.gaps(model)) < RELATIVE_GAP_MAX


@pytest.mark.parametrize("family", [LLAMA, PHI3])
@pytest.mark.parametrize("name", FORMATS)
def test_memory_is_planned_for_what_is_kept(name: str, family: str, tmp_path: Path) -> None:
    tiny_fp8(name, family, tmp_path)
    shape, kept, numbers = read_model_config(tmp_path), 0, 0

    class CountingOps(TorchOps):
        def narrow_linear(self, weight: NarrowWeight, bias: Tensor | None) -> Linear:
            nonlocal kept, numbers
            assert isinstance(weight, Fp8Weight)
            kept += weight.values.nbytes + weight.scales.nbytes
            numbers += weight.values.numel()
            return super().narrow_linear(weight, bias)

    with Weights(tmp_path) as weights:
        load_decoder(shape.at_context(64), weights, CountingOps(), context_len=64, dtype=torch.bfloat16)
    assert numbers == sum(outputs * inputs for group in shape.linears() for _, outputs, inputs in group)
    assert shape.weight_bytes(2) == kept + 2 * (shape.parameters - numbers)


def test_no_two_formats_share_a_fingerprint_or_what_bits_depend_on(tmp_path: Path) -> None:
    """Nor does one share the latter with itself on another device: what is rounded there is not rounded here."""
    fingerprints: dict[str, str] = {}
    determinisms: list[str] = []
    described = {
        "channel": "channel",
        "tensor": "tensor",
        "tensor, static": "tensor-static",
        "block": "block",
    }
    for name, words in described.items():
        tiny_fp8(name, LLAMA, tmp_path / name)
        for device in ("cpu", "cuda-on-cpu"):
            driver = Driver(tmp_path / name, slots=1, device=device, context_len=64)
            fingerprints[driver.engine.model_fingerprint] = name
            determinisms.append(driver.engine.determinism)
            assert f"fp8-{words}" in driver.engine.description
            driver.close()
    assert set(fingerprints.values()) == set(described)
    assert len(set(determinisms)) == len(determinisms)


@pytest.mark.parametrize("name", ["channel", "tensor, static", "block"])
def test_a_forward_pass_never_waits(name: str) -> None:
    config = parse_model_config(PUBLISHED["Qwen3-14B"].config | {"quantization_config": FORMATS[name].config})
    model = load_decoder(config, MetaWeights(), TorchOps(), context_len=4096, dtype=torch.bfloat16)
    attention = NoAttention()
    with no_sync(), torch.inference_mode():
        logits = model.run(torch.empty(7, dtype=torch.int32, device="meta"), attention, None)
    assert logits.shape == (7, config.vocab_size)
    assert len(attention.given) == config.layers

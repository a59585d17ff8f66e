"""Models whose weights have 4 bits compute what transformers computes with the same weights, dequantized.

By the path of a GPU weights are rounded to bfloat16, as its kernel does, and transformers' model has those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shared.engine.checkpoint.model_config import parse_model_config, read_model_config
from shared.engine.cuda.counters import EAGER, DeviceCounters
from shared.engine.model import names as weight_names
from shared.engine.model.loading import load_decoder
from shared.engine.model.ops import Linear
from shared.engine.model.torch_ops import TorchOps
from shared.engine.model.weights import Weights
from shared.engine.quantized.int4 import FEW_ROWS, Tiles, scales_and_zeros
from shared.engine.quantized.int4_packings import Int4Weight
from shared.engine.quantized.linears import NarrowProducts, NarrowWeight, joined
from shared.engine.quantized.weight_source import Part
from tests.doubles.no_sync import no_sync
from tests.unit.engine.checkpoint.published_models import PUBLISHED, MetaWeights
from tests.unit.engine.cuda.test_no_sync import NoAttention
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.int4_models import INT4_FORMATS, tiny_int4
from tests.unit.engine.test_fp8_weights import RELATIVE_GAP_MAX, Served
from tests.unit.engine.tiny_models import VOCAB_SIZE

CASES = [
    *((name, "llama") for name in INT4_FORMATS),
    *((name, family) for name in ("awq", "gptq, asym", "packed") for family in ("qwen3", "phi3")),
]
SHORT = tokens_of(4, 30, VOCAB_SIZE)
DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(("name", "family"), CASES)
def test_on_a_cpu_logits_are_those_of_the_dequantized_weights(
    name: str, family: str, kernels: str, tmp_path: Path
) -> None:
    model = tiny_int4(name, family, tmp_path)
    served = Served(tmp_path, kernels=kernels)
    assert max(served.gaps(model)) < RELATIVE_GAP_MAX
    served.assert_greedy(model)


@pytest.mark.parametrize(("name", "family"), CASES)
def test_by_the_path_of_a_gpu_logits_are_those_of_the_weights_that_its_kernel_makes(
    name: str, family: str, tmp_path: Path
) -> None:
    model = tiny_int4(name, family, tmp_path, rounded=True)
    served = Served(tmp_path, SHORT, device="cuda-on-cpu")
    assert isinstance(served.counters, DeviceCounters)
    assert sum(served.counters.graph_steps.values()) > served.counters.graph_steps[EAGER]
    assert max(served.gaps(model)) < RELATIVE_GAP_MAX
    exact = tiny_int4(name, family, tmp_path / "exact")
    assert min(served.gaps(exact)) > 10 * RELATIVE_GAP_MAX, "rounding is seen"


def _of_another_part(parts: Sequence[NarrowWeight]) -> NarrowWeight:
    made = [part for part in parts if isinstance(part, Int4Weight)]
    last = made[-1]
    return joined(
        [replace(part, scales=last.scales[:1].expand_as(part.scales).contiguous()) for part in made]
    )


def _one_less(parts: Sequence[NarrowWeight]) -> NarrowWeight:
    """What leaving out the one of GPTQ's first format does."""
    made = [part for part in parts if isinstance(part, Int4Weight)]
    return joined([replace(part, zeros=part.zeros - 1) for part in made])


def _halves_exchanged(parts: Sequence[NarrowWeight]) -> NarrowWeight:
    made = [part for part in parts if isinstance(part, Int4Weight)]
    return joined([replace(part, values=(part.values << 4) | (part.values >> 4)) for part in made])


@pytest.mark.parametrize("mistake", [_of_another_part, _one_less, _halves_exchanged])
@pytest.mark.parametrize("name", ["awq", "gptq, asym", "packed, channel"])
def test_a_mistake_with_numbers_would_be_seen(
    name: str,
    mistake: Callable[[Sequence[NarrowWeight]], NarrowWeight],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_names, "joined", mistake)
    model = tiny_int4(name, "llama", tmp_path, rounded=True)
    assert min(Served(tmp_path, SHORT, device="cuda-on-cpu").gaps(model)) > 100 * RELATIVE_GAP_MAX


@pytest.mark.parametrize("device", ["cpu", "cuda-on-cpu"])
@pytest.mark.parametrize("name", ["awq", "packed"])
def test_linears_that_are_left_out_are_read_in_16_bits(name: str, device: str, tmp_path: Path) -> None:
    kept = (DOWN, *(f"model.layers.1.self_attn.{part}_proj" for part in "qkv"))
    model = tiny_int4(name, "qwen3", tmp_path, kept, rounded=device != "cpu")
    served = Served(tmp_path, SHORT, device=device)
    shape = read_model_config(tmp_path)
    assert shape.quantization is not None
    assert set(shape.quantization.kept) == set(kept)
    assert max(served.gaps(model)) < RELATIVE_GAP_MAX


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("name", INT4_FORMATS)
def test_memory_is_planned_for_what_is_kept(name: str, family: str, tmp_path: Path) -> None:
    """Four bits a number, and a scale and a zero in 16 for each group, as tiles of a GPU and on a CPU."""
    tiny_int4(name, family, tmp_path)
    shape, kept, numbers = read_model_config(tmp_path), 0, 0

    class CountingOps(TorchOps):
        def narrow_linear(self, weight: NarrowWeight, bias: Tensor | None) -> Linear:
            nonlocal kept, numbers
            assert isinstance(weight, Int4Weight)
            numbers += 2 * weight.values.numel()
            on_gpu = tiles_on_meta(weight)
            kept += on_gpu.words.nbytes + on_gpu.scales_and_zeros.nbytes
            assert on_gpu.words.nbytes == weight.values.nbytes
            assert on_gpu.scales_and_zeros.nbytes == scales_and_zeros(weight).nbytes
            return super().narrow_linear(weight, bias)

    with Weights(tmp_path) as weights:
        load_decoder(shape.at_context(64), weights, CountingOps(), context_len=64, dtype=torch.bfloat16)
    assert numbers == sum(outputs * inputs for group in shape.linears() for _, outputs, inputs in group)
    assert shape.weight_bytes(2) == kept + 2 * (shape.parameters - numbers)


def tiles_on_meta(weight: Int4Weight) -> Tiles:
    """Shapes of what a GPU keeps."""
    return Tiles.of(Int4Weight(weight.values.to("meta"), weight.scales.to("meta"), weight.zeros.to("meta")))


def test_no_two_formats_share_a_fingerprint_or_what_bits_depend_on(tmp_path: Path) -> None:
    fingerprints: dict[str, str] = {}
    determinisms: list[str] = []
    for name, form in INT4_FORMATS.items():
        tiny_int4(name, "llama", tmp_path / name)
        for device in ("cpu", "cuda-on-cpu"):
            driver = Driver(tmp_path / name, slots=1, device=device, context_len=64)
            fingerprints[driver.engine.model_fingerprint] = name
            determinisms.append(driver.engine.determinism)
            assert form.name in driver.engine.description
            driver.close()
    assert set(fingerprints.values()) == set(INT4_FORMATS)
    assert len(set(determinisms)) == len(determinisms)


class GpuOps(TorchOps):
    """Multiplies narrow weights as a GPU does."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow_linear = NarrowProducts.on_gpu((9, 0), deterministic=False).linear  # type: ignore[method-assign]


class FakeWeights(MetaWeights):
    """Shapes for torch's fake tensors: on its meta device the kernel has no shapes."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        """See `WeightSource`."""
        return torch.empty_like(super().take(name, shape, dtype, part), device="cpu")


@pytest.mark.parametrize("rows", [7, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("name", ["awq", "packed, asym"])
def test_a_forward_pass_never_waits(name: str, rows: int) -> None:
    """With tiles whose shapes torch checks, for the kernel and where they are dequantized."""
    config = parse_model_config(
        PUBLISHED["Qwen3-14B"].config | {"quantization_config": INT4_FORMATS[name].config}
    )
    attention = NoAttention()
    with FakeTensorMode(), torch.inference_mode():
        model = load_decoder(config, FakeWeights(), GpuOps(), context_len=4096, dtype=torch.bfloat16)
        with no_sync():
            logits = model.run(torch.empty(rows, dtype=torch.int32), attention, None)
    assert logits.shape == (rows, config.vocab_size)
    assert len(attention.given) == config.layers


def test_weights_beside_float16_are_multiplied_in_bfloat16(tmp_path: Path) -> None:
    """Most published ones say float16, which torch's kernel does not take."""
    tiny_int4("awq", "qwen3", tmp_path)
    path = tmp_path / "model.safetensors"
    halves = {
        name: tensor.half() if tensor.dtype == torch.float32 else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(halves, path)
    for dtype, words in (("auto", "bfloat16 and int4-awq-64"), ("float16", "float16 and int4-awq-64")):
        driver = Driver(tmp_path, slots=1, device="cuda-on-cpu", context_len=64, dtype=dtype)
        assert f"weights {words} dequantized" in driver.engine.description
        driver.close()

"""Single kernels on a GPU: products of few rows beside the library's, filters, other formats, experts, routing.

    python -m tests.benchmarks.gpu.kernels                  a GPU; all parts
    python -m tests.benchmarks.gpu.kernels --parts products,filters

A part launches a kernel often in one graph, over matrices that no cache holds together, and tells the least of five.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from shared.engine.checkpoint.experts_config import Routing, Scoring
from shared.engine.cuda.kernels.expert_routing import GpuRouting
from shared.engine.cuda.kernels.fp8_inputs import CudaRounding
from shared.engine.cuda.kernels.gemv import Gemv
from shared.engine.cuda.kernels.int4_tiles import CudaTiles
from shared.engine.cuda.kernels.packed_experts import MANY_WIDTHS, WIDTHS, PackedKernels
from shared.engine.cuda.kernels.step_kernels import CudaKernels
from shared.engine.model.experts import ExpertRows, GroupedExperts, PackedExperts, UnpackedProducts
from shared.engine.model.ops import ExpertChoice, ExpertProducts, PackedBank
from shared.engine.model.routing import Router
from shared.engine.model.torch_ops import TorchOps
from shared.engine.quantized.fp8 import Fp8Products, Fp8Weight
from shared.engine.quantized.fp8_formats import BLOCK, Fp8Format, Scales
from shared.engine.quantized.int4 import FEW_ROWS, Tiles, few_rows
from shared.engine.quantized.int4_packings import Int4Weight
from shared.engine.quantized.packed_matrices import PackedFormat, PackedMatrices

LAUNCHES_MAX = 40
UNCACHED_BYTES = 400 * 2**20  # of the matrices of one measurement together
REPEATS = 5
SHAPES = {  # inputs and outputs of a layer's products, and of the head
    "0.6B qkv": (1024, 4096),
    "0.6B output": (2048, 1024),
    "0.6B gate, up": (1024, 6144),
    "0.6B down": (3072, 1024),
    "0.6B head": (1024, 151_936),
    "14B qkv": (5120, 7168),
    "14B output": (5120, 5120),
    "14B gate, up": (5120, 34_816),
    "14B down": (17_408, 5120),
    "70B gate, up": (8192, 57_344),
}
VOCAB_SIZE = 151_936
FILTERS = {
    "k 20, p 0.95": (20, 0.95),
    "p 0.95": (VOCAB_SIZE, 0.95),
    "k 5000": (5000, 1.0),
    "k 1000, p 0.9": (1000, 0.9),
}
EXPERTS, CHOSEN, HIDDEN, INNER = 128, 8, 2048, 768  # of Qwen3-30B-A3B
E4M3 = torch.float8_e4m3fn
INT4_GROUP = 128


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def microseconds(launch: Callable[[int], object], count: int) -> float:
    """Of one launch, by a graph of so many; `launch` gets its number."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream), torch.inference_mode():
        for each in range(count):
            launch(each)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for each in range(count):
                launch(each)
        graph.replay()
        times: list[float] = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record(stream)
            graph.replay()
            end.record(stream)
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
    return 1e3 * min(times) / count


def matrices(inputs: int, outputs: int, dtype: torch.dtype) -> list[Tensor]:
    """So many that no cache holds them."""
    count = max(2, min(LAUNCHES_MAX, UNCACHED_BYTES // (inputs * outputs * dtype.itemsize)))
    return [torch.randn(outputs, inputs, device="cuda").mul_(0.02).to(dtype) for _ in range(count)]


def products() -> None:
    """One to four rows: the library, and the kernel of our own."""
    gemv = Gemv.compiled(torch.device("cuda"))
    for name, (inputs, outputs) in SHAPES.items():
        weights = matrices(inputs, outputs, torch.bfloat16)
        for rows in (1, 2, 4):
            x = torch.randn(rows, inputs, device="cuda").bfloat16()
            y = x.new_empty(rows, outputs)

            def library(at: int, x: Tensor = x, weights: list[Tensor] = weights) -> Tensor:
                return torch.nn.functional.linear(x, weights[at])

            def ours(at: int, x: Tensor = x, y: Tensor = y, weights: list[Tensor] = weights) -> Tensor:
                return gemv(x, weights[at], None, y)

            theirs, own = (microseconds(each, len(weights)) for each in (library, ours))
            chosen = "ours" if rows <= gemv.rows_max(weights[0]) else "the library"
            say(f"{name}, {rows} rows: library {theirs:.1f} us, ours {own:.1f} us; {chosen} is taken")


def filters() -> None:
    """`filter_rows` alone, without the copy that brings the logits back."""
    kernels = CudaKernels.compiled(torch.device("cuda"))
    for name, (top_k, top_p) in FILTERS.items():
        for rows in (1, 64, 256):
            logits = torch.randn(rows, VOCAB_SIZE, device="cuda")
            spare, each = logits.clone(), torch.arange(rows, dtype=torch.int32, device="cuda")
            many = torch.full((rows,), top_k, dtype=torch.int32, device="cuda")
            factors = torch.tensor([[1.0] * rows, [top_p] * rows, [-torch.inf] * rows], device="cuda")

            def copy(_: int, spare: Tensor = spare, logits: Tensor = logits) -> Tensor:
                return spare.copy_(logits)

            def both(
                _: int,
                spare: Tensor = spare,
                logits: Tensor = logits,
                asked: tuple[Tensor, ...] = (each, many, factors),
            ) -> None:
                spare.copy_(logits)
                kernels.filter_rows(spare, *asked)

            say(f"{name}, {rows} rows: {microseconds(both, 5) - microseconds(copy, 5):.0f} us")


def as_served(weights: list[Tensor], x: Tensor) -> list[str]:
    """How linears of 8 bits are computed, and microseconds of each: by row and by blocks."""
    products = Fp8Products.on_gpu(
        torch.cuda.get_device_capability(),
        deterministic=False,
        rounding=CudaRounding.compiled(torch.device("cuda")),
    )
    outputs, inputs = weights[0].shape
    told = []
    for form in (Fp8Format(Scales.CHANNEL), Fp8Format(Scales.BLOCK)):
        blocks = form.scales is Scales.BLOCK
        scales = torch.ones(outputs, -(-inputs // BLOCK) if blocks else 1, device="cuda")
        linears = [
            products.linear(Fp8Weight(each, scales, None, blocks=blocks, whole=True), None)
            for each in weights
        ]
        taken = microseconds(lambda at, made=linears: made[at](x), len(linears))  # type: ignore[misc]
        told.append(f"{products.way(form)} {taken:.1f} us")
    return told


def formats() -> None:
    """torch's products in FP8, beside those in bfloat16, and its grouped product of experts."""
    one = torch.ones((), device="cuda")
    for name, (inputs, outputs) in SHAPES.items():
        wide, narrow = matrices(inputs, outputs, torch.bfloat16), matrices(inputs, outputs, E4M3)
        by_output = torch.ones(1, outputs, device="cuda")
        for rows in (1, 64, 2048):
            x = torch.randn(rows, inputs, device="cuda").bfloat16()
            x8, by_row = x.to(E4M3), torch.ones(rows, 1, device="cuda")

            def by_rows(
                at: int, x8: Tensor = x8, w: list[Tensor] = narrow, s: Tensor = by_row, o: Tensor = by_output
            ) -> Tensor:
                return torch._scaled_mm(x8, w[at].t(), scale_a=s, scale_b=o, out_dtype=torch.bfloat16)

            def by_tensor(at: int, x8: Tensor = x8, w: list[Tensor] = narrow) -> Tensor:
                return torch._scaled_mm(x8, w[at].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

            def in_16_bits(at: int, x: Tensor = x, w: list[Tensor] = wide) -> Tensor:
                return torch.nn.functional.linear(x, w[at])

            a, b, c = (
                microseconds(in_16_bits, len(wide)),
                microseconds(by_rows, len(narrow)),
                microseconds(by_tensor, len(narrow)),
            )
            say(f"{name}, {rows} rows: bfloat16 {a:.1f}, FP8 with a scale a row {b:.1f}, with one {c:.1f} us")
            say(f"  as served, inputs rounded: {', '.join(as_served(narrow, x))}")
    up, down = (
        torch.randn(EXPERTS, *shape, device="cuda").mul_(0.02).bfloat16()
        for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    for tokens in (1, 4, 16, 64, 256, 2048):
        of_row = torch.rand(tokens, EXPERTS, device="cuda").topk(CHOSEN).indices.flatten()
        ends = torch.bincount(of_row, minlength=EXPERTS).cumsum(0).int()
        x, inner = (torch.randn(tokens * CHOSEN, size, device="cuda").bfloat16() for size in (HIDDEN, INNER))
        total = microseconds(lambda _, x=x, ends=ends: torch._grouped_mm(x, up.mT, offs=ends), 10)  # type: ignore[misc]
        total += microseconds(lambda _, x=inner, ends=ends: torch._grouped_mm(x, down.mT, offs=ends), 10)  # type: ignore[misc]
        say(
            f"experts of {tokens} tokens: {total:.0f} us for {int((torch.bincount(of_row) > 0).sum())} experts"
        )


def int4() -> None:
    """Weights of 4 bits by torch's kernel and by dequantizing for the call, beside bfloat16: where the two cross."""
    dequantize = CudaTiles.compiled(torch.device("cuda"))
    for name, (inputs, outputs) in SHAPES.items():
        wide = matrices(inputs, outputs, torch.bfloat16)
        count = max(2, min(LAUNCHES_MAX, 2 * UNCACHED_BYTES // (inputs * outputs)))
        scales = torch.full((outputs, inputs // INT4_GROUP), 0.01, device="cuda")
        packed = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device="cuda")
        weight = Int4Weight(packed, scales, torch.full_like(scales, 8, dtype=torch.uint8))
        tiles = [Tiles.of(weight) for _ in range(count)]
        for rows in (1, 4, 16, 32, 64, 128, 256, 2048):
            x = torch.randn(rows, inputs, device="cuda").bfloat16()

            def in_16_bits(at: int, x: Tensor = x, w: list[Tensor] = wide) -> Tensor:
                return torch.nn.functional.linear(x, w[at])

            def by_tiles(at: int, x: Tensor = x, w: list[Tiles] = tiles) -> Tensor:
                return few_rows(x, w[at])

            def dequantized(at: int, x: Tensor = x, w: list[Tiles] = tiles) -> Tensor:
                return torch.nn.functional.linear(x, dequantize(w[at]))

            a = microseconds(in_16_bits, len(wide))
            b, c = (microseconds(each, count) for each in (by_tiles, dequantized))
            chosen = "the former" if rows <= FEW_ROWS else "the latter"
            say(
                f"{name}, {rows} rows: bfloat16 {a:.1f}, by tiles {b:.1f}, dequantized {c:.1f} us; {chosen} is taken"
            )


PACKED = {  # experts, of a token, hidden, inner, format
    "gpt-oss-20b": (32, 4, 2880, 2880, PackedFormat.MXFP4),
    "gpt-oss-120b": (128, 4, 2880, 2880, PackedFormat.MXFP4),
    "Qwen3-30B-A3B": (EXPERTS, CHOSEN, HIDDEN, INNER, PackedFormat.FP8),
    "Qwen3-30B-A3B, int4": (EXPERTS, CHOSEN, HIDDEN, INNER, PackedFormat.INT4),
}


def packed_matrices(packing: PackedFormat, experts: int, outputs: int, inputs: int) -> PackedMatrices:
    """Of random bits that are numbers."""
    if packing is PackedFormat.FP8:
        values = torch.randint(0, 120, (experts, outputs, inputs), dtype=torch.uint8, device="cuda").view(
            E4M3
        )
        return PackedMatrices(
            packing, values, torch.ones(experts, outputs // BLOCK, inputs // BLOCK, device="cuda"), BLOCK
        )
    if packing is PackedFormat.INT4:
        values = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8, device="cuda")
        scales = torch.ones(experts, outputs, inputs // BLOCK, device="cuda")
        return PackedMatrices(packing, values, scales, zeros=torch.full_like(scales, 8, dtype=torch.uint8))
    values, scales = (
        torch.randint(0, 127, (experts, outputs, inputs // numbers), dtype=torch.uint8, device="cuda")
        for numbers in (2, 32)
    )
    return PackedMatrices(packing, values, scales)


def experts() -> None:
    """The layers of packed experts: by the kernel, and unpacked for torch's grouped product, which many rows take."""
    kernels = PackedKernels.compiled(torch.device("cuda"))
    for name, (count, chosen, hidden, inner, packing) in PACKED.items():
        bank = PackedBank(
            packed_matrices(packing, count, 2 * inner, hidden),
            packed_matrices(packing, count, hidden, inner),
            torch.bfloat16,
        )
        gate = TorchOps().silu_and_mul
        ways: dict[str, ExpertProducts] = {
            f"{'many' if many else 'few'} by {widths}": PackedExperts(
                bank, gate, Tiled(kernels, widths, many), None
            )
            for widths, many in ((WIDTHS, False), *(((width,), True) for width in MANY_WIDTHS))
        }
        ways["unpacked"] = GroupedExperts(bank, gate, UnpackedProducts(kernels.unpack))
        for tokens in (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
            x = torch.randn(tokens, hidden, device="cuda").bfloat16()
            of_token = torch.rand(tokens, count, device="cuda").topk(chosen).indices
            weights = torch.rand(tokens, chosen, device="cuda")
            touched = len(set(of_token.flatten().tolist()))
            size = touched * sum(each.nbytes // count for each in (bank.gate_up, bank.down))
            taken = {
                way: microseconds(lambda _, made=made, given=(x, of_token, weights): made(*given), 10)  # type: ignore[misc]
                for way, made in ways.items()
            }
            sort = partial(kernels.plan, of_token, count)
            taken["of them sorting"] = microseconds(lambda _, sort=sort: sort(), 10)  # type: ignore[misc]
            rows = torch.randn(tokens * chosen, hidden, device="cuda").bfloat16()
            taken["weighing"] = microseconds(lambda _, of=(rows, weights): kernels.weigh(*of), 10)  # type: ignore[misc]
            times = ", ".join(f"{way} {spent:.0f}" for way, spent in taken.items())
            say(f"{name}, {tokens} tokens, us: {times}; {touched} experts, {size / 1e6:.0f} MB")


class Tiled:
    """Packed products in tiles of these widths, whatever the number of rows."""

    def __init__(self, kernels: PackedKernels, widths: tuple[int, ...], many: bool) -> None:
        self._kernels, self._widths, self._many = kernels, widths, many
        self.multiply, self.weigh = kernels.multiply, kernels.weigh

    def plan(self, chosen: Tensor, experts: int, *, many: bool = False) -> ExpertRows:  # noqa: ARG002
        """See `PackedProducts`."""
        return self._kernels.plan(chosen, experts, many=self._many, widths=self._widths)


ROUTINGS = {
    "Qwen3-30B-A3B": Routing(128, 8),
    "GLM-4.5": Routing(160, 8, scoring=Scoring.SIGMOID, corrected=True, scale=2.5),
    "DeepSeek-V3": Routing(
        256, 8, scoring=Scoring.SIGMOID, corrected=True, scale=2.5, groups=8, groups_chosen=4
    ),
}


def routing() -> None:
    """The choice of experts: by the kernel, and by torch's operations."""
    device = torch.device("cuda")
    ours = GpuRouting.compiled(device)
    for name, each in ROUTINGS.items():
        correction = torch.rand(each.experts, device=device) if each.corrected else None
        ways = ours(each, correction, device), Router(each, correction, device)
        for tokens in (1, 64, 1024):
            logits = torch.randn(tokens, each.experts, device=device)
            kernel, by_torch = (microseconds(_again(way, logits), LAUNCHES_MAX) for way in ways)
            say(f"routing of {name}, {tokens} tokens, us: {kernel:.1f}, by torch {by_torch:.1f}")


def _again(way: ExpertChoice, logits: Tensor) -> Callable[[int], object]:
    return lambda _: way(logits)


PARTS = {
    "products": products,
    "filters": filters,
    "formats": formats,
    "int4": int4,
    "experts": experts,
    "routing": routing,
}


def main(asked: Iterable[str]) -> None:
    """Measure the parts that are asked for."""
    for part in asked:
        PARTS[part]()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; default: all")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(0, "skipped: torch finds no GPU\n")
    main(given.parts.split(","))

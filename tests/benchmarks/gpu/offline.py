"""Many sequences at once with random weights, as other engines measure themselves, and the time of single steps.

    python -m tests.benchmarks.gpu.offline --model 0.6B             a GPU; also 14B
    python -m tests.benchmarks.gpu.offline --model tiny --device cuda-on-cpu --sequences 8 --longest 60
    python -m tests.benchmarks.gpu.offline --parts profile             where a step's time goes, by kernel
    python -m tests.benchmarks.gpu.offline --model gpt-oss-20b --stored mxfp4 --parts steps
    python -m tests.benchmarks.gpu.offline --model Llama-3.3-70B --stored "fp8 by channel" --layers 20 --parts steps

The workload is that of nano-vllm and mini-sglang: 256 prompts of 100 to 1,024 random tokens, each with 100 to 1,024
tokens of output, seed 0, temperature 0.6. `alone` drives one device by hand, EXTEND then DECODE: the line to hold
beside an engine that does both on one GPU. `filtered` is the same with the filters that Qwen3 has by itself, top_k 20
and top_p 0.95, which is what clients of a served Qwen3 get. `disaggregated` has a prefill and a decode worker on the
GPU, each with its scheduler and loop, and copies KV from one pool to the other; it comes last, for it takes all of the
GPU twice.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from time import perf_counter

import torch
from torch import Tensor

from shared.batch.schedule_batch import ExtendRow, ForwardMode, ScheduleBatch, SlotJoin
from shared.engine.checkpoint.dtypes import dtypes_on_cuda
from shared.engine.checkpoint.kv_cache import KVCache
from shared.engine.checkpoint.model_config import ModelConfig, parse_model_config
from shared.engine.config import EngineConfig
from shared.engine.cuda.device import CudaDevice
from shared.engine.cuda.loading import DecoderSource, assemble
from shared.engine.cuda.memory import FittedPool
from shared.engine.cuda.platform import Platform, cuda_platform, host_platform
from shared.engine.quantized import weight_source
from shared.process.resources import memory_budget
from shared.wire.sampling_params import SamplingParams
from tests.benchmarks.gpu.profiles import host_profiled, profiled
from tests.benchmarks.gpu.two_workers import Part, TwoWorkers
from tests.unit.engine.checkpoint.popular_models import POPULAR
from tests.unit.engine.checkpoint.popular_shapes import AWQ, MXFP4
from tests.unit.engine.checkpoint.published_models import PUBLISHED
from tests.unit.engine.fp8_models import FORMATS

PAGE_SIZE = 16
CHUNK = 8192
STEP_BATCHES = (1, 64, 256)
STEP_CONTEXT = 1024
STEPS = 50
PROMPT_REPEATS = 6  # the first is left out
SHORTEST = 100
PARTS = ("steps", "prompts", "profile", "alone", "filtered", "disaggregated")
WITH_TWO_ON_A_GPU = (0.45, 0.9)  # what of it may be in use once a device is loaded: the first leaves half
WORDS = {torch.uint8: torch.uint8, torch.float8_e4m3fn: torch.uint8, torch.int32: torch.int32}
NUMBERS_OF_8_BITS = 120  # codes from 0 on that no format reads as NaN
FILTERS = {"top_k": 20, "top_p": 0.95}  # of Qwen3's generation_config.json
MODELS = {name: each.config for name, each in PUBLISHED.items()} | {
    "Llama-3.3-70B": POPULAR["meta-llama/Llama-3.3-70B-Instruct"]
}
STORED = {"mxfp4": MXFP4, "int4 by 128": AWQ} | {
    f"fp8 by {name}": FORMATS[name].config for name in ("block", "channel", "tensor")
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}


@dataclass(frozen=True, slots=True)
class Sequence:
    """One of the workload."""

    prompt: tuple[int, ...]
    output_len: int

    @property
    def pages(self) -> int:
        """Pages for all of it."""
        return -(-(len(self.prompt) + self.output_len) // PAGE_SIZE)


class RandomWeights:
    """`WeightSource` of normal numbers on the device; norms are ones."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)

    def __contains__(self, _name: str) -> bool:
        return True

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: weight_source.Part | None = None
    ) -> Tensor:
        """See `WeightSource`."""
        if part is not None:
            shape = tuple(torch.empty(shape, device="meta")[part.index_in(shape)].shape)
        where = self._generator.device
        if "norm" in name:
            return torch.ones(shape, dtype=dtype, device=where)
        if dtype in WORDS:  # of formats with fewer bits; bytes that are numbers in all of them
            longest = torch.iinfo(torch.int32).max if dtype is torch.int32 else NUMBERS_OF_8_BITS
            drawn = torch.randint(
                0, longest, shape, dtype=WORDS[dtype], device=where, generator=self._generator
            )
            return drawn.view(dtype)
        return torch.empty(shape, dtype=dtype, device=where).normal_(0.0, 0.02, generator=self._generator)


def model_named(name: str, stored: str = "", layers: int = 0) -> ModelConfig:
    """A published model, of Qwen3 by its size, or a tiny one; `stored`: in this format; `layers`: its first so many."""
    known = next((each for each in (name, f"Qwen3-{name}") if each in MODELS), "Qwen3-0.6B")
    config = MODELS[known] | (_TINY if name == "tiny" else {})
    if stored:
        config |= {"quantization_config": STORED[stored]}
    if layers:
        kinds = config.get("layer_types")
        config |= {"num_hidden_layers": layers} | ({"layer_types": kinds[:layers]} if kinds else {})
    return parse_model_config(config)


def workload(sequences: int, longest: int, vocab_size: int) -> list[Sequence]:
    """Prompts first, then lengths of outputs, drawn as the other engines' benchmarks draw them."""
    drawn, shortest = Random(0), min(SHORTEST, longest)
    tokens = min(10_000, vocab_size - 1)
    prompts = [
        tuple(drawn.randint(0, tokens) for _ in range(drawn.randint(shortest, longest)))
        for _ in range(sequences)
    ]
    return [Sequence(prompt, drawn.randint(shortest, longest)) for prompt in prompts]


@dataclass(frozen=True)
class Loaded:
    """A device with a pool, and what it was loaded with."""

    device: CudaDevice
    cache: KVCache
    room: FittedPool

    @property
    def part(self) -> Part:
        """As a worker takes it."""
        return self.device, self.cache, self.room


def load(
    platform: Platform, config: ModelConfig, slots: int, context: int, share: float, pages: int
) -> Loaded:
    """A device with random weights."""
    dtypes = dtypes_on_cuda("auto", "auto", stored=torch.bfloat16, capability=platform.capability)
    sized = EngineConfig(
        pages or None,
        PAGE_SIZE,
        slots,
        context_len=context,
        extend_tokens=CHUNK,
        budget=memory_budget(),
        device_memory_share=share,
    )
    platform.check(config, dtypes)
    source = DecoderSource(config, RandomWeights(platform.device), dtypes, frozenset())
    device, cache, room = assemble(platform, source, sized)
    return Loaded(device, cache, room)


class ByHand:
    """Drives one device: the next step is launched before the last one is waited for."""

    def __init__(self, loaded: Loaded) -> None:
        self.filters: dict[str, float] = {}  # of all sequences
        self.device = loaded.device
        self._pages = loaded.room.pages
        self._step = 0
        self._waited = 0

    def launch(self, mode: ForwardMode, **batch: object) -> None:
        """Launch a step, then wait for the one before."""
        self._step += 1
        self.device.launch(ScheduleBatch(self._step, mode, **batch))  # type: ignore[arg-type]
        self.wait_for(self._step - 1)

    def wait_for(self, step: int) -> None:
        """Wait for all steps up to this one."""
        while self._waited < step:
            self._waited += 1
            self.device.wait(self._waited)

    def finish(self) -> None:
        """Wait for all that was launched."""
        self.wait_for(self._step)

    def cache_prompts(self, prompts: list[tuple[int, ...]], cached: int) -> None:
        """Slot i gets prompt i, with pages for all of it and its first `cached` tokens in them."""
        for slot, prompt in enumerate(prompts):
            pages = -(-len(prompt) // PAGE_SIZE) + 1
            params = SamplingParams(max_new_tokens=1, seed=slot, temperature=0.6)
            join = SlotJoin(slot, tuple(range(slot * pages, (slot + 1) * pages)), 0, params, len(prompt))
            if cached:
                row = ExtendRow(slot, prompt[:cached], 0, False)
                self.launch(ForwardMode.EXTEND, joins=(join,), extend=(row,))
            else:
                self.launch(ForwardMode.PREBUILT, joins=(join,))
        self.finish()

    def prefill(self, sequences: list[Sequence]) -> None:
        """Slot i gets sequence i, with pages for all of it; as many prompts in a step as its input holds."""
        assert sum(each.pages for each in sequences) <= self._pages, "the workload exceeds the pool"
        first_page, slot = 0, 0
        while slot < len(sequences):
            joins, rows, tokens = [], [], 0
            while slot < len(sequences) and tokens + len(sequences[slot].prompt) <= CHUNK:
                each = sequences[slot]
                params = SamplingParams(
                    max_new_tokens=each.output_len,
                    seed=slot,
                    temperature=0.6,
                    **self.filters,  # type: ignore[arg-type]
                )
                pages = tuple(range(first_page, first_page + each.pages))
                joins.append(SlotJoin(slot, pages, 0, params, len(each.prompt)))
                rows.append(ExtendRow(slot, each.prompt, 0, True))
                tokens, first_page, slot = tokens + len(each.prompt), first_page + each.pages, slot + 1
            self.launch(ForwardMode.EXTEND, joins=tuple(joins), extend=tuple(rows))

    def decode(self, sequences: list[Sequence]) -> None:
        """To the end of each; EXTEND has sampled the first token."""
        for done in range(1, max(each.output_len for each in sequences)):
            slots = [slot for slot, each in enumerate(sequences) if each.output_len > done]
            self.launch(ForwardMode.DECODE, decode_slots=slots)


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def measure_alone(by_hand: ByHand, sequences: list[Sequence], name: str) -> None:
    """The whole workload on one device."""
    counters = by_hand.device.counters
    idle, busy = counters.idle_seconds, counters.extend_seconds + counters.decode_seconds
    began = perf_counter()
    by_hand.prefill(sequences)
    by_hand.finish()
    prompts_done = perf_counter()
    by_hand.decode(sequences)
    by_hand.finish()
    ended = perf_counter()
    output = sum(each.output_len for each in sequences)
    idle, busy = counters.idle_seconds - idle, counters.extend_seconds + counters.decode_seconds - busy
    say(
        f"{name}: {output} tokens in {ended - began:.2f} s, {output / (ended - began):.0f} tok/s; "
        f"prompts {prompts_done - began:.2f} s; device idle {idle / (idle + busy):.1%}"
    )


def measure_steps(by_hand: ByHand, vocab_size: int, batches: tuple[int, ...], context: int) -> None:
    """Seconds of a DECODE step by batch size, as the host sees them and as the device does."""
    drawn = Random(1)
    for batch in batches:
        prompts = [tuple(drawn.randrange(vocab_size) for _ in range(context)) for _ in range(batch)]
        sequences = [Sequence(prompt, STEPS + 1) for prompt in prompts]
        by_hand.prefill(sequences)
        by_hand.finish()
        before, began = by_hand.device.counters.decode_seconds, perf_counter()
        by_hand.decode(sequences)
        by_hand.finish()
        wall, device = perf_counter() - began, by_hand.device.counters.decode_seconds - before
        say(
            f"decode step, batch {batch}, context {context}: {1e3 * wall / STEPS:.3f} ms, "
            f"on the device {1e3 * device / STEPS:.3f} ms"
        )


def measure_prompts(by_hand: ByHand, vocab_size: int, longest: int, slots: int) -> None:
    """Milliseconds from the launch of prompts until their tokens are read, the least of five, and how they ran."""
    drawn = Random(3)
    alone = [(1, 0, tokens) for tokens in (16, 100, 256, 512, 1024, 2048)]
    behind = [(1, cached, tokens) for cached in (1024, 2048, 4096, 8192) for tokens in (16, 128)]
    for many, cached, tokens in [*alone, (8, 0, 128), (16, 0, 20), *behind]:
        if cached + tokens > longest or many > slots:
            continue
        prompts = [tuple(drawn.randrange(vocab_size) for _ in range(cached + tokens)) for _ in range(many)]
        milliseconds = []
        by_graph = by_hand.device.counters.extend_graph_steps.copy()
        for _ in range(PROMPT_REPEATS):
            by_hand.cache_prompts(prompts, cached)
            began = perf_counter()
            rows = tuple(
                ExtendRow(slot, prompt[cached:], cached, True) for slot, prompt in enumerate(prompts)
            )
            by_hand.launch(ForwardMode.EXTEND, extend=rows)
            by_hand.finish()
            milliseconds.append(1e3 * (perf_counter() - began))
        counted = by_hand.device.counters.extend_graph_steps - by_graph
        say(f"{many} x {tokens} tokens behind {cached}: {min(milliseconds[1:]):.2f} ms; {dict(counted)}")


def profile_steps(by_hand: ByHand, vocab_size: int, batches: tuple[int, ...], context: int) -> None:
    """Where the device's time goes: in one prompt, in DECODE steps, and in steps that filter."""
    drawn = Random(2)

    def sequences(batch: int) -> list[Sequence]:
        return [
            Sequence(tuple(drawn.randrange(vocab_size) for _ in range(context)), STEPS + 1)
            for _ in range(batch)
        ]

    def prompt(these: list[Sequence]) -> None:
        by_hand.prefill(these)
        by_hand.finish()

    one = sequences(1)
    prompt(one)
    seconds = []
    for _ in range(5):
        began = perf_counter()
        prompt(one)
        seconds.append(perf_counter() - began)
    times = ", ".join(f"{1e3 * each:.2f}" for each in seconds)
    say(f"a prompt of {context} tokens until its token is read, five times: {times} ms")
    lines = host_profiled(f"EXTEND of {context} tokens", 5, lambda: prompt(one))
    lines += profiled(f"EXTEND of {context} tokens", 1, lambda: prompt(one))
    for filters in ({}, FILTERS):
        by_hand.filters = filters
        for batch in batches:
            these = sequences(batch)
            prompt(these)

            def steps(these: list[Sequence] = these) -> None:
                by_hand.decode(these)
                by_hand.finish()

            kind = " that filter" if filters else ""
            lines += profiled(f"DECODE steps of {batch}{kind}", STEPS, steps)
    for line in lines:
        say(line)
    by_hand.filters = {}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured, and how often."""

    config: ModelConfig
    sequences: list[Sequence]
    context: int
    pages: int
    runs: int

    def load(self, platform: Platform, share: float) -> Loaded:
        """A device that leaves the rest of its GPU's memory free."""
        return load(platform, self.config, len(self.sequences), self.context, share, self.pages)


def on_one_device(setting: Setting, make: Callable[[], Platform], parts: set[str]) -> None:
    """The parts that one device is driven by hand for; `make` makes what it is built on."""
    one = setting.load(make(), WITH_TWO_ON_A_GPU[-1])
    if torch.cuda.is_available():
        say(f"weights and pool take {torch.cuda.memory_allocated() / 1e9:.1f} GB; {one.room.pages} pages")
    by_hand = ByHand(one)
    batches = tuple(batch for batch in STEP_BATCHES if batch <= len(setting.sequences))
    context, vocab_size = min(STEP_CONTEXT, setting.context // 4), setting.config.vocab_size
    if "steps" in parts:
        measure_steps(by_hand, vocab_size, batches, context)
    if "prompts" in parts:
        measure_prompts(by_hand, vocab_size, setting.context, len(setting.sequences))
    if "profile" in parts:
        profile_steps(by_hand, vocab_size, batches, context)
    for part, name in (("alone", "device alone"), ("filtered", "device alone, top_k 20, top_p 0.95")):
        by_hand.filters = FILTERS if part == "filtered" else {}
        for _ in range(setting.runs if part in parts else 0):
            measure_alone(by_hand, setting.sequences, name)
    one.device.close()


def on_two_devices(setting: Setting, make: Callable[[], Platform]) -> None:
    """Prefill and decode on one GPU. Each is loaded before the next is made: what is free is read when it is made."""
    first, second = (setting.load(make(), share) for share in WITH_TWO_ON_A_GPU)
    requests = len(setting.sequences)
    workers = TwoWorkers(first.part, second.part, requests, CHUNK, setting.config.vocab_size)
    prompts, output_lens = zip(*((each.prompt, each.output_len) for each in setting.sequences), strict=True)
    for _ in range(setting.runs):
        say(workers.measure(prompts, output_lens))
    workers.close()


def release(on_gpu: bool) -> None:
    """Give back what nobody holds any more: schedulers and loops refer to each other, so the collector has to look."""
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


def main() -> None:
    """See the head of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model", default="0.6B", help=f"a size of Qwen3, tiny, or one of {', '.join(MODELS)}"
    )
    parser.add_argument(
        "--stored", choices=STORED, default="", help="the format of weights; default: 16 bits"
    )
    parser.add_argument("--layers", type=int, default=0, help="the model's first so many; default: all")
    parser.add_argument("--device", choices=("cuda", "cuda-on-cpu"), default="cuda")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a prompt, and of an output")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--pages", type=int, default=0, help="of the pool; 0: what memory allows")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; default: all")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.exit(0, "skipped: torch finds no GPU\n")
    config, context = model_named(given.model, given.stored, given.layers), 4 * given.longest
    sequences = workload(given.sequences, given.longest, config.vocab_size)
    tokens = sum(len(each.prompt) for each in sequences), sum(each.output_len for each in sequences)
    kind = f"{given.model} {given.stored or '16 bits'}, {config.layers} layers"
    say(f"{kind}, {given.sequences} sequences, {tokens[0]} tokens in, {tokens[1]} out")
    on_gpu = given.device == "cuda"
    setting = Setting(config, sequences, context, given.pages, given.runs)
    parts = set(given.parts.split(","))
    if parts - {"disaggregated"}:
        threads = torch.get_num_threads()
        on_one_device(setting, lambda: cuda_platform(False) if on_gpu else host_platform(threads), parts)
        release(on_gpu)
    if "disaggregated" in parts:
        on_two_devices(setting, lambda: cuda_platform(False) if on_gpu else host_platform(1))


if __name__ == "__main__":
    main()

"""What a mixture of experts costs a step on a CPU, beside transformers' own code: `python -m tests.benchmarks.experts`.

Two layers of Qwen3-30B-A3B's shapes with random weights, and a small vocabulary: 5 GB in float32. On one thread, in
time of the CPU, which other work on the machine changes little; the two ways in turns.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from shared.engine.checkpoint.model_config import parse_model_config
from tests.benchmarks.fallback import CONTEXT, PROMPT, decode, median, prefill, say
from tests.unit.engine.driver import Driver

SHAPES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 2048,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
}
WAYS: dict[str, dict[str, Any]] = {
    "Segue, compiled": {},
    "Segue, torch": {"kernels": "torch"},
    "transformers, float32": {"model_impl": "transformers"},
}


def main() -> int:
    """Medians, in milliseconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(1)
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPES))
        model.to(torch.bfloat16).save_pretrained(folder)
        del model
        say(f"two layers, one thread; a decode step at {CONTEXT} tokens of context, a prompt of {PROMPT}\n")
        say(f"{'ms of CPU':36}{'1 row':>10}{'8 rows':>10}{'prompt':>10}")
        for way, settings in [*WAYS.items(), *WAYS.items()]:
            figures = _seconds(folder, settings)
            gc.collect()  # 5 GB of weights, in cycles
            say(f"{way:36}" + "".join(f"{1e3 * seconds:10.1f}" for seconds in figures))
    say_roofline()
    return 0


def _seconds(folder: Path, settings: dict[str, Any]) -> list[float]:
    driver = Driver(folder, pages=400, slots=9, threads=1, kv_cache_dtype="float32", **settings)
    try:
        return [decode(driver, 1), decode(driver, 8), prefill(driver)]
    finally:
        driver.close()


def say_roofline() -> None:
    """What the weights that a row needs take to read, in float32 on one thread."""
    torch.set_num_threads(1)
    numbers, published = torch.ones(2**28), {"architectures": ["Qwen3MoeForCausalLM"], **SHAPES}
    config = parse_model_config(Qwen3MoeConfig(**SHAPES).to_dict() | published)
    matrix, row = numbers.view(-1, SHAPES["hidden_size"]), torch.ones(SHAPES["hidden_size"])
    needed = config.computed * numbers.itemsize
    say(f"\na row needs {needed / 1e6:.0f} MB of weights in float32, half of that in 16 bits")

    def add() -> None:
        numbers.sum()

    def multiply() -> None:
        torch.mv(matrix, row)

    for what, work in (("a sum", add), ("torch's product of one row", multiply)):
        rate = numbers.nbytes / median(work)
        say(f"{what} reads {rate / 1e9:.1f} GB/s: {1e3 * needed / rate:.1f} ms")


if __name__ == "__main__":
    sys.exit(main())

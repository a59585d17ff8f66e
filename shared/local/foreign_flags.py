"""Flags of other servers' command lines, and what to type or to know instead: those that users bring along.

From `vllm serve`, `sglang.launch_server` and `llama-server`, as of 2026. What means the same here is an alias in
`LocalConfig`; what stands here is refused with the answer, and never taken for a slip in one of our own.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.primitives.errors import ConfigError

_FLAGS = {  # by the answer, the end of a sentence that begins with the flag
    "is not supported: a worker has one GPU; --prefill N and --decode N add workers": (
        "--tensor-parallel-size -tp --tp --tp-size --pipeline-parallel-size -pp --pp-size --data- "
        "parallel-size -dp --dp --dp-size --ep --ep-size --enable-expert-parallel --tensor-split -ts "
        "--distributed-executor-backend"
    ),
    "is --max-total-tokens N here, the tokens of KV that each worker keeps; 0 takes what memory allows": (
        "--gpu-memory-utilization --mem-fraction-static --kv-cache-memory-bytes --swap-space --cpu- "
        "offload-gb"
    ),
    "is --page-size here": ("--block-size"),
    "is --max-running-requests N here": ("--max-num-seqs --parallel -np"),
    "is --chunked-prefill-size N here, tokens of an EXTEND step": (
        "--max-num-batched-tokens --batch-size -b --ubatch-size -ub"
    ),
    "is not needed: leave it out": (
        "--enable-chunked-prefill --jinja --guided-decoding-backend --structured-outputs-config "
        "--grammar-backend --chat-template-content-format"
    ),
    "is --context-len here": ("--ctx-size -c --context-length"),
    "is not needed: prefix caches are always on; a request's cache_salt keeps its own apart": (
        "--enable-prefix-caching --no-enable-prefix-caching --disable-radix-cache"
    ),
    "is not needed: a worker on a GPU records graphs of its decode steps by itself": (
        "--enforce-eager --disable-cuda-graph --cuda-graph-max-bs --compilation-config"
    ),
    "is not supported: weights are served as their safetensors or GGUF file has them": (
        "--quantization -q --load-format"
    ),
    "is not supported: code that comes with a model is never run": ("--trust-remote-code"),
    "is not supported: edit config.json in a copy of the folder": ("--hf-overrides"),
    "is not supported: the tokenizer is the one in the model's folder": ("--tokenizer --tokenizer-path"),
    "is not supported: download the revision, and name its folder": ("--revision"),
    "is --model here": ("--model-path -m"),
    "is --model here, with an id of the Hub": ("-hf"),
    "is not supported: a model is on a GPU whole (--device cuda), or not at all": ("--n-gpu-layers -ngl"),
    "is not supported: merge the adapter into the weights": (
        "--enable-lora --lora-modules --lora-paths --lora"
    ),
    "is not supported: there is no speculative decoding": (
        "--speculative-config --speculative-algorithm --model-draft -md"
    ),
    "is --tool-call-parser here, which turns tools on for any model; some need none": (
        "--enable-auto-tool-choice"
    ),
    "is not needed: --reasoning-parser auto knows the models that think": ("--enable-reasoning"),
    "is not supported: put chat_template.jinja into a copy of the model's folder": ("--chat-template"),
    "is not supported: the paths are OpenAI's": ("--root-path"),
    "is not supported: put a proxy that speaks TLS before the router": (
        "--ssl-keyfile --ssl-certfile --ssl-key-file --ssl-cert-file"
    ),
    "is not needed: requests are not logged": ("--disable-log-requests"),
    "is not needed: /metrics is on the admin port": ("--enable-metrics --metrics"),
    "is a field of a request here": ("--seed"),
    "is --threads here": ("-t"),
    "is not needed: prefill and decode are always processes of their own": (
        "--disaggregation-mode --disaggregation-transfer-backend --kv-transfer-config"
    ),
}
FOREIGN_FLAGS = {flag: answer for answer, flags in _FLAGS.items() for flag in flags.split()}


def refuse_foreign_flags(words: Sequence[str]) -> None:
    """Raise ConfigError for the first flag of another server, with what to type or to know instead."""
    for word in words:
        name = word.partition("=")[0]
        if answer := FOREIGN_FLAGS.get(name):
            raise ConfigError(f"{name} {answer}")

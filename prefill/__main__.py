"""`python -m prefill`: one prefill worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.process.first_signals import end_on_signals

if TYPE_CHECKING:
    from prefill.config import PrefillConfig


def serve(config: PrefillConfig) -> None:
    """Load what is heavy and run until the worker may exit."""
    from prefill.scheduler import PrefillScheduler
    from shared.engine.engine import resolve_device
    from shared.scheduling.prefill_adder import step_input
    from shared.worker import worker

    config = config.on(resolve_device(config.device))

    def build(parts: worker.WorkerParts) -> PrefillScheduler:
        return PrefillScheduler(
            config,
            pages=parts.engine.limits.pages,
            context_len=parts.engine.limits.context_len,
            holder=parts.transfer.holder,
            words=parts.transfer.words,
            kv_format=parts.kv_format,
            vocab_size=parts.engine.limits.vocab_size,
            eos_token_ids=parts.engine.eos_token_ids,
        )

    worker.serve(
        config,
        "prefill",
        build,
        leases_max=config.leases_max,
        fetch_seconds_max=config.lease_seconds,  # it fetches only from itself, at its start
        host_fraction=0.0,
        extend_tokens=step_input(config.max_prefill_tokens, config.chunked_prefill_size, config.page_size),
    )


def _main() -> None:
    from prefill.config import PrefillConfig
    from shared.process.role_main import run_role

    run_role("prefill", PrefillConfig, serve)


if __name__ == "__main__":
    end_on_signals()
    _main()

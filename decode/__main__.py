"""`python -m decode`: one decode worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.process.first_signals import end_on_signals

if TYPE_CHECKING:
    from decode.config import DecodeConfig


def serve(config: DecodeConfig) -> None:
    """Load what is heavy and run until the worker may exit."""
    from decode.scheduler import DecodeScheduler
    from shared.engine.engine import resolve_device
    from shared.worker import worker

    config = config.on(resolve_device(config.device))

    def build(parts: worker.WorkerParts) -> DecodeScheduler:
        return DecodeScheduler(
            config,
            pages=parts.engine.limits.pages,
            host_pages=parts.engine.host_pages,
            context_len=parts.engine.limits.context_len,
            holder=parts.transfer.holder,
            words=parts.transfer.words,
            kv_format=parts.kv_format,
            vocab_size=parts.engine.limits.vocab_size,
            eos_token_ids=parts.engine.eos_token_ids,
        )

    worker.serve(
        config,
        "decode",
        build,
        leases_max=config.max_running_requests,  # every running request may have to migrate
        fetch_seconds_max=config.fetch_seconds_max,
        host_fraction=config.host_fraction,
        extend_tokens=max(config.local_tokens_max, config.page_size) if config.local_tokens_max else 0,
    )


def _main() -> None:
    from decode.config import DecodeConfig
    from shared.process.role_main import run_role

    run_role("decode", DecodeConfig, serve)


if __name__ == "__main__":
    end_on_signals()
    _main()

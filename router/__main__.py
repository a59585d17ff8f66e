"""`python -m router`: one router. `--help` and a wrong flag answer without loading anything heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.process.first_signals import end_on_signals

if TYPE_CHECKING:
    from router.config import RouterConfig


def _serve(config: RouterConfig) -> None:
    from router.process import serve

    serve(config)


def _main() -> None:
    from router.config import RouterConfig
    from shared.process.role_main import run_role

    run_role("router", RouterConfig, _serve)


if __name__ == "__main__":
    end_on_signals()
    _main()

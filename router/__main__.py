"""`python -m router`: one router. `--help` and a wrong flag answer without loading anything heavy."""

from __future__ import annotations

from router.config import RouterConfig
from shared.process.role_main import run_role


def _serve(config: RouterConfig) -> None:
    from router.process import serve

    serve(config)


if __name__ == "__main__":
    run_role("router", RouterConfig, _serve)

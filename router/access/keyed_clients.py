"""What there is where clients have API keys: the keys, quotas and accounts of one router, put together.

Without `api_keys_file` nothing of it is made, and a request passes none of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp

from router.access.key_guard import KeyGuard
from router.access.key_ring import KeyRing
from router.access.quotas import Quotas
from router.access.usage_accounts import UsageAccounts
from router.config import RouterConfig
from router.shell import RouterShell


class KeyedClients:
    """The keys of one router; made on its event loop."""

    def __init__(
        self, ring: KeyRing, settings: RouterConfig, shell: RouterShell, routers_ready: Callable[[], int]
    ):
        self.counters = ring.counters
        self.quotas = Quotas(routers_ready, lambda: ring.names)
        now = asyncio.get_running_loop().time
        self.accounts = UsageAccounts(ring.counters, now, logged=settings.usage_log)
        self._ring = ring
        self._settings = settings
        self._following = asyncio.create_task(ring.read_for_ever())
        shell.meter = self.accounts.metered

    def guard(self, app: ASGIApp) -> ASGIApp:
        """The application for those who have a key."""
        return KeyGuard(app, self._ring, self.quotas, self.accounts, self._settings)

    def close(self) -> None:
        """Follow the file no more."""
        self._following.cancel()

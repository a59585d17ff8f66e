"""Tenants that a decode worker has refused, whom it is believed to have no room for until it has told many loads.

Only the worker knows what a tenant has there from all routers. A router that knows nothing of it asks, and learns.
"""

from __future__ import annotations

from collections import OrderedDict

REFUSED_LOADS = 16  # a tenth of a second apart at least: as long a worker that refused a tenant is believed
REFUSED_MAX = 16  # tenants that a worker has refused, and that are remembered


class RefusedTenants:
    """Tenants that one decode worker has refused lately, by the number of its loads."""

    def __init__(self) -> None:
        self._until: OrderedDict[str, int] = OrderedDict()  # by tenant: the number of the load until which

    def __contains__(self, tenant: str) -> bool:
        """Whether it was refused lately."""
        return tenant in self._until

    def add(self, tenant: str, load_number: int) -> None:
        """The tenant is refused, when the worker has told so many loads."""
        self._until[tenant] = load_number + REFUSED_LOADS
        self._until.move_to_end(tenant)
        if len(self._until) > REFUSED_MAX:
            self._until.popitem(last=False)

    def forgive(self, load_number: int) -> bool:
        """The worker has told so many loads; returns whether it may be asked again for some tenant."""
        forgiven = [tenant for tenant, until in self._until.items() if until <= load_number]
        for tenant in forgiven:
            del self._until[tenant]
        return bool(forgiven)

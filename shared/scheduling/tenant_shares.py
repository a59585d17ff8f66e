"""What one tenant may take of a worker, and who goes first among tenants; both roles share it.

A worker knows tenants by an opaque key that is the same from all routers, so it can judge where a router sees only its
own requests. A request is *below its share* if its tenant, with it, would still hold fewer tokens here than another
one, and no more than an even share of what there is: so such requests fit, however many tenants there are. What a
tenant may not take alone (`tenant_share_max`) is kept for them. With one tenant no request is below its share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from shared.batch.req import Req


def share_of(places: int, share_max: float) -> int:
    """How many of `places` one tenant may take, at least one."""
    return max(1, round(places * share_max))


def tokens_by_tenant(reqs: Iterable[Req]) -> Counter[str]:
    """The tokens of the requests of each tenant."""
    held: Counter[str] = Counter()
    for req in reqs:
        held[req.tenant] += len(req.token_ids)
    return held


def is_below_share(req: Req, held: Counter[str], size: int, capacity: float) -> bool:
    """Whether the tenant of `req` would hold fewer tokens than another one, with this request beside what is `held`.

    With the `size` to which the request may grow, its tenant must also stay within an even share of `capacity`, both in
    tokens. One share more than there are tenants is counted, so that the other requests keep one.
    """
    own = held[req.tenant]
    others = [tokens for tenant, tokens in held.items() if tenant != req.tenant]
    if not others or own + size > capacity / (len(others) + 2):
        return False
    return own + len(req.token_ids) < max(others)


def heaviest_tenant(reqs: Iterable[Req]) -> str:
    """The tenant that holds the most tokens; the first in the order of `reqs` on ties."""
    held = tokens_by_tenant(reqs)
    return max(held, key=lambda tenant: held[tenant])


def least_served_first(waiting: Sequence[Req], held: Counter[str]) -> list[Req]:
    """`waiting` in the order of the tokens that its tenant has before it: in what is `held` and in `waiting` itself.

    Requests of one tenant keep their order.
    """
    ahead = held.copy()
    ranks = {}
    for req in waiting:
        ranks[req.sequence] = ahead[req.tenant]
        ahead[req.tenant] += len(req.token_ids)
    return sorted(waiting, key=lambda req: ranks[req.sequence])

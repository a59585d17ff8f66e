"""How much memory there is for KV pages, in words that a person can check.

A worker may use what its control group leaves, or else half of what the machine has free (prefill and decode often
share one machine). Weights and a reserve for activations come first; pages get the rest, but never more than all
slots could fill, nor than were asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError, ModelError
from shared.kv.page_pool import pages_for_tokens

RESERVE_BYTES = 2**30  # the interpreter, torch, activations
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Demand:
    """What a worker wants to hold."""

    weights_bytes: int
    page_bytes: int
    page_size: int  # tokens
    host_share: float  # pages in host memory for each page of the pool
    slots: int
    context_len: int  # tokens
    max_total_tokens: int = (
        0  # pages for more are not wanted, but for one whole context they are; 0: no bound
    )


@dataclass(frozen=True)
class Budget:
    """Bytes this process may use, and where the figure comes from."""

    memory_bytes: int
    origin: str


def memory_budget(memory_bytes: int | None = None) -> Budget:
    """The given budget, or the control group's, or half of the machine's free memory."""
    if memory_bytes is not None:
        return Budget(memory_bytes, "as it was given")
    free = _meminfo_bytes("MemAvailable")
    limit = _cgroup_limit_bytes()
    if limit is not None and limit <= free:
        return Budget(limit, "the limit of its control group")
    return Budget(free // 2, f"half of the machine's {_gib(free)} free")


def choose_pages(demand: Demand, budget: Budget, pages: int | None) -> tuple[int, str]:
    """The number of pages, and why. An explicit `pages` wins.

    Raises `ConfigError` if explicit pages cannot fit, `ModelError` if the model leaves no room for one full request.
    """
    page_bytes = round(demand.page_bytes * (1 + demand.host_share))
    rest = budget.memory_bytes - demand.weights_bytes - RESERVE_BYTES
    figures = (
        f"{_gib(budget.memory_bytes)} ({budget.origin}) less {_gib(demand.weights_bytes)} of weights and "
        f"{_gib(RESERVE_BYTES)} of reserve leaves {_gib(max(rest, 0))} for KV"
        + (f" and {demand.host_share:.0%} of it again in host pages" if demand.host_share else "")
    )
    if pages is not None:
        if pages * page_bytes > rest:
            raise ConfigError(f"{pages} pages need {_gib(pages * page_bytes)}; {figures}: ask for fewer")
        return pages, "as configured"
    needed = pages_for_tokens(demand.context_len, demand.page_size)
    if rest < needed * page_bytes:
        raise ModelError(
            f"too little memory: {figures}, one request of {demand.context_len} tokens needs "
            f"{_gib(needed * page_bytes)}: give more memory, or a shorter context"
        )
    most, reason = demand.slots * needed, f"enough for {demand.slots} requests of {demand.context_len} tokens"
    if demand.max_total_tokens:
        wanted = max(needed, pages_for_tokens(demand.max_total_tokens, demand.page_size))
        if wanted < most:
            why = "as configured" if wanted > needed else "one whole context, the least there is"
            most, reason = wanted, f"for {wanted * demand.page_size} tokens, {why}"
    if rest // page_bytes >= most:
        return most, reason
    return rest // page_bytes, figures


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _meminfo_bytes(field: str) -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ModelError(f"/proc/meminfo has no {field}: set the number of pages")


def _cgroup_limit_bytes() -> int | None:
    """The lowest limit of this process's control group and its parents; None if there is none."""
    limits: list[int] = []
    for group in _cgroups():
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                limits.append(int((group / name).read_text(encoding="ascii")))
            except (OSError, ValueError):  # absent, or the word `max`
                continue
    return min(limits, default=None)


def _cgroups() -> list[Path]:
    groups = [_CGROUP, _CGROUP / "memory"]
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return groups
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = _CGROUP / "memory" if "memory" in controllers.split(",") else _CGROUP
        group = root / path.lstrip("/")
        groups += [group, *(parent for parent in group.parents if parent.is_relative_to(root))]
    return groups

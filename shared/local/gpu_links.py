"""How the GPUs of this machine reach each other, as `nvidia-smi topo -m` says it.

    NV18        NVLink, so many of them
    PIX … SYS   PCIe, by way of more and more: a switch, a host bridge, the link between sockets

A worker of several GPUs adds up what they have computed twice a layer, so the link decides how fast it is.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from itertools import combinations

SECONDS_MAX = 20.0  # a driver that is not loaded yet takes some
_STYLE = re.compile(r"\x1b\[\d*m")
_GPU = re.compile(r"GPU\d+")

Links = Mapping[tuple[str, str], str]  # of each pair of GPUs, "NV18" or "SYS"


def read_topology() -> str:
    """What `nvidia-smi topo -m` prints; empty where it cannot be asked."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        ended = subprocess.run(
            [program, "topo", "-m"], check=False, capture_output=True, text=True, timeout=SECONDS_MAX
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


def links_in(topology: str) -> Links:
    """The link of each pair; {} for one GPU, and for a table of another form."""
    rows = [
        [cell.strip() for cell in line.split("\t")] for line in _STYLE.sub("", topology).splitlines() if line
    ]
    if not rows:
        return {}
    columns = {name: at for at, name in enumerate(rows[0]) if _GPU.fullmatch(name)}
    by_name = {row[0]: row for row in rows[1:] if row[0] in columns}
    links = {}
    for one, other in combinations(columns, 2):
        row = by_name.get(one, [])
        if len(row) <= columns[other]:
            return {}
        links[one, other] = row[columns[other]]
    return links


def described(links: Links) -> str:
    """All pairs in a few words, for a line."""
    kinds = sorted(set(links.values()))
    if len(kinds) == 1:
        return f"{kinds[0]} between any two"
    return ", ".join(
        f"{kind} between {' '.join(f'{a}-{b}' for (a, b), of in links.items() if of == kind)}"
        for kind in kinds
    )


def has_slow(links: Links) -> bool:
    """Whether some pair has no NVLink."""
    return any(not kind.startswith("NV") for kind in links.values())

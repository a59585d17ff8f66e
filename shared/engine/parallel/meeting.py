"""Where ranks of a worker meet: a file of their own, and sockets on loopback.

Neither gloo nor NCCL asks who connects, so nothing of them listens on another interface. When a rank is lost, its
worker ends it all (`shared.worker.rank_group`): no wait of theirs has a limit that counts, and NCCL's own watch is off.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from torch import distributed as dist
from torch._C._distributed_c10d import FileStore

from shared.engine.parallel.collectives import Collectives, GlooCollectives, NcclCollectives
from shared.engine.parallel.shares import Share

_NO_LIMIT = timedelta(days=365)
_MEETING = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TORCH_NCCL_ENABLE_MONITORING": "0"}


def meet(file: Path, share: Share, *, on_gpus: bool) -> Collectives:
    """Wait for all ranks. Once a process; `file`: an empty one at first, in which no others have met."""
    os.environ.update(_MEETING)
    store = FileStore(str(file), share.ranks)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        store=store,
        rank=share.rank,
        world_size=share.ranks,
        timeout=_NO_LIMIT,
    )
    group = dist.group.WORLD
    assert group is not None
    return NcclCollectives(group) if on_gpus else GlooCollectives(group)

"""The check-up of a real deployment; `helm test` runs the same."""

from __future__ import annotations

import re

from shared.checkup import check_up
from tests.integration.deployment import Deployment


def test_every_checkup_sees_kv_move(one_each: Deployment) -> None:
    for _ in range(2):  # the second time the decode worker has cached the first one's pages
        moved = re.fullmatch(r"(\d+) bytes of KV moved for it", check_up(one_each.url)[-1])
        assert moved is not None
        assert int(moved[1]) > 0

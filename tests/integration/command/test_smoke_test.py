"""The smoke test of a real deployment; `helm test` runs the same."""

from __future__ import annotations

import re

from shared.local.smoke_test import smoke_test
from tests.integration.deployments.aggregated import needs_prefill
from tests.integration.deployments.deployment import LocalDeployment


@needs_prefill("no KV moves")
def test_every_smoke_test_sees_kv_move(one_each: LocalDeployment) -> None:
    above_1_mib = list(range(1000, 1400))  # of KV: a fetch that measures its link
    one_each.client.completions.create(model="smollm2", prompt=above_1_mib, max_tokens=2)
    for _ in range(2):  # the second time the decode worker has cached the first one's pages
        *_, found, link = smoke_test(one_each.url, one_each.admin_url)
        moved = re.fullmatch(r"(\d+) bytes of KV moved for it in [\d.]+ ms: the link gave (\d+) MB/s", found)
        assert moved is not None, found
        assert int(moved[1]) > 0
        assert int(moved[2]) > 0
        measured = re.fullmatch(r"by its last fetches it carries (\d+) MB/s over cma/memory", link)
        assert measured is not None, link
        assert int(measured[1]) > 0

"""`python -m tests.benchmarks.client --url http://…/v1`: measure one server of OpenAI's API, this one or any other."""

from __future__ import annotations

import sys

from rich.console import Console

from shared.primitives.errors import StartError
from shared.process.settings import load
from tests.benchmarks.client.config import BenchConfig
from tests.benchmarks.client.errors import BenchError
from tests.benchmarks.client.measuring import bench

try:
    config = load(BenchConfig, sys.argv[1:], {})  # no variables: SEGUE_MODEL is a path of the server's
    bench(config, Console(highlight=False, soft_wrap=True, markup=False))
except (BenchError, StartError) as error:
    sys.exit(f"bench: {error}")
except KeyboardInterrupt:
    sys.exit(130)

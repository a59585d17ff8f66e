"""How a role's process begins."""

from __future__ import annotations

import subprocess
import sys


def test_a_process_may_open_as_many_descriptors_as_the_system_allows() -> None:
    program = """
import resource
from shared.process.role_main import raise_descriptor_limit
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
raise_descriptor_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr

"""The seed of the links as an operator keeps it: a file that only its user can read."""

from __future__ import annotations

import os
from pathlib import Path

from shared.links.keys import SEED_BYTES


def write_new_seed(path: Path) -> None:
    """Draw a seed into a new file."""
    path.touch(0o600, exist_ok=False)
    path.write_bytes(os.urandom(SEED_BYTES))

"""Makes the wheel and the sdist of a tree, the same bytes each time: hatchling takes all times from SOURCE_DATE_EPOCH.

Knows no git: who calls this has a folder with what is to be packed, and nothing else in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def build_packages(tree: Path, folder: Path, epoch_seconds: int) -> list[Path]:
    """Build both into `folder`, and return their paths. `epoch_seconds`: the time of every file in them.

    Raises subprocess.CalledProcessError.
    """
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder.resolve())]
    command += ["--target", "wheel", "--target", "sdist"]
    before = set(folder.glob("*"))
    subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch_seconds)},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return sorted(set(folder.glob("*.whl")) | set(folder.glob("*.tar.gz")) - before)

"""An environment of its own for each client: made once for its pins, kept in the cache, used by its program."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "segue" / "clients"


def client_python(name: str) -> Path:
    """The interpreter that has what `pins/NAME.txt` names; made where it is not there yet, which takes minutes."""
    pins = HERE / "pins" / f"{name}.txt"
    folder = CACHE / f"{name}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:12]}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", pins], check=True)
        complete.touch()
    return python


def run_client(name: str, base_url: str, model: Path, seconds_max: float) -> dict[str, Any]:
    """Run `programs/NAME.py` against a server; what its last line tells. Raises with its output where it fails."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    environment |= {"SEGUE_BASE_URL": base_url, "SEGUE_MODEL_FOLDER": str(model), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [client_python(name), HERE / "programs" / f"{name}.py"],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=seconds_max,
    )
    if ended.returncode:
        raise AssertionError(f"{name} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr[-4000:]}")
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return told

"""An environment of its own for each client: made once for its pins, kept in the cache, used by its program.

`pins/NAME.txt` is what pip installs for `programs/NAME.py`, `pins/NAME.json` what npm installs for `programs/NAME.mjs`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "segue" / "clients"


def client_command(name: str) -> list[Path | str]:
    """How to run the client's program; its environment is made where it is not there yet, which takes minutes."""
    for_python = HERE / "pins" / f"{name}.txt"
    pins = for_python if for_python.exists() else for_python.with_suffix(".json")
    folder = CACHE / f"{name}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:12]}"
    complete = folder / "complete"
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        if pins is for_python:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([folder / "bin" / "pip", "install", "--quiet", "-r", pins], check=True)
        else:
            folder.mkdir(parents=True)
            shutil.copy(pins, folder / "package.json")
            subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent"], check=True, cwd=folder)
        complete.touch()
    if pins is for_python:
        return [folder / "bin" / "python", PROGRAMS / f"{name}.py"]
    for program in ("told", name):  # Node looks for packages beside the program
        shutil.copy(PROGRAMS / f"{program}.mjs", folder)
    return ["node", folder / f"{name}.mjs"]


def run_client(name: str, base_url: str, model: Path, seconds_max: float) -> dict[str, Any]:
    """Run a client's program against a server; what its last line tells. Raises with its output where it fails."""
    environment = {word: os.environ[word] for word in ("PATH", "HOME")} | {
        "SEGUE_BASE_URL": base_url,
        "SEGUE_MODEL_FOLDER": str(model),
        "SEGUE_CHROMIUM": shutil.which("chromium") or "",
    }
    ended = subprocess.run(
        client_command(name),
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

"""An environment of its own for each client: made once for its pins, kept in the cache, used by its program.

`pins/NAME.txt` is what pip installs for `programs/NAME.py`, `pins/NAME.json` what npm installs for `programs/NAME.mjs`.
Agents are programs themselves: `test_agent_programs` runs the commands that npm installs for them.
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


def client_folder(name: str) -> Path:
    """The client's environment, which is made where it is not there yet: that takes minutes."""
    pins = _pins(name)
    folder = CACHE / f"{name}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:12]}"
    complete = folder / "complete"
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        if pins.suffix == ".txt":
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([folder / "bin" / "pip", "install", "--quiet", "-r", pins], check=True)
        else:
            folder.mkdir(parents=True)
            shutil.copy(pins, folder / "package.json")
            subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent"], check=True, cwd=folder)
        complete.touch()
    return folder


def client_command(name: str) -> list[Path | str]:
    """How to run the client's program in its environment."""
    folder = client_folder(name)
    if _pins(name).suffix == ".txt":
        return [folder / "bin" / "python", PROGRAMS / f"{name}.py"]
    for program in ("told", name):  # Node looks for packages beside the program
        shutil.copy(PROGRAMS / f"{program}.mjs", folder)
    return ["node", folder / f"{name}.mjs"]


def _pins(name: str) -> Path:
    for_python = HERE / "pins" / f"{name}.txt"
    return for_python if for_python.exists() else for_python.with_suffix(".json")


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

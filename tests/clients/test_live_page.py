"""The live page in a browser, on a real deployment: what it shows is what happens, and it asks nobody else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.clients.environments import PROGRAMS, client_folder
from tests.integration.deployments.deployment import LocalDeployment, deployment
from tests.waiting import until

EXACT = {"kvPages": 600, "kvCacheDtype": "float32"}
DOCS = Path(__file__).parents[2] / "docs"
FRAME_MS_MAX = 16  # of CPU: sixty frames a second
SHOT_BYTES_MAX = 90_000


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: into the documentation, if SEGUE_SCREENSHOTS is set."""
    return DOCS if os.environ.get("SEGUE_SCREENSHOTS") else tmp_path_factory.mktemp("shots")


def watch(serving: LocalDeployment, shots: Path) -> dict[str, Any]:
    """What the program in the browser has seen."""
    python = client_folder("chromium_page") / "bin" / "python"
    axe = client_folder("live_page") / "node_modules" / "axe-core" / "axe.min.js"
    start = "in a browser: "
    printed = next(line for line in serving.command.read_lines() if line.startswith(start)).removeprefix(
        start
    )
    drains = next(process for process in serving.processes("decode") if process.uid == "decode-1")
    environment = {word: os.environ[word] for word in ("PATH", "HOME")} | {
        "SEGUE_CHROMIUM": shutil.which("chromium") or "",
        "SEGUE_LIVE_URL": serving.url,
        "SEGUE_ADMIN_URL": serving.admin_url,
        "SEGUE_PRINTED_URL": printed,
        "SEGUE_DRAIN_PID": str(drains.pid),
        "SEGUE_SHOTS": str(shots),
        "SEGUE_AXE": str(axe),
    }
    program = [python, PROGRAMS / "live_page.py"]
    ended = subprocess.run(program, check=False, capture_output=True, text=True, env=environment, timeout=900)
    assert not ended.returncode, f"{ended.stdout}\n{ended.stderr[-4000:]}"
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return told


@pytest.mark.timeout(1800)
def test_the_live_page_shows_what_happens_and_asks_nobody_else(shots: Path) -> None:
    config = {"prefill": EXACT, "decode": EXACT}
    with deployment("--decode", "2", as_shipped=True, config=config) as serving:
        told = watch(serving, shots)
        until(serving.all_linked, 60, "the return of all workers")
        until(lambda: not serving.held(), 10, "everything given back")
        hosts = {urlsplit(url).netloc for url in (serving.url, serving.admin_url)}
    sys.stdout.write(f"{json.dumps(told)}\n")  # shown where the test fails, or by -rP
    drained, killed = told["drained"], told["killed"]
    assert drained["moved"] >= 1
    assert drained["moved"] == drained["counted"], "dots that have moved, and what the router has counted"
    assert "decode-1 is leaving" in drained["ticker"]
    assert killed["same"], "the killed worker's stream has the text of the undisturbed one"
    assert killed["length"] > 300
    assert killed["seam"].startswith(f"{killed['pod']} died here")
    assert len(killed["visits"]) >= 3, "its timeline names the pods that it went to"
    assert set(told["hosts"]) == hosts, "no request to another host"
    for found in (told["dark"], told["light"], told["keyboard"]["faults"], told["many"]["faults"]):
        assert found == [], "axe finds nothing"
    assert told["keyboard"] | {"faults": []} == {
        "opened": "decode-0",
        "closed": True,
        "rows": ["decode-0", "decode-1", "prefill-0"],
        "faults": [],
    }
    foreign = told["foreign"]
    assert foreign["unseen"][1:] == [0, ""], "its answer is not shown to the page"
    assert foreign["events"][1:] == [403, ""]
    assert "<html" not in foreign["page"][2], "it gets the paths, as every program does"
    assert foreign["kill"][1:] == [403, ""]
    stranger = told["stranger"]
    assert (stranger["kill"], stranger["left"]) == (0, ""), "no button without the token, which the bar hides"
    assert "the whole address" in stranger["said"]
    assert stranger["again"] == 3, "the tab keeps it"
    assert told["admin"] == {"chat": False, "kill": 0}
    assert "% full" in told["many"]["said"]
    assert told["many"]["opened"]
    assert told["many"]["frames"] > 30
    assert told["many"]["ms_a_frame"] <= FRAME_MS_MAX
    for name in ("light", "dark", "heat"):
        assert 5_000 < (shots / f"live-{name}.webp").stat().st_size < SHOT_BYTES_MAX

"""What well-known clients send by default is served, and what of it is passed over is named: `tests/clients/bodies`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.unit.router.scripted_workers import RunningRouter

FOLDER = Path(__file__).parents[2] / "clients" / "bodies"
BODIES = {file.stem: file for file in sorted(FOLDER.glob("*.json"))}


@pytest.mark.parametrize("name", BODIES)
def test_what_a_client_sends_by_default_is_served(router: RunningRouter, name: str) -> None:
    said: dict[str, Any] = json.loads(BODIES[name].read_text(encoding="utf-8"))
    answer = httpx2.post(f"{router.url}{said['path']}", json=said["body"], timeout=20)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-segue-ignored", "") == said["ignored"]


def test_there_are_bodies() -> None:
    assert len(BODIES) >= 17

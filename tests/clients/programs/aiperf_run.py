"""aiperf's command: a short profile of streamed chats, with the server's own token counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from told import BASE_URL, MODEL, Sums

REQUESTS = 12


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                Path(sys.executable).with_name("aiperf"),
                "profile",
                "--model",
                MODEL,
                "--url",
                BASE_URL.removesuffix("/v1"),
                "--endpoint-type=chat",
                "--streaming",
                "--use-server-token-count",
                "--tokenizer",
                os.environ["SEGUE_MODEL_FOLDER"],
                f"--request-count={REQUESTS}",
                "--concurrency=4",
                "--isl=48",
                "--osl=16",
                "--ui=none",
                "--artifact-dir",
                folder,
            ],
            check=True,
            stdout=sys.stderr,
            timeout=500,
        )
        (export,) = Path(folder).rglob("profile_export_aiperf.json")
        profile = json.loads(export.read_text(encoding="utf-8"))
    told = Sums()
    assert not profile["error_summary"], profile["error_summary"]
    told.answers = int(profile["request_count"]["avg"])
    assert told.answers == REQUESTS
    told.completion_tokens = int(profile["total_output_tokens"]["avg"])
    told.write()


main()

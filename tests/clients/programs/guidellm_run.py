"""guidellm's command: a short benchmark of chats, and what its report counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from told import BASE_URL, MODEL, Sums

REQUESTS = 12
TOKENS = 16


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run(
            [
                Path(sys.executable).with_name("guidellm"),
                "run",
                f"--backend=kind=openai_http,target={BASE_URL.removesuffix('/v1')},model={MODEL}",
                "--profile=kind=concurrent,streams=4",
                f"--constraint=kind=max_requests,count={REQUESTS}",
                f"--data=kind=synthetic_text,prompt_tokens=48,output_tokens={TOKENS}",
                f"--tokenizer=kind=huggingface_auto,model={os.environ['SEGUE_MODEL_FOLDER']}",
                f"--output=kind=json,path={report}",
                "--disable-console-interactive",
            ],
            check=True,
            stdout=sys.stderr,
            timeout=500,
        )
        (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    sys.stderr.write(json.dumps(benchmark["metrics"]["request_totals"]))
    assert benchmark["metrics"]["request_totals"]["errored"] == 0
    told = Sums()
    for request in benchmark["requests"]["successful"]:
        told.add(request["output_metrics"]["text_tokens"])
    assert told.answers == REQUESTS
    told.write()


main()

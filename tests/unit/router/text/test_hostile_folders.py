"""A model folder by a stranger ends in one sentence: its template and its tokenizer get 256 MiB and 5 s, no more."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.text.folder_trial import CPU_SECONDS, MEMORY_BYTES, try_folder
from shared.limits.model_files import TOKENIZER_BYTES_MAX
from shared.primitives.errors import ModelError
from tests.link_keys import write_new_keys
from tests.unit.router.tiny_model import CHAT_TEMPLATE, write_folder

TEMPLATE_SECONDS = 2.0
IMPORTS_BYTES = 192 << 20  # of transformers in the child, and of the router before
IMPORTS_SECONDS = 5.0  # on a slow machine

MEASURE = (  # runs its arguments; prints the status, and of them and their children the largest size and all seconds
    "import os, subprocess, sys; child = subprocess.Popen(sys.argv[1:]); _, status, usage = os.wait4(child.pid, 0); "
    "print(os.waitstatus_to_exitcode(status), usage.ru_maxrss, usage.ru_utime + usage.ru_stime)"
)
TRIALS = """
import os, sys
from router.text import folder_trial
folder_trial.hide_torch()
from transformers import AutoTokenizer
for folder in sys.argv[1:]:
    if not (child := os.fork()):
        sys.argv[1:] = [folder, "%s", "%s", "%s", ""]
        status = folder_trial.main()
        sys.stdout.flush()
        os._exit(status)
    print("", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""  # as `try_folder`'s child does; what takes a second, to import transformers, is done once for all
GREEDY_TEMPLATES = {
    "a product": "{{ 'x' * 2000000000 }}",
    "a format": "{{ '{:>4000000000}'.format('x') }}",
    "a percent format": "{{ '%4000000000d' % 1 }}",
    "replace": "{{ ('a' * 60000).replace('a', 'b' * 60000) }}",
    "a list": "{{ ([1] * 500000000) | length }}",
    "center": "{{ 'x'.center(4000000000) }}",
    "doubling": "{% set ns = namespace(x='x' * 99) %}{% for _ in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "only with tools": "{% if tools %}{{ 'x' * 2000000000 }}{% endif %}" + CHAT_TEMPLATE,
}


def with_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A folder whose tokenizer.json was changed."""
    path = write_folder(folder) / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return folder


def multiplies(tokenizer: dict[str, Any]) -> None:
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [replace] * 6}


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the trial of each folder prints, and its status."""
    folders = [
        write_folder(tmp_path_factory.mktemp("greedy"), chat_template=template)
        for template in GREEDY_TEMPLATES.values()
    ]
    script = TRIALS % (TEMPLATE_SECONDS, MEMORY_BYTES, CPU_SECONDS)
    tried = subprocess.run(
        [sys.executable, "-c", script, *map(str, folders)], capture_output=True, text=True, check=True
    )
    return dict(zip(GREEDY_TEMPLATES, tried.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("template", GREEDY_TEMPLATES)
def test_a_template_that_takes_gigabytes_is_refused(trials: dict[str, str], template: str) -> None:
    assert re.fullmatch(r'"[^\n]*takes more memory[^\n]*" 1', trials[template])


def test_a_refusal_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^[^\n]*takes more memory[^\n]*$"):
        try_folder(write_folder(tmp_path, chat_template=GREEDY_TEMPLATES["a product"]), TEMPLATE_SECONDS)


def test_a_template_that_does_not_end_is_refused(tmp_path: Path) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ModelError, match="does not end with these messages"):
        try_folder(write_folder(tmp_path, chat_template=endless), TEMPLATE_SECONDS / 4)


def test_a_tokenizer_with_a_file_beyond_the_bound_is_not_read(tmp_path: Path) -> None:
    path = write_folder(tmp_path) / "tokenizer.json"
    with path.open("r+b") as file:
        file.truncate(TOKENIZER_BYTES_MAX + 1)
    with pytest.raises(ModelError, match=r"tokenizer\.json has more than 64 MiB"):
        try_folder(tmp_path, TEMPLATE_SECONDS)


def test_an_ordinary_folder_passes(model_folder: Path) -> None:
    try_folder(model_folder, TEMPLATE_SECONDS)


def test_a_router_says_one_sentence_and_takes_no_more_than_the_bounds(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "model", multiplies)
    write_new_keys(tmp_path / "keys")
    router = [sys.executable, "-m", "router", "--model", str(folder), "--port", "0", "--admin-port", "0"]
    router += ["--link-keys-file", str(tmp_path / "keys" / "router.pem")]
    # A small process between them: a child's largest size counts what its parent had when it began.
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, *router], capture_output=True, text=True, check=True
    )
    status, largest_kib, cpu_seconds = map(float, measured.stdout.split())
    assert status == 1, measured.stderr
    assert measured.stderr.splitlines()[-1] == (
        f"segue router: the tokenizer or the chat template of {folder} takes more than 256 MiB for sample texts: "
        "use another"
    )
    assert "Traceback" not in measured.stderr
    assert largest_kib * 1024 < IMPORTS_BYTES + MEMORY_BYTES
    assert cpu_seconds < 2 * IMPORTS_SECONDS + CPU_SECONDS

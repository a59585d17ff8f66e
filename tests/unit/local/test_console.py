"""What a user reads while a deployment loads, on a terminal and in a file."""

from __future__ import annotations

import io
import json
import shlex

from rich.console import Console

from shared.local.console import Service, StartupConsole


def shown_start(*, terminal: bool) -> str:
    shown = io.StringIO()
    console = StartupConsole(Console(file=shown, force_terminal=terminal, width=60))
    for what in ("starting", "loading weights 3%", "loading weights 60%", "checking the transfer"):
        console.show_progress("decode-0", what)
    console.show_choices("decode-0", "127.0.0.1:8002", {"device": "cpu (no CUDA device)", "pages": 64})
    console.show_ready(Service("127.0.0.1:8000", "127.0.0.1:8001", "it's [bold]", has_key=False), 4.2)
    return shown.getvalue()


def test_off_a_terminal_each_stage_is_one_line() -> None:
    assert shown_start(terminal=False).splitlines()[:4] == [
        "decode-0: starting",
        "decode-0: loading weights",
        "decode-0: checking the transfer",
        "decode-0: ready, device cpu (no CUDA device), pages 64, admin port http://127.0.0.1:8002",
    ]


def test_on_a_terminal_there_is_a_bar() -> None:
    assert "━" in shown_start(terminal=True)


def test_a_process_that_starts_again_has_lines_and_no_bar_that_stays() -> None:
    shown = io.StringIO()
    console = StartupConsole(Console(file=shown, force_terminal=True, width=60))
    console.show_progress("decode-0", "loading weights 3%")
    console.show_choices("decode-0", "127.0.0.1:8002", {"pages": 64})
    console.show_ready(Service("127.0.0.1:8000", "127.0.0.1:8001", "smollm2", has_key=False), 4.2)
    before = len(shown.getvalue())
    console.show_progress("decode-0", "starting")
    console.show_choices("decode-0", "127.0.0.1:8002", {"pages": 64})
    lines = ["decode-0: starting", "decode-0: ready again, admin port http://127.0.0.1:8002"]
    assert shown.getvalue()[before:].splitlines() == lines


def test_the_command_in_the_ready_line_survives_the_shell() -> None:
    line = shown_start(terminal=False).splitlines()[-1]
    assert "the router's also http://127.0.0.1:8001/debug/requests/ID" in shown_start(terminal=False)
    words = shlex.split(line.partition("try: ")[2])
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's [bold]"


def test_the_program_that_is_printed_is_one() -> None:
    for has_key in (False, True):
        words = shlex.split(Service("[::1]:8000", "127.0.0.1:8001", "it's", has_key).python)
        assert words[:2] == ["python", "-c"]
        compile(words[2], "printed", "exec")
        assert ("SEGUE_API_KEY" in words[2]) is has_key


def test_choices_are_printed_once_and_equal_ones_only_named() -> None:
    shown = io.StringIO()
    console = StartupConsole(Console(file=shown, width=60))
    for name, pages in (("prefill-0", 64), ("prefill-1", 64), ("decode-0", 32), ("prefill-0", 64)):
        console.show_choices(name, name, {"pages": pages})
    console.show_choices("decode-0", "decode-0", {"pages": 16})
    assert shown.getvalue().splitlines() == [
        "prefill-0: ready, pages 64, admin port http://prefill-0",
        "prefill-1: ready like prefill-0, admin port http://prefill-1",
        "decode-0: ready, pages 32, admin port http://decode-0",
        "prefill-0: ready again, admin port http://prefill-0",
        "decode-0: ready, pages 16, admin port http://decode-0",
    ]

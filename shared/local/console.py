"""What `segue up` prints: progress while it loads, what was chosen, the ready line, and later troubles.

On a terminal each process has a progress bar until all are ready. Later, and elsewhere, each change is a plain line.
Knows no processes.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

QUESTION = "Why is the sky blue?"


@dataclass(frozen=True, slots=True)
class Service:
    """What a deployment serves, and where: the words of its ready lines."""

    address: str  # host:port of the router's API
    admin_address: str  # host:port of the router's metrics
    model: str
    has_key: bool  # clients must send $SEGUE_API_KEY
    has_tls: bool = False
    kill_token: str = ""  # the live page of who has it may kill workers

    @property
    def root(self) -> str:
        """The URL of the router's API port."""
        return f"{'https' if self.has_tls else 'http'}://{self.address}"

    @property
    def url(self) -> str:
        """The base URL of clients."""
        return f"{self.root}/v1"

    @property
    def page(self) -> str:
        """The URL of the live page. What follows # stays in the browser."""
        return f"{self.root}/#{self.kill_token}" if self.kill_token else f"{self.root}/"

    @property
    def curl(self) -> str:
        """A command that streams a short answer."""
        body = {"model": self.model, "messages": [{"role": "user", "content": QUESTION}]}
        data = shlex.quote(json.dumps({**body, "max_tokens": 64, "stream": True}))
        key = '-H "Authorization: Bearer $SEGUE_API_KEY" ' if self.has_key else ""
        return f"curl -N {self.url}/chat/completions {key}-H 'Content-Type: application/json' -d {data}"

    @property
    def python(self) -> str:
        """A command that prints an answer, by OpenAI's package."""
        key = 'os.environ["SEGUE_API_KEY"]' if self.has_key else '"any"'
        program = (
            f'import openai, os; client = openai.OpenAI(base_url="{self.url}", api_key={key}); '
            f"print(client.responses.create(model={json.dumps(self.model)}, input={json.dumps(QUESTION)}, "
            "max_output_tokens=64).output_text)"
        )
        return f"{_python()} -c {shlex.quote(program)}"


def _python() -> str:
    """The interpreter beside the command that was typed: it has OpenAI's package."""
    folder = Path(sys.argv[0]).parent
    return str(folder / "python") if folder.name == "bin" else "python"


def _typed() -> str:
    """The command as the user has typed it: it need not be on the path."""
    return sys.argv[0] if Path(sys.argv[0]).name == "segue" else "segue"


class StartupConsole:
    """Writes to stdout; one per deployment."""

    def __init__(self, console: Console | None = None):
        self._console = console or Console(highlight=False, soft_wrap=True, markup=False)
        self._stages: dict[str, str] = {}
        self._bars: dict[str, TaskID] = {}
        self._choices: dict[str, dict[str, str | int]] = {}  # by process, in the order they were printed
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<12}"),
            BarColumn(),
            TextColumn("{task.fields[doing]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )

    def print_line(self, line: str) -> None:
        """Print one line as it is."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show_progress(self, name: str, what: str) -> None:
        """Show what a process does before it is ready. `… 42%` moves its bar; a new stage is printed once."""
        stage, _, percent = what.removesuffix("%").rpartition(" ")
        if not (what.endswith("%") and percent.isdigit()):
            stage, percent = what, ""
        if not self._progress.disable:
            self._move_bar(name, stage, percent)
        elif self._stages.get(name) != stage:
            self._stages[name] = stage
            self.print_line(f"{name}: {stage}")

    def show_choices(self, name: str, admin_address: str, facts: Mapping[str, str | int]) -> None:
        """Print that a process is ready, its admin port, and what it chose; choices like another's are not repeated."""
        self._stages.pop(name, None)
        if name in self._bars:
            self._progress.update(self._bars[name], total=100, completed=100, doing="ready")
        alike = next((other for other, shown in self._choices.items() if facts and shown == facts), "")
        self._choices[name] = dict(facts)
        if alike:
            choices = " again" if alike == name else f" like {alike}"
        else:
            choices = "".join(f", {key.replace('_', ' ')} {value}" for key, value in facts.items())
        self.print_line(f"{name}: ready{choices}, admin port http://{admin_address}")

    def show_ready(self, service: Service, seconds: float) -> None:
        """Print that the deployment serves, what admin ports have, and commands that work as printed."""
        self.stop_progress()
        self.print_line(
            f"each admin port has /metrics and /readyz, the router's also "
            f"http://{service.admin_address}/debug/requests/ID"
        )
        self.print_line(
            f"{service.model} is served at {service.url}, to all clients of OpenAI's API; Ctrl-C ends it"
        )
        if service.has_key:
            self.print_line("clients need a key; for these commands: export SEGUE_API_KEY=…")
        self.print_line(f"in a browser: {service.page}")
        self.print_line(f"in Python: {service.python}")
        self.print_line(f"at a terminal: {_typed()} chat --url {service.root}")
        self.print_line(f"ready in {seconds:.0f} s; try: {service.curl}")

    def stop_progress(self) -> None:
        """Take the bars away. What comes later, a process that starts again, is lines."""
        self._progress.stop()
        self._progress.disable = True

    def _move_bar(self, name: str, stage: str, percent: str) -> None:
        self._progress.start()
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=None, doing=stage)
        total, done = (100, int(percent)) if percent else (None, 0)
        self._progress.update(self._bars[name], doing=stage, total=total, completed=done)

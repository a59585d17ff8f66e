"""What `segue up` tells its user: progress while it loads, what was chosen, the ready line, and later troubles.

On a terminal the progress is a bar a process; anywhere else each change is a plain line.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class StartupConsole:
    """Writes to stdout; one instance a deployment."""

    def __init__(self, console: Console | None = None):
        self._console = console or Console(highlight=False, soft_wrap=True, markup=False)
        self._stages: dict[str, str] = {}
        self._bars: dict[str, TaskID] = {}
        self._told: dict[str, dict[str, str | int]] = {}  # choices by process, in the order they were said
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

    def say(self, line: str) -> None:
        """One line, as it is."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def doing(self, name: str, what: str) -> None:
        """What a process does on its way to being ready; `… 42%` moves its bar, a new stage is said once."""
        stage, _, percent = what.removesuffix("%").rpartition(" ")
        if not (what.endswith("%") and percent.isdigit()):
            stage, percent = what, ""
        if not self._progress.disable:
            self._move_bar(name, stage, percent)
        elif self._stages.get(name) != stage:
            self._stages[name] = stage
            self.say(f"{name}: {stage}")

    def chosen(self, name: str, facts: Mapping[str, str | int]) -> None:
        """A process is ready with these choices, which are said once."""
        self._stages.pop(name, None)
        if name in self._bars:
            self._progress.update(self._bars[name], total=100, completed=100, doing="ready")
        alike = next((other for other, told in self._told.items() if facts and told == facts), "")
        self._told[name] = dict(facts)
        if alike:
            self.say(f"{name}: ready " + ("again" if alike == name else f"like {alike}"))
            return
        self.say(
            f"{name}: ready" + "".join(f", {key.replace('_', ' ')} {value}" for key, value in facts.items())
        )

    def ready(self, address: str, model: str, seconds: float) -> None:
        """The full set serves: one line, and the command in it works as printed."""
        self.quiet()
        body = {"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
        data = shlex.quote(json.dumps({**body, "max_tokens": 64, "stream": True}))
        self.say(
            f"ready in {seconds:.0f} s; try: curl -N http://{address}/v1/chat/completions "
            f"-H 'Content-Type: application/json' -d {data}"
        )

    def _move_bar(self, name: str, stage: str, percent: str) -> None:
        self._progress.start()
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=None, doing=stage)
        total, done = (100, int(percent)) if percent else (None, 0)
        self._progress.update(self._bars[name], doing=stage, total=total, completed=done)

    def quiet(self) -> None:
        """Take the bars away."""
        self._progress.stop()

"""A deployment with a Prometheus that scrapes it each second, and the queries of docs/on-call.md."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import yaml

from tests.integration.deployments.deployment import LocalDeployment, free_port
from tests.monitoring.rendered import program
from tests.waiting import until

PAGE = Path(__file__).parents[3] / "docs" / "on-call.md"
WINDOW = "[8s]"  # instead of five minutes: an incident here lasts seconds
_QUESTION = re.compile(r"^## (\d+)\. .*?^```promql\n(.*?)^```", re.MULTILINE | re.DOTALL)

Answer = dict[tuple[str, ...], float]  # values of the labels, by name → the value


def questions() -> dict[int, str]:
    """The query of each question on the page, by its number."""
    return {int(number): query for number, query in _QUESTION.findall(PAGE.read_text(encoding="utf-8"))}


@dataclass
class Watched:
    """A deployment and the Prometheus that watches it."""

    running: LocalDeployment
    url: str
    queries: dict[int, str]

    def ask(self, number: int) -> Answer:
        """What Prometheus says to a question now; empty: no."""
        return self.evaluate(self.queries[number].replace("[5m]", WINDOW))

    def evaluate(self, query: str) -> Answer:
        """What Prometheus answers now; empty: nothing has these labels, or no comparison holds."""
        answer = httpx2.get(f"{self.url}/api/v1/query", params={"query": query}, timeout=10, verify=False)
        body = answer.json()
        assert body["status"] == "success", body
        return {
            tuple(value for _, value in sorted(series["metric"].items())): float(series["value"][1])
            for series in body["data"]["result"]
        }

    def says(self, number: int, expected: Callable[[Answer], bool], seconds: float = 60.0) -> None:
        """Wait for an answer to a question."""
        said: list[Answer] = [{}]

        def fits() -> bool:
            said[0] = self.ask(number)
            return expected(said[0])

        until(fits, seconds, f"the answer to question {number}", 0.5)

    def quiet(self, *numbers: int) -> None:
        """These questions are answered with no now."""
        suspected = {number: said for number in numbers if (said := self.ask(number))}
        assert not suspected, suspected

    def becomes_quiet(self, *numbers: int) -> None:
        """Wait until what happened before has left the window."""
        until(lambda: not any(self.ask(number) for number in numbers), 60, f"calm of {numbers}", 0.5)


@contextmanager
def watched(running: LocalDeployment) -> Iterator[Watched]:
    """Prometheus with every process of the deployment as a pod; a process that comes back keeps its port."""
    port = free_port()
    targets = [
        {"targets": [f"127.0.0.1:{each.admin_port}"], "labels": {"pod": each.uid}}
        for each in running.processes()
    ]
    scrape = {"job_name": "segue", "scrape_interval": "1s", "static_configs": targets}
    with tempfile.TemporaryDirectory(prefix="prometheus-") as folder:
        file = Path(folder) / "prometheus.yml"
        file.write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
        flags = (f"--config.file={file}", f"--storage.tsdb.path={folder}/data", "--log.level=error")
        command = [program("prometheus"), *flags, f"--web.listen-address=127.0.0.1:{port}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                watch = Watched(running, f"http://127.0.0.1:{port}", questions())
                until(lambda: _scraped(watch.url) == len(targets), 60, "the first scrapes")
                yield watch
            finally:
                process.terminate()


def _scraped(url: str) -> int:
    try:
        answer = httpx2.get(f"{url}/api/v1/query", params={"query": "up == 1"}, timeout=5, verify=False)
    except httpx2.TransportError:
        return 0
    return len(answer.json()["data"]["result"]) if answer.status_code == 200 else 0

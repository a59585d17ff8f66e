"""Compares Segue with the peers that are installed, and writes the table and the picture for the documentation.

python -m tests.benchmarks --peers FOLDER --servers segue,llama --rounds 3 --out docs
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import sys
import tempfile
from pathlib import Path

from shared.primitives.errors import SegueError
from tests.benchmarks.client.measuring import SIZES, choose
from tests.benchmarks.client.report import write_json
from tests.benchmarks.comparison import Comparison, compare
from tests.benchmarks.peers import Contender, contenders, default_peers_folder
from tests.benchmarks.presentation import draw, markdown
from tests.benchmarks.servers import IDLE_SHARE_MAX, BenchServer, busy_cores

NAME = "comparison"  # of the files that are written


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "--peers", type=Path, default=default_peers_folder(), help="folder with llama/ and vllm/"
    )
    parser.add_argument("--servers", default="", help="segue,llama,llama-256,vllm,vllm-256; empty: all found")
    parser.add_argument("--segue", default="", help="further flags of `segue up`, in one word")
    parser.add_argument(
        "--scenarios", default="", help="as for `python -m tests.benchmarks.client`; empty: all"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=sorted(SIZES), default="full")
    parser.add_argument(
        "--out",
        type=Path,
        help=f"folder for {NAME}.md, .png and .json; by default docs for a whole run, a temporary one for less",
    )
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {given.rounds}")
    return given


def chosen(found: list[Contender], names: str) -> list[Contender]:
    """The named ones, Segue first as in the list; what was named and is not there is an error."""
    wanted = [name for name in names.split(",") if name]
    missing = set(wanted) - {contender.name for contender in found}
    if missing:
        raise SegueError(
            f"not found: {', '.join(sorted(missing))}; there are {', '.join(each.name for each in found)}. "
            "docs/lab/peers.md says how to install peers"
        )
    return [contender for contender in found if not wanted or contender.name in wanted]


def run(given: argparse.Namespace, scratch: Path) -> Comparison:
    """Start, measure, end."""
    scenarios = choose([name for name in given.scenarios.split(",") if name])
    with contextlib.ExitStack() as stack:
        servers = []
        for contender in chosen(contenders(given.peers, given.segue, scratch), given.servers):
            say(f"starting {contender.title}: {contender.settings}")
            server = BenchServer(contender, scratch / f"{contender.name}.log")
            stack.callback(server.close)
            server.wait_until_ready()
            servers.append(server)
        for server in servers:
            server.look_at_idleness()
            frozen = "; frozen between its turns" if server.idle_share > IDLE_SHARE_MAX else ""
            say(f"{server.contender.title}: {server.idle_share:.1%} of a core while idle{frozen}")
            server.rest()
        busy = busy_cores()
        say(f"the machine without them: {busy:.2f} cores at work")
        return compare(
            servers,
            scenarios,
            size=given.size,
            busy_cores=busy,
            rounds=given.rounds,
            seed=given.seed,
            command=shlex.join(["python", "-m", "tests.benchmarks", *sys.argv[1:]]),
            say=say,
        )


def folder_for(given: argparse.Namespace, comparison: Comparison) -> Path:
    """A trial never takes the place of the record."""
    if given.out:
        return Path(given.out)
    whole = given.size == "full" and given.rounds >= 3 and not given.scenarios and len(comparison.servers) > 1
    return Path("docs") if whole else Path(tempfile.mkdtemp(prefix="segue-bench-"))


def main() -> None:
    given = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no server stays behind
    with tempfile.TemporaryDirectory() as folder:
        try:
            comparison = run(given, Path(folder))
        except SegueError as error:
            sys.exit(f"bench: {error}")
        except KeyboardInterrupt:
            sys.exit(130)
    out = folder_for(given, comparison)
    out.mkdir(parents=True, exist_ok=True)
    page = markdown(comparison, f"{NAME}.png")
    (out / f"{NAME}.md").write_text(page, encoding="utf-8")
    write_json(comparison, out / f"{NAME}.json")
    draw(comparison, out / f"{NAME}.png")
    say(page)
    say(f"written to {out}")


if __name__ == "__main__":
    main()

"""Lets a container of the user's own image fill the folder, under the lock: S3, GCS or whatever its command knows.

Three containers of the pod run one after the other, and only the middle one is the user's:

    claim     waits for the lock, writes a script, hands the lock over
    script    `sh SCRIPT COMMAND…` in the user's image: runs the command in the partial folder and touches the lock
    finish    takes the lock back, looks at what came, gives the folder its name, releases the lock

The script is there because Kubernetes cannot leave a container out: where the folder is complete, it ends at once. It
needs `sh`, `touch` and `sleep` of the image, and nothing else.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from shared.engine.checkpoint.model_impl import read_config
from shared.model_cache.folder import COMPLETE, ModelFolder
from shared.model_cache.lock import Lock
from shared.primitives.errors import ModelError

NOTHING_TO_DO = "exit 0\n"
_SCRIPT = """\
lock={lock} next={next} complete={complete}
say() {{ echo "$1" >&2; echo "$1" 2>/dev/null >{message} || true; }}
lost() {{ [ ! -e "$lock" ] || [ -e "$next" ]; }}
[ -e "$complete" ] && exit 0
trap 'kill "${{command:-$!}}" 2>/dev/null || exit 143' TERM INT
if lost; then
  waited=0
  while [ ! -e "$complete" ]; do
    if [ "$waited" -ge {patience} ]; then
      say "another pod has taken over this fetch and did not end it: delete this pod"
      exit 1
    fi
    sleep 2; waited=$((waited + 2))
  done
  exit 0
fi
: >"$lock.started" && cd {partial} || exit 1
"$@" &
command=$!
(while ! lost; do touch -c "$lock"; sleep {touch:g}; done; kill -9 "$command") >/dev/null 2>&1 &
watcher=$!
wait "$command"
status=$?
kill -9 "$watcher" 2>/dev/null  # it may still have this shell's trap, which outlives a TERM
if lost; then say "another pod has taken over this fetch, since nothing was heard of this one"; exit 1; fi
touch -c "$lock"
[ "$status" -eq 0 ] || say "the command of modelSource.fetch ended with status $status: see kubectl logs -c model"
exit "$status"
"""


def claim(folder: ModelFolder, lock: Lock, script: Path, message: Path) -> None:
    """Write the script for the container that comes next. `lock` is held, and is handed over."""
    folder.begin()
    script.write_text(
        _SCRIPT.format(
            lock=shlex.quote(f"{lock.path}.lock.{lock.number}"),
            next=shlex.quote(f"{lock.path}.lock.{lock.number + 1}"),
            complete=shlex.quote(str(folder.path / COMPLETE)),
            partial=shlex.quote(str(folder.partial)),
            message=shlex.quote(str(message)),
            patience=int(lock.handed_seconds),
            touch=lock.touch_seconds,
        ),
        encoding="utf-8",
    )
    _number(script).write_text(str(lock.number), encoding="utf-8")
    lock.hand()


def take_back(lock: Lock, script: Path) -> None:
    """Hold the lock again. Raises ModelError if another pod has it."""
    if not lock.resume(int(_number(script).read_text(encoding="utf-8"))):
        raise ModelError("another pod has taken over this fetch; this one waits until that has ended")


def check(folder: ModelFolder) -> None:
    """Raise ModelError unless the command left a model that Segue can compute in its working directory."""
    if not (folder.partial / "config.json").exists():
        found = sorted(path.name for path in folder.partial.iterdir())[:5]
        raise ModelError(
            "the command of modelSource.fetch left no config.json in its working directory, but "
            f"{', '.join(found) or 'nothing'}: let it copy the model's files there, not into a folder of it"
        )
    read_config(folder.partial)


def _number(script: Path) -> Path:
    return script.with_name(f"{script.name}.number")

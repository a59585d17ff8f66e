"""Settings and values that have other names now, or have gone. An old name is refused in a sentence that says which.

An old name would else be an unknown flag, or a variable that is only warned of, while the process runs with a default.
The three tables are all that is needed here. The chart has the same names in `templates/_renames.tpl`, and a test
gives it each of them. An entry may go when nobody upgrades from a release that had the old name.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from shared.primitives.errors import ConfigError

SETTINGS: Mapping[str, str] = {"overtakes_max": "backfill_max"}  # old field → new field
# Old field → a field that stands where it stood, and what has become of it.
GONE: Mapping[str, tuple[str, str]] = {
    "ready_seconds_max": (
        "ready_seconds",
        "has gone: a stream that has begun waits for room as long as it takes; leave it out",
    )
}
VALUES: Mapping[str, Mapping[str, str]] = {"kv_transport": {"sealed": "tls"}}  # field → old value → new value

Spelling = Callable[
    [str], str
]  # a field's name as it is written in one place: `flag_of`, `variable_of`, `to_camel`


def refuse_old_names(given: Container[str], known: Container[str], spell: Spelling, place: str = "") -> None:
    """Raise ConfigError for an old name among those `given`, where its new name is `known`. `place`: of a file."""
    for old, new in SETTINGS.items():
        if spell(old) in given and spell(new) in known:
            raise ConfigError(f"{spell(old)}{place} is called {spell(new)} now")
    for old, (beside, why) in GONE.items():
        if spell(old) in given and spell(beside) in known:
            raise ConfigError(f"{spell(old)}{place} {why}")


def refuse_old_values(values: Mapping[str, object], spell: Spelling, place: str = "") -> None:
    """Raise ConfigError for an old value in `values`, which are by field name. `place`: of a file."""
    for name, renamed in VALUES.items():
        value = str(values.get(name))
        if value in renamed:
            raise ConfigError(f"{spell(name)} {value}{place} is called {renamed[value]} now")

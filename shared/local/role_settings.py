"""Settings that `segue up` passes on to the processes of one role: `--set` and files, checked before anything starts.

What a role can be told, its package says (`decode/config.py`); it is named at run time, as its process is
(`python -m decode`), for what is shared knows no role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from shared.errors import ConfigError
from shared.process.settings import ProcessConfig, check_setting, flag_of, load


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Flags for each process of a role, and what they come to with the role's variables and defaults."""

    flags: list[str]
    config: ProcessConfig


def settings_by_role(
    files: Mapping[str, str], entries: Sequence[str], environ: Mapping[str, str]
) -> dict[str, RoleSettings]:
    """What each role of `files` is told by its file ("": none), by the entries ROLE.SETTING=VALUE, and by `environ`.

    Raises ConfigError, one sentence that names the setting.
    """
    flags = {role: ["--config", file] if file else [] for role, file in files.items()}
    for entry in entries:
        place, equals, value = entry.partition("=")
        role, dot, setting = place.partition(".")
        if not equals or not dot or role not in flags:
            raise ConfigError(
                f"--set takes ROLE.SETTING=VALUE with {', '.join(flags)} as ROLE, got {entry!r}"
            )
        name = check_setting(_struct_of(role), setting, value, role)
        flags[role].append(f"{flag_of(name)}={value}")
    return {role: RoleSettings(told, load(_struct_of(role), told, environ)) for role, told in flags.items()}


def _struct_of(role: str) -> type[ProcessConfig]:
    struct: type[ProcessConfig] = getattr(import_module(f"{role}.config"), f"{role.capitalize()}Config")
    return struct

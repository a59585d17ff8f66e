"""Settings: one frozen struct in; flags, environment, file, JSON schema and the reference page out.

A setting is a field of a msgspec struct, annotated with its bounds and one line that gives the reason for
its default; its unit is the end of its name. The field `drain_seconds` is the flag `--drain-seconds`, the
variable `SEGUE_DRAIN_SECONDS` and `drainSeconds` in the YAML file given with `--config`; the first of these that
names it wins, then the default. Nothing else declares a setting.

The structs themselves live with what they configure (`prefill/config.py`, `decode/config.py`,
`router/config.py`); here are only the settings that every process has, and the reading of them all.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta

from shared.errors import ConfigError

PREFIX = "SEGUE_"
Settings = TypeVar("Settings", bound=msgspec.Struct)

Port = Annotated[int, Meta(ge=0, le=65535)]
PositiveInt = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0.0, le=86400.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
LogLevel = Literal["debug", "info", "warning", "error"]


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What every process of a deployment can be told."""

    uid: Annotated[
        str,
        Meta(
            description="name of this process among the others (the pod's name); empty: host and process id"
        ),
    ] = ""
    host: Annotated[
        str, Meta(description="address to listen on; loopback, so that nothing is open by accident")
    ] = "127.0.0.1"
    link_seed_file: Annotated[
        str,
        Meta(
            description="file with the 32-byte seed of the link keys; a file, for argv is seen by everybody"
        ),
    ] = ""
    heartbeat_seconds: Annotated[
        Seconds,
        Meta(description="a quiet link sends a heartbeat; a third of the silence limit, so one may be late"),
    ] = 1.0
    silence_seconds: Annotated[
        Seconds,
        Meta(description="a peer unheard for so long is lost; longer where cores are shared with others"),
    ] = 3.0
    loop_seconds_max: Annotated[
        Seconds,
        Meta(description="/livez fails when the main loop has not turned for so long; the longest step fits"),
    ] = 60.0
    log_level: Annotated[LogLevel, Meta(description="least severe log line; info is one a state change")] = (
        "info"
    )
    log_format: Annotated[
        Literal["json", "console"],
        Meta(description="json: one object a line, for machines; console: for eyes"),
    ] = "json"
    lifeline_fd: Annotated[
        int,
        Meta(ge=-1, description="pipe whose end ends this process, so none outlives `segue up`; -1: none"),
    ] = -1


def load(struct: type[Settings], argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """The settings of one process: flags over `SEGUE_*` variables over the `--config` file over defaults.

    `--help` and `--version` are answered on stdout and leave with status 0. Raises ConfigError, one sentence,
    for an unknown flag or key, a wrong type, or a value out of bounds.
    """
    flags = _read_flags(struct, argv)
    file = flags.pop("config", None)
    values: dict[str, Any] = _read_file(struct, Path(file)) if file is not None else {}
    for field in msgspec.structs.fields(struct):
        variable = variable_of(field.name)
        if field.name in flags:
            text, source = flags[field.name], flag_of(field.name)
        elif variable in environ:
            text, source = environ[variable], variable
        else:
            continue
        values[field.encode_name] = _convert_text(text, field.type, source)
    try:
        return msgspec.convert(values, struct)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the settings are not valid: {error}") from error


def check_setting(struct: type[msgspec.Struct], name: str, text: str, role: str) -> str:
    """The field of `struct` that `name` stands for, as a setting that is passed on to this role.

    Raises ConfigError when there is none, or when `text` is no value of it.
    """
    types = {field.name: field.type for field in msgspec.structs.fields(struct)}
    field = name.replace("-", "_")
    if field not in types:
        close = difflib.get_close_matches(field, types)
        hint = f"did you mean {' or '.join(close)}?" if close else f"python -m {role} --help lists all"
        raise ConfigError(f"unknown setting {role}.{name}; {hint}")
    _convert_text(text, types[field], f"{role}.{name}")
    return field


def unknown_variables(struct: type[msgspec.Struct], environ: Mapping[str, str]) -> list[str]:
    """`SEGUE_*` variables that are no setting: worth a warning only, a cluster injects some of its own."""
    known = {variable_of(field.name) for field in msgspec.structs.fields(struct)}
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in known)


def flag_of(field: str) -> str:
    """`drain_seconds` → `--drain-seconds`."""
    return "--" + field.replace("_", "-")


def variable_of(field: str) -> str:
    """`drain_seconds` → `SEGUE_DRAIN_SECONDS`."""
    return PREFIX + field.upper()


def description_of(struct: type[msgspec.Struct], field: str) -> str:
    """The one line that the struct's author wrote about a setting."""
    hint = get_type_hints(struct, include_extras=True)[field]
    notes = [note.description for note in get_args(hint)[1:] if isinstance(note, Meta) and note.description]
    if not notes:
        raise TypeError(f"{struct.__name__}.{field} has no description")
    return notes[-1]


def schema_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """JSON schema of the YAML file that configures `struct`."""
    return msgspec.json.schema(struct)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _read_flags(struct: type[msgspec.Struct], argv: Sequence[str]) -> dict[str, str]:
    """Flags as given, by field name; every value is still text. Repeated, lists grow, and else the last one wins."""
    parser = _Parser(
        prog=_program_name(),
        description=(struct.__doc__ or "").strip(),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"segue {version('segue')}")
    parser.add_argument(
        "--config", metavar="FILE", action="append", help="YAML file with settings, in camelCase"
    )
    for field in msgspec.structs.fields(struct):
        help_text = f"{description_of(struct, field.name)} (default: {describe_default(field)})"
        parser.add_argument(
            flag_of(field.name),
            dest=field.name,
            metavar=describe_type(field.type).replace(" ", "-"),
            help=help_text.replace("%", "%%"),
            action="append",
        )
    flags, unknown = parser.parse_known_args(list(argv))
    if unknown:
        known = [flag_of(field.name) for field in msgspec.structs.fields(struct)] + ["--config"]
        what = "flag" if unknown[0].startswith("-") else "argument"
        raise ConfigError(f"unknown {what} {unknown[0]}{_near_miss(unknown[0].split('=')[0], known)}")
    lists = {field.name for field in msgspec.structs.fields(struct) if _is_list(field.type)}
    return {name: ",".join(texts) if name in lists else texts[-1] for name, texts in vars(flags).items()}


def _program_name() -> str:
    """What the user typed, more or less: `segue up`, `python -m router`."""
    path, command = Path(sys.argv[0]), "".join(sys.argv[1:2])
    return f"python -m {path.parent.name}" if path.name == "__main__.py" else f"{path.name} {command}"


def _read_file(struct: type[msgspec.Struct], file: Path) -> dict[str, Any]:
    """Settings of a YAML file, by their names in camelCase."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the config file {file} is not YAML: {reason}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"the config file {file} must hold a mapping of settings")
    known = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    for key, value in content.items():
        if key not in known:
            raise ConfigError(f"unknown setting {key!r} in {file}{_near_miss(str(key), list(known))}")
        _checked(value, known[key].type, f"{key} in {file}", strict=True)
    return content


def _convert_text(text: str, kind: Any, source: str) -> Any:
    """The value that `text` stands for; lists are separated by commas."""
    value: Any = text
    if _is_list(kind):
        value = tuple(part.strip() for part in text.split(",") if part.strip())
    return _checked(value, kind, source, strict=False)


def _checked(value: object, kind: Any, source: str, *, strict: bool) -> Any:
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        reason = (
            str(error)
            .replace("Expected", "expected")
            .replace("Invalid", "invalid")
            .split(" - at")[0]
            .split(", got")[0]
        )
        if "enum" in reason:
            reason = f"expected one of {', '.join(map(str, get_args(_plain(kind))))}"
        raise ConfigError(f"{source} is not valid: {reason}, got {str(value)[:80]!r}") from error


def _near_miss(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else "; --help lists all settings"


def _is_list(kind: Any) -> bool:
    return get_origin(_plain(kind)) is tuple


def _plain(kind: Any) -> Any:
    """The type without its annotations."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return kind


def describe_type(kind: Any) -> str:
    """`int`, `a|b`, `list of str`: for help and reference."""
    plain = _plain(kind)
    if get_origin(plain) is Literal:
        return "|".join(str(choice) for choice in get_args(plain))
    if get_origin(plain) is tuple:
        return f"list of {describe_type(get_args(plain)[0])}"
    return str(getattr(plain, "__name__", plain))


def describe_default(field: msgspec.structs.FieldInfo) -> str:
    """The default as one would write it in the file."""
    value = field.default
    if isinstance(value, bool):
        return str(value).lower()
    return "empty" if value in ("", ()) else str(value)


def describe_bounds(kind: Any) -> str:
    """`1 … 65535`, or nothing."""
    notes = [note for note in _notes(kind) if isinstance(note, Meta)]
    parts: list[str] = []
    for sign, name in ((">", "gt"), ("≥", "ge"), ("<", "lt"), ("≤", "le")):
        bounds = [getattr(note, name) for note in notes if getattr(note, name) is not None]
        parts += [f"{sign} {bound:g}" if isinstance(bound, float) else f"{sign} {bound}" for bound in bounds]
    return ", ".join(parts)


def _notes(kind: Any) -> list[object]:
    found: list[object] = []
    while get_origin(kind) is Annotated:
        found += get_args(kind)[1:]
        kind = get_args(kind)[0]
    return found

"""Settings: one frozen pydantic model in; flags, environment, file, JSON schema and the reference page out.

A setting is a field of a model: type, bounds, default and description stand there and nowhere else; its unit is the
end of its name. The field `drain_seconds` is the flag `--drain-seconds`, the variable `SEGUE_DRAIN_SECONDS` and
`drainSeconds` in the YAML file given with `--config`. The first of these that names it wins, then the default.

pydantic-settings reads flags and variables, pydantic checks. This file adds the YAML file, the order of the three and
errors of one sentence, and knows the names that were given up. It knows no setting: models live with what they
configure (`process_config`, `worker_config`, `prefill/config.py`, `decode/config.py`, `router/config.py`).
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

import yaml
from pydantic import AliasGenerator, BaseModel, BeforeValidator, Field, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_settings import CliSettingsSource, EnvSettingsSource, SettingsConfigDict

from shared.primitives.errors import ConfigError
from shared.primitives.version import VERSION

PREFIX = "SEGUE_"


class Settings(BaseModel):
    """Base of every configuration. Made directly it takes its fields as they are; `load` reads the three places.

    `groups`: what a person turns, as headings of the help and the reference, each with its fields between spaces. What
    is in no group is rarely turned, and stands under *advanced*. A subclass adds to the groups of its bases.
    """

    groups: ClassVar[Mapping[str, str]] = {}

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=PREFIX,
        enable_decoding=False,  # a variable is text, not JSON
        alias_generator=AliasGenerator(serialization_alias=to_camel),
    )


Config = TypeVar("Config", bound=Settings)

Port = Annotated[int, Field(ge=0, le=65535)]
PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0.0, le=86400.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def _split(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_split)]  # separated by commas where it is text


def load(model: type[Config], argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """The settings of one process: flags over `SEGUE_*` variables over the `--config` file over defaults.

    `--help` and `--version` are answered on stdout and exit with status 0. Raises ConfigError, one sentence, for an
    unknown flag or key, a wrong type, or a value out of bounds.
    """
    flags, file = read_flags(model, argv)
    content = check_file_settings(model, read_yaml(file), str(file)) if file else {}
    return combine(model, flags, environ, content)


def combine(
    model: type[Config], flags: Mapping[str, Any], environ: Mapping[str, str], content: Mapping[str, Any]
) -> Config:
    """Flags over variables over `content`, which is checked already, by field name. Raises ConfigError."""
    refuse_old_names(environ, set(map(variable_of, model.model_fields)), variable_of)
    variables = _Variables(model, environ)()
    refuse_old_values(variables, variable_of)
    refuse_old_values(flags, flag_of)
    sources = dict.fromkeys(content, "") | {name: variable_of(name) for name in variables}
    sources |= {name: flags_of(model, name) for name in flags}
    try:
        return model(**{**content, **variables, **flags})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{sources[str(first['loc'][0])]} {_reason(first)}") from None


def read_flags(
    model: type[Settings],
    argv: Sequence[str],
    epilog: str = "",
    elsewhere: Mapping[str, str] | None = None,
    placed: str = "",
) -> tuple[dict[str, Any], Path | None]:
    """Flags as text by field name, and the file given with `--config`. Repeated, lists grow, and else the last wins.

    `epilog` ends the help. `elsewhere` says where a flag belongs that is a setting of others than `model`: the end
    of a sentence that begins with the flag. `placed`: the field that may be given without its flag.
    """
    words = f"[{placed.upper()}] " if placed else ""
    parser = FlagParser(
        prog=_program_name(),
        usage=f"%(prog)s {words}[--config FILE] [--SETTING VALUE ...]",
        description=(model.__doc__ or "").strip(),
        epilog=epilog,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"segue {VERSION}")
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML file with settings, in camelCase.")
    if placed:
        parser.add_argument("by place", metavar=placed.upper(), nargs="?", help=f"As {flag_of(placed)}.")
    headings = parser.add_headings(groups_of(model))
    files: list[Path | None] = []

    def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
        flags, unknown = parser.parse_known_args(argv)
        if unknown:
            known = [flag for name in model.model_fields for flag in _spellings_of(model, name)]
            known.append("--config")
            refuse_old_names([unknown[0].split("=")[0]], [*known, *(elsewhere or {})], flag_of)
            raise ConfigError(_unknown(unknown[0], known, elsewhere or {}))
        files.append(flags.config)
        if value := vars(flags).pop("by place", None):
            if placed in flags:
                raise ConfigError(
                    f"the {placed} is named twice: {value} and {flag_of(placed)}; leave out one of them"
                )
            setattr(flags, placed, value)
        return flags

    source: Any = CliSettingsSource  # declared for pydantic-settings' own models, but any model will do
    values = source(
        model,
        root_parser=parser,
        parse_args_method=parse,
        add_argument_method=lambda _, *names, **options: headings[options["dest"]].add_argument(
            *names, **options
        ),
        cli_parse_args=list(argv),
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_parse_none_str="\0",  # no argument can be this: every value is text, "None" too
    )()
    return values, files[0]


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds. Raises ConfigError."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the config file {file} is not YAML: {reason}") from error
    if not isinstance(content, dict | None):
        raise ConfigError(f"the config file {file} must hold a mapping of settings")
    return content or {}


def check_file_settings(model: type[Settings], content: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Settings by field name from a mapping in camelCase; types are strict. Raises ConfigError that names `place`."""
    names = {to_camel(name): name for name in model.model_fields}
    refuse_old_names(content, names, to_camel, f" in {place}")
    for key in content:
        if key not in names:
            raise ConfigError(f"unknown setting {key!r} in {place}{near_miss(str(key), names)}")
    values = {names[key]: value for key, value in content.items()}
    refuse_old_values(values, to_camel, f" in {place}")
    try:
        checked = model.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{to_camel(str(first['loc'][0]))} in {place} {_reason(first)}") from None
    except (TypeError, ValueError) as error:  # a mapping with a date as its key, or a list that holds itself
        raise ConfigError(f"{place} holds a value that no setting can have: {error}") from None
    return {name: getattr(checked, name) for name in values}


def unknown_variables(model: type[Settings], environ: Mapping[str, str]) -> list[str]:
    """`SEGUE_*` variables that are no setting: worth a warning only, a cluster injects some of its own."""
    known = set(map(variable_of, model.model_fields))
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in known)


def groups_of(model: type[Settings]) -> dict[str, list[str]]:
    """All fields under their headings, those of the model's own class first; *advanced* is the last."""
    found: dict[str, list[str]] = {}
    for each in model.__mro__:
        for title, names in vars(each).get("groups", {}).items():
            found.setdefault(title, []).extend(names.split())
    grouped = {name for names in found.values() for name in names}
    advanced = [name for name in model.model_fields if name not in grouped]
    return {**found, "advanced": advanced} if advanced else found


def flag_of(field: str) -> str:
    """`drain_seconds` → `--drain-seconds`."""
    return "--" + field.replace("_", "-")


def flags_of(model: type[Settings], field: str) -> str:
    """A field's flag for a sentence, with those that mean the same: `--context-len (or --max-model-len)`."""
    flag, *others = _spellings_of(model, field)
    return f"{flag} (or {', '.join(others)})" if others else flag


def _spellings_of(model: type[Settings], field: str) -> list[str]:
    """The flag of a field, then those that the model's `cli_shortcuts` add."""
    shortcuts: Any = model.model_config.get("cli_shortcuts") or {}
    others = shortcuts.get(field.replace("_", "-"), [])
    names = [others] if isinstance(others, str) else others
    return [flag_of(field), *("-" * min(len(name), 2) + name for name in names)]


def variable_of(field: str) -> str:
    """`drain_seconds` → `SEGUE_DRAIN_SECONDS`."""
    return PREFIX + field.upper()


def schema_of(model: type[Settings]) -> dict[str, Any]:
    """JSON schema of the YAML file that configures `model`."""
    return model.model_json_schema(mode="serialization")


class _Variables(EnvSettingsSource):
    """Reads the variables it is given in place of the process's own."""

    def __init__(self, model: Any, environ: Mapping[str, str]):
        # pydantic-settings reads names in lower case; only those in capitals are ours.
        self._given = {name.lower(): value for name, value in environ.items() if name == name.upper()}
        super().__init__(model)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return self._given


class FlagParser(argparse.ArgumentParser):
    """One whose complaints are one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(message)

    def add_headings(self, groups: Mapping[str, Sequence[str]]) -> dict[str, argparse._ArgumentGroup]:
        """A heading for each group: by field name, where its flag is added."""
        headings = {title: self.add_argument_group(title) for title in groups}
        return {name: headings[title] for title, names in groups.items() for name in names}

    def refuse(self, argument: str) -> NoReturn:
        """Raise ConfigError for an argument that the parser did not take, with the flag that was probably meant."""
        raise ConfigError(
            _unknown(argument, [flag for flag in self._option_string_actions if flag[:2] == "--"], {})
        )

    def format_help(self) -> str:
        """Without Python's spelling of lists, and with a word where the default is empty."""
        text = super().format_help().replace("tuple[str,...]", "LIST")
        return re.sub(r"\(default:\s+(\(\))?\)", "(default: empty)", text)


def _program_name() -> str:
    """What the user typed, more or less: `segue up`, `python -m router`."""
    path, command = Path(sys.argv[0]), "".join(sys.argv[1:2])
    return f"python -m {path.parent.name}" if path.name == "__main__.py" else f"{path.name} {command}"


def _reason(error: Any) -> str:
    """Pydantic's message as the end of a sentence whose subject is the setting."""
    message = re.sub("^(Input|String) |, unable to .*", "", error["msg"])
    return f"{message}, got {str(error['input'])[:80]!r}"


def _unknown(argument: str, known: list[str], elsewhere: Mapping[str, str]) -> str:
    """Why an argument is not taken, and what was meant."""
    flag = argument.split("=")[0]
    if place := elsewhere.get(flag):
        return f"{flag} {place}"
    what = "flag" if flag.startswith("-") else "argument"
    close = difflib.get_close_matches(flag, [*known, *elsewhere], n=1)
    place = f" It {elsewhere[close[0]]}" if close and close[0] in elsewhere else ""
    return f"unknown {what} {argument}{near_miss(flag, [*known, *elsewhere])}{place}"


def near_miss(word: str, known: Iterable[str], otherwise: str = "; --help lists all settings") -> str:
    """What was probably meant by a name that is not known: the end of a sentence."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else otherwise


# ---- settings and values that have other names now, or have gone. An old name is refused in a sentence that says which
# An old name would else be an unknown flag, or a variable that is only warned of, while the process runs with a
# default. The three tables are all that is needed here. The chart has the same names in `templates/_renames.tpl`, and a
# test gives it each of them. An entry may go when nobody upgrades from a release that had the old name.


FORMER_SETTINGS: Mapping[str, str] = {"overtakes_max": "backfill_max"}  # old field → new field
# Old field → a field that stands where it stood, and what has become of it.
GONE_SETTINGS: Mapping[str, tuple[str, str]] = {
    "ready_seconds_max": (
        "ready_seconds",
        "has gone: a stream that has begun waits for room as long as it takes; leave it out",
    )
}
FORMER_VALUES: Mapping[str, Mapping[str, str]] = {
    "kv_transport": {"sealed": "tls"}
}  # field → old value → new value

# a field's name as it is written in one place: `flag_of`, `variable_of`, `to_camel`
Spelling = Callable[[str], str]


def refuse_old_names(given: Container[str], known: Container[str], spell: Spelling, place: str = "") -> None:
    """Raise ConfigError for an old name among those `given`, where its new name is `known`. `place`: of a file."""
    for old, new in FORMER_SETTINGS.items():
        if spell(old) in given and spell(new) in known:
            raise ConfigError(f"{spell(old)}{place} is called {spell(new)} now")
    for old, (beside, why) in GONE_SETTINGS.items():
        if spell(old) in given and spell(beside) in known:
            raise ConfigError(f"{spell(old)}{place} {why}")


def refuse_old_values(values: Mapping[str, object], spell: Spelling, place: str = "") -> None:
    """Raise ConfigError for an old value in `values`, which are by field name. `place`: of a file."""
    for name, renamed in FORMER_VALUES.items():
        value = str(values.get(name))
        if value in renamed:
            raise ConfigError(f"{spell(name)} {value}{place} is called {renamed[value]} now")

"""The settings of `segue up`: its own flags, and a file in the shape of the chart's values.

    model: smollm2
    router:  {config: {maxQueuedRequests: 100}}
    prefill: {config: {kvPages: 64}, replicas: 2}
    decode:  {config: {kvPages: 64}}

So one file serves this machine and Helm. All settings of all roles are checked here, before anything starts. What the
chart has and one machine does not (images, resources, Services) is ignored by name. This is the only module beside
the roles that knows their configurations.
"""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.alias_generators import to_camel
from pydantic_settings import SettingsConfigDict

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from router.config import RouterConfig
from shared.engine.gguf.convert import DEFAULT_MODEL
from shared.local.shapes import Shape
from shared.primitives.errors import ConfigError
from shared.process.process_config import LogFormat, LogLevel, ProcessConfig
from shared.process.settings import (
    Count,
    Port,
    PositiveInt,
    Settings,
    check_file_settings,
    combine,
    flag_of,
    near_miss,
    read_flags,
    read_yaml,
    refuse_old_names,
    unknown_variables,
    variable_of,
)
from shared.wire.messages import Role
from shared.worker.worker_config import DEVICE_DESCRIPTION, DeviceChoice, WorkerConfig

ROLE_CONFIGS: dict[Role, type[ProcessConfig]] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}
# Settings that the chart has outside of `config`, because its templates need them: at the top, and in a role's section.
TOP_SETTINGS: dict[Role, tuple[str, ...]] = {
    "router": ("silenceSeconds",),
    "prefill": ("silenceSeconds", "drainSeconds"),
    "decode": ("silenceSeconds", "drainSeconds"),
}
SECTION_SETTINGS: dict[Role, tuple[str, ...]] = {
    "router": ("drainSeconds", "endpointLagSeconds"),
    "prefill": ("drainSeconds",),
    "decode": ("drainSeconds",),
}
# Decode reads no pages of another one.
KV_FORMAT = ("page_size", "dtype", "kv_cache_dtype", "kv_layout", "kv_transport")
GIVEN = (
    "port",
    "links_port",
    "admin_host",
    "uid",
    "workers",
    "link_keys_file",
    "lifeline_fd",
    "kill_worker_fd",
    "kill_token_file",
)  # by `segue up`
EPILOG = (
    "Settings of router and workers, as "
    "--tool-call-parser hermes, reach every process that knows them; so do variables such as SEGUE_ALLOWED_ORIGINS. "
    "For one role they stand in the file of --config, in camelCase: "
    "router: {config: {allowedOrigins: [http://localhost:3000]}}. All settings: docs/reference.md."
)
ApiKeyText = Annotated[str, Field(pattern="^[!-~]*$")]  # what a header can carry
NEAR = 0.8  # likeness to a known key from which an unknown one is a typing error, and not another value of the chart


class LocalConfig(Settings):
    """The whole deployment on this machine: router, prefill and decode, each a process of its own."""

    model_config = (
        SettingsConfigDict(  # the API's port is the one that users mean; vLLM's name of the context
            cli_shortcuts={"router-port": ["p", "port"], "context-len": "max-model-len"}
        )
    )
    groups: ClassVar[Mapping[str, str]] = {
        "model": "model served_model_name context_len",
        "API": "router_port host api_key",
        "workers": "prefill decode prefill_gpus decode_gpus device threads max_total_tokens",
        "observation": "admin_port log_level log_format",
    }

    model: str = Field(
        default=DEFAULT_MODEL,
        description="Model to serve: a folder, a .gguf file, a Hub id, or smollm2, which is installed with Segue.",
    )
    served_model_name: str = Field(
        default="", description="Name of the model for clients. Empty: as model calls it."
    )
    prefill: Count = Field(
        default=1,
        le=64,
        description="Number of prefill processes. 0: decode processes compute prompts, too; so it is on a machine with "
        "GPUs unless it or prefill_gpus is given.",
    )
    decode: PositiveInt = Field(
        default=1,
        le=64,
        description="Number of decode processes. On a machine with GPUs one for each that is left.",
    )
    prefill_gpus: Count = Field(
        default=0,
        le=16,
        description="GPUs of each prefill process. 0: as tensor_parallel_size says, which is 1 unless it is given.",
    )
    decode_gpus: Count = Field(
        default=0, le=16, description="GPUs of each decode process. 0: as tensor_parallel_size says."
    )
    max_total_tokens: Count = Field(
        default=12_288,
        description="Tokens of KV that each worker keeps, but never less than one full context. 0: what memory allows.",
    )
    router_port: Port = Field(
        default=8000,
        description="Port of OpenAI's API. Ports that no flag names are chosen among the free ones.",
    )
    host: str = Field(
        default="",
        description="Address of OpenAI's API: 0.0.0.0 lets other machines in, so give keys as well. Empty: as the "
        "router's section of the file says, else 127.0.0.1.",
    )
    api_key: ApiKeyText = Field(
        default="",
        description="The key that clients must send; SEGUE_API_KEY keeps it out of the list of processes. For several "
        "clients there is apiKeysFile, a setting of the router.",
    )
    admin_port: Port = Field(
        default=0,
        description="Port of the router's /metrics, /readyz and /debug, on loopback. 0: any free port.",
    )
    context_len: Count = Field(
        default=0, description="Longest context in tokens, prompt and output together. 0: the model's own."
    )
    device: DeviceChoice = Field(default="auto", description=DEVICE_DESCRIPTION)
    log_level: LogLevel = Field(
        default="warning",
        description="Least severe level that processes log. info logs one line a request, debug each of its steps.",
    )
    log_format: LogFormat = Field(
        default="console",
        description="json writes one object a line, for machines. console writes text, for people.",
    )
    threads: Count = Field(
        default=0, description="CPU threads of each worker. 0: all cores, which the workers then share."
    )


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Flags for each process of a role, and the configuration that they give with variables and defaults."""

    flags: list[str]
    config: ProcessConfig

    def having(self, name: str, value: object) -> RoleSettings:
        """Replace the value of one setting."""
        flags = [*self.flags, f"{flag_of(name)}={_text(value)}"]
        return RoleSettings(flags, self.config.model_copy(update={name: value}))


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """All settings of one deployment: its own, and those of each role."""

    config: LocalConfig
    roles: dict[str, RoleSettings]
    ignored: list[str] = field(default_factory=list)  # keys of the file that mean nothing on one machine

    @property
    def decode_computes_prompts(self) -> bool:
        """Whether decode workers compute prompts where there is no prefill worker."""
        router, decode = self.roles["router"].config, self.roles["decode"].config
        never = isinstance(router, RouterConfig) and router.local_prefill == "never"
        return not never and (not isinstance(decode, DecodeConfig) or decode.local_tokens_max > 0)

    @property
    def gpus_each(self) -> Shape:
        """GPUs of a worker of each role."""
        return Shape(ranks_of(self.roles["prefill"]), ranks_of(self.roles["decode"]))

    @property
    def api_keys_file(self) -> str:
        """The router's, however it was given; empty: none."""
        config = self.roles["router"].config
        return config.api_keys_file if isinstance(config, RouterConfig) else ""

    @property
    def has_tls(self) -> bool:
        """Whether the API's port speaks TLS."""
        config = self.roles["router"].config
        return isinstance(config, RouterConfig) and bool(config.tls_cert)


def load_local(argv: Sequence[str], environ: Mapping[str, str]) -> LocalSettings:
    """Flags over `SEGUE_*` variables over the `--config` file over defaults. Raises ConfigError, one sentence."""
    refuse_foreign_flags(argv)
    own, of_roles = _split(argv)
    flags, path = read_flags(LocalConfig, own, EPILOG, _flags_of_roles(), placed="model")
    if flags.get("api_key") == "":
        raise ConfigError("--api-key is empty: give a key, or leave it out to serve without one")
    values, file = read_yaml(path) if path else {}, str(path)
    ignored = _ignored_keys(values, file)
    roles: dict[str, RoleSettings] = {
        role: _role_settings(role, of_roles[role], values, file, environ) for role in ROLE_CONFIGS
    }
    content = check_file_settings(LocalConfig, _own_values(values, file), file)
    config = combine(LocalConfig, flags, environ, content)
    for role, gpus in (("prefill", config.prefill_gpus), ("decode", config.decode_gpus)):
        if gpus:
            roles[role] = roles[role].having("tensor_parallel_size", gpus)
    roles = _with_one_layout(roles)
    _require_one_kv_format(roles)
    _require_who_computes_prompts(config.prefill, roles)
    return LocalSettings(config, roles, ignored)


def _require_who_computes_prompts(prefill: int, roles: Mapping[str, RoleSettings]) -> None:
    """Raise ConfigError where neither a prefill worker nor a decode worker would compute prompts."""
    router, decode = roles["router"].config, roles["decode"].config
    if prefill:
        return
    if isinstance(router, RouterConfig) and router.local_prefill == "never":
        raise ConfigError(
            "--prefill 0 and --local-prefill never leave nobody to compute prompts; change one of them"
        )
    if isinstance(decode, DecodeConfig) and not decode.local_tokens_max:
        raise ConfigError(
            "--prefill 0 and --local-tokens-max 0 leave nobody to compute prompts; change one of them"
        )


def unknown_everywhere(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each `SEGUE_*` variable that no process has for a setting."""
    models: list[type[Settings]] = [LocalConfig, *ROLE_CONFIGS.values()]
    known = {variable_of(name) for model in models for name in model.model_fields}
    return [
        f"{name} is no setting{near_miss(name, known)}"
        for name in unknown_variables(LocalConfig, environ)
        if name not in known
    ]


def environment_of(role: Role, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a role's process: without settings of `segue up` and of other roles.

    The working folder is never imported from.
    """
    strange = {*unknown_variables(ROLE_CONFIGS[role], environ), *map(variable_of, LocalConfig.model_fields)}
    kept = {name: value for name, value in environ.items() if name not in strange}
    return {**kept, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def _places_in_roles() -> dict[str, str]:
    """For each setting of some roles alone, by field name, where it is given: the end of a sentence."""
    knowing: dict[str, list[Role]] = {}
    for role, model in ROLE_CONFIGS.items():
        for name in model.model_fields.keys() - LocalConfig.model_fields.keys() - set(GIVEN):
            knowing.setdefault(name, []).append(role)
    return {
        name: f"is a setting of the {' and the '.join(roles)}, in the file of --config: "
        + " or ".join(f"{role}: {{config: {{{to_camel(name)}: …}}}}" for role in roles)
        for name, roles in knowing.items()
    }


def _flags_of_roles() -> dict[str, str]:
    return {flag: f"is a setting of {' and '.join(roles)}" for flag, roles in _roles_by_flag().items()}


def _own_values(values: Mapping[str, Any], file: str) -> dict[str, Any]:
    """What the file says of the whole deployment; a role's `replicas` are its number of processes."""
    own = {key: values[key] for key in map(to_camel, LocalConfig.model_fields) if key in values}
    own |= {role: _mapping(values, role, file).get("replicas") for role in ("prefill", "decode")}
    return {key: value for key, value in own.items() if value is not None}


def _split(argv: Sequence[str]) -> tuple[list[str], dict[Role, list[str]]]:
    """The flags of `segue up` itself, and those of each role: a setting of roles alone is given to all of them."""
    own: list[str] = []
    of_roles: dict[Role, list[str]] = {role: [] for role in ROLE_CONFIGS}
    words = deque(argv)
    while words:
        word = words.popleft()
        flag, equals, _ = word.partition("=")
        knowing = _roles_by_flag().get(flag, [])
        given = [word] if equals or not words or not knowing else [word, words.popleft()]
        for target in [of_roles[role] for role in knowing] or [own]:
            target += given
    return own, of_roles


@cache
def _roles_by_flag() -> dict[str, list[Role]]:
    return {
        flag_of(name): [role for role, model in ROLE_CONFIGS.items() if name in model.model_fields]
        for name in _places_in_roles()
    }


def _role_settings(
    role: Role, words: Sequence[str], values: Mapping[str, Any], file: str, environ: Mapping[str, str]
) -> RoleSettings:
    typed, _ = read_flags(ROLE_CONFIGS[role], words)
    section = _mapping(values, role, file)
    outside = {key: values[key] for key in TOP_SETTINGS[role] if key in values}
    # null in a section is the chart's "as the top says"
    outside |= {key: section[key] for key in SECTION_SETTINGS[role] if section.get(key) is not None}
    settings = outside | _mapping(section, "config", file)
    content = check_file_settings(ROLE_CONFIGS[role], settings, f"{role}.config of {file}")
    given = {name: value for name, value in content.items() if variable_of(name) not in environ}
    flags = [f"{flag_of(name)}={_text(value)}" for name, value in given.items() if name not in typed]
    return RoleSettings([*flags, *words], combine(ROLE_CONFIGS[role], typed, environ, content))


def ranks_of(role: RoleSettings) -> int:
    """GPUs of a worker of this role."""
    return role.config.tensor_parallel_size if isinstance(role.config, WorkerConfig) else 1


def _with_one_layout(roles: Mapping[str, RoleSettings]) -> dict[str, RoleSettings]:
    """Give all workers the layout of pages that those of several GPUs have, where nothing else is asked for."""
    workers = ("prefill", "decode")
    if max(ranks_of(roles[role]) for role in workers) == 1:
        return dict(roles)
    return {
        role: each.having("kv_layout", "head-major-1")
        if role in workers and getattr(each.config, "kv_layout", "") == "auto"
        else each
        for role, each in roles.items()
    }


def _require_one_kv_format(roles: Mapping[str, RoleSettings]) -> None:
    """Refuse workers that could not read each other: no request would ever be served."""
    for name in KV_FORMAT:
        prefill, decode = (getattr(roles[role].config, name) for role in ("prefill", "decode"))
        if prefill != decode:
            raise ConfigError(
                f"{to_camel(name)} is {prefill} for prefill and {decode} for decode, which then could not read "
                "each other's pages: give both one value"
            )


def _ignored_keys(values: Mapping[str, Any], file: str) -> list[str]:
    """Keys that mean nothing on one machine. Raises ConfigError for one that does elsewhere, or is spelled like one."""
    top = {*map(to_camel, LocalConfig.model_fields), *ROLE_CONFIGS, *TOP_SETTINGS["prefill"]}
    ignored = _others(values, top, file)
    for role in ROLE_CONFIGS:
        known = {"config", *SECTION_SETTINGS[role], *(() if role == "router" else ("replicas",))}
        section = _mapping(values, role, file)
        ignored += [f"{role}.{key}" for key in _others(section, known, f"{role} of {file}")]
    return ignored


def _others(values: Mapping[str, Any], known: set[str], place: str) -> list[str]:
    others = [str(key) for key in values if key not in known]
    of_roles = {to_camel(name): end for name, end in _places_in_roles().items()}
    refuse_old_names(others, of_roles, to_camel, f" in {place}")
    for key in others:
        if key in of_roles:
            raise ConfigError(f"{key} in {place} {of_roles[key]}")
        if close := difflib.get_close_matches(key, [*known, *of_roles], n=1, cutoff=NEAR):
            where = f" It {of_roles[close[0]]}" if close[0] in of_roles else ""
            raise ConfigError(f"unknown setting {key!r} in {place}; did you mean {close[0]}?{where}")
    return others


def _mapping(values: Mapping[str, Any], key: str, file: str) -> dict[str, Any]:
    section = values.get(key)
    if not isinstance(section, dict | None):
        raise ConfigError(f"{key} in {file} must be a mapping, got {str(section)[:80]!r}")
    return section or {}


def _text(value: object) -> str:
    """A value of the file as a flag has it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---- flags of other servers' command lines, and what to type or to know instead: those that users bring along --------
# From `vllm serve`, `sglang.launch_server` and `llama-server`, as of 2026. What means the same here is an alias in
# `LocalConfig`; what stands here is refused with the answer, and never taken for a slip in one of our own.


_FLAGS = {  # by the answer, the end of a sentence that begins with the flag
    "is --tensor-parallel-size N here, with --prefill 0": ("-tp --tp --tp-size"),
    "is not supported: --tensor-parallel-size N gives a worker N GPUs, --prefill N and --decode N add workers": (
        "--pipeline-parallel-size -pp --pp-size --data-parallel-size -dp --dp --dp-size --ep --ep-size "
        "--enable-expert-parallel --tensor-split -ts --distributed-executor-backend"
    ),
    "is --max-total-tokens N here, the tokens of KV that each worker keeps; 0 takes what memory allows": (
        "--gpu-memory-utilization --mem-fraction-static --kv-cache-memory-bytes --swap-space --cpu-offload-gb"
    ),
    "is --page-size here": ("--block-size"),
    "is --max-running-requests N here": ("--max-num-seqs --parallel -np"),
    "is --chunked-prefill-size N here, tokens of an EXTEND step": (
        "--max-num-batched-tokens --batch-size -b --ubatch-size -ub"
    ),
    "is not needed: leave it out": (
        "--enable-chunked-prefill --jinja --guided-decoding-backend --structured-outputs-config "
        "--grammar-backend --chat-template-content-format --attention-backend --sampling-backend --flash-attn -fa "
        "--task --runner --enable-log-requests --mlock --no-mmap"
    ),
    "is --context-len here": ("--ctx-size -c --context-length"),
    "is not needed: prefix caches are always on; a request's cache_salt keeps its own apart": (
        "--enable-prefix-caching --no-enable-prefix-caching --disable-radix-cache"
    ),
    "is not needed: a worker on a GPU records graphs of its decode steps by itself": (
        "--enforce-eager --disable-cuda-graph --cuda-graph-max-bs --compilation-config"
    ),
    "is not supported: weights are served as their safetensors or GGUF file has them": (
        "--quantization -q --load-format"
    ),
    "is not supported: code that comes with a model is never run": ("--trust-remote-code"),
    "is not supported: edit config.json in a copy of the folder": ("--hf-overrides"),
    "is not supported: the tokenizer is the one in the model's folder": ("--tokenizer --tokenizer-path"),
    "is not supported: download the revision, and name its folder": ("--revision"),
    "is --model here": ("--model-path -m"),
    "is --model here, with an id of the Hub": ("-hf"),
    "is not supported: a model is on a GPU whole (--device cuda), or not at all": ("--n-gpu-layers -ngl"),
    "is not supported: merge the adapter into the weights": (
        "--enable-lora --lora-modules --lora-paths --lora"
    ),
    "is not supported: there is no speculative decoding": (
        "--speculative-config --speculative-algorithm --model-draft -md"
    ),
    "is --tool-call-parser here, which turns tools on for any model; some need none": (
        "--enable-auto-tool-choice"
    ),
    "is not needed: --reasoning-parser auto knows the models that think": ("--enable-reasoning"),
    "is not supported: the paths are OpenAI's": ("--root-path"),
    "is --tls-key FILE here": ("--ssl-keyfile --ssl-key-file"),
    "is --tls-cert FILE here": ("--ssl-certfile --ssl-cert-file"),
    "is not needed: no prompt or answer is logged; --log-level warning leaves out the line of each request": (
        "--disable-log-requests"
    ),
    "is not needed: /metrics is on the admin port": ("--enable-metrics --metrics"),
    "is a field of a request here": ("--seed"),
    "is max_tokens of a request here": ("--n-predict --predict -n"),
    "is the variable HF_TOKEN here, so that no list of processes shows it": ("--hf-token -hft"),
    "is always on here: /debug/requests of the admin port": ("--slots"),
    "is --threads here": ("-t"),
    "is not needed: --prefill N and --decode N say how many processes of each there are": (
        "--disaggregation-mode --disaggregation-transfer-backend --kv-transfer-config"
    ),
}
FOREIGN_FLAGS = {flag: answer for answer, flags in _FLAGS.items() for flag in flags.split()}


def refuse_foreign_flags(words: Sequence[str]) -> None:
    """Raise ConfigError for the first flag of another server, with what to type or to know instead."""
    for word in words:
        name = word.partition("=")[0]
        if answer := FOREIGN_FLAGS.get(name):
            raise ConfigError(f"{name} {answer}")

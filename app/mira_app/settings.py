"""What the person chose: defaults, then the environment, then flags. Pure.

Every setting has one name: flag `--max-tokens`, environment variable
`MIRA_CHAT_MAX_TOKENS`. Values come in as text or already as numbers; whatever cannot be
used ends in a `ConfigError` that says what can.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from mira_engine.api import (
    CompileMode,
    ComputeDtype,
    ConfigError,
    DraftDense,
    DraftExperts,
    EngineConfig,
    LinkConfig,
    MemoryAmount,
    Precision,
    SamplingConfig,
)

from .catalog import BUILTIN

VARIABLE_PREFIX = "MIRA_CHAT_"

DEFAULT_MAX_TOKENS = 1024
"""Most tokens of a reply where nobody chose: a small model may repeat itself for ever."""

_E = TypeVar("_E", bound=enum.StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a run needs to know.

    Attributes:
        model: `builtin`, or the folder of a checkpoint; `is_model_given` tells whether the
            person named it.
        engine: How the model is loaded.
        sampling: How tokens are chosen.
        system_prompt: First message of every chat; empty leaves it to the model's template.
    """

    model: str = BUILTIN
    is_model_given: bool = False
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(
        default_factory=lambda: SamplingConfig(max_new_tokens=DEFAULT_MAX_TOKENS)
    )
    system_prompt: str = ""


def load_settings(flags: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
    """Combines what was given; a flag that is `None` was not given.

    Args:
        flags: Values by setting name, for example `{"max_tokens": 20}`.
        environ: Environment variables.

    Raises:
        ConfigError: A name is no setting, or a value cannot be used.
    """
    values: dict[str, object] = {}
    for name in _PARSERS:
        text = environ.get(VARIABLE_PREFIX + name.upper())
        if text is not None and text.strip():
            values[name] = text
    for name, value in flags.items():
        if name not in _PARSERS:
            raise ConfigError(f"There is no setting {name!r}.", hint=f"Known: {list(_PARSERS)}.")
        if value is not None:
            values[name] = value
    parsed = {name: _PARSERS[name](name, value) for name, value in values.items()}
    link = LinkConfig(**_renamed(parsed, {"link_rate": "bytes_per_s", "link_latency": "latency_s"}))
    engine = EngineConfig(link=link, **_renamed(parsed, _ENGINE_FIELDS))
    sampling = SamplingConfig(
        **({"max_new_tokens": DEFAULT_MAX_TOKENS} | _renamed(parsed, _SAMPLING_FIELDS))
    )
    return Settings(
        engine=engine,
        sampling=sampling,
        is_model_given="model" in parsed,
        **_renamed(parsed, {"model": "model", "system": "system_prompt"}),
    )


def _renamed(values: Mapping[str, object], names: Mapping[str, str]) -> dict:
    return {field: values[name] for name, field in names.items() if name in values}


def _text(name: str, value: object) -> str:
    del name
    return str(value)


def _number(kind: type[int] | type[float], what: str) -> Callable[[str, object], object]:
    def parse(name: str, value: object) -> object:
        try:
            return kind(str(value))
        except ValueError:
            raise ConfigError.for_field(_flag(name), value, f"Give {what}.") from None

    return parse


def _choice(choices: type[_E]) -> Callable[[str, object], _E]:
    def parse(name: str, value: object) -> _E:
        try:
            return choices(str(value).lower())
        except ValueError:
            known = ", ".join(choices)
            raise ConfigError.for_field(_flag(name), value, f"Choose one of {known}.") from None

    return parse


def _switch(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("1", "true", "yes", "on"):
        return True
    if str(value).lower() in ("0", "false", "no", "off"):
        return False
    raise ConfigError.for_field(_flag(name), value, "Give yes or no.")


def _budget(name: str, value: object) -> MemoryAmount:
    del name
    return MemoryAmount.parse(str(value))


def _memory(name: str, value: object) -> int:
    """Parses `8GiB`; a share would be of what?"""
    hint = "Write a size such as 8GiB or 600MiB."
    try:
        amount = MemoryAmount.parse(str(value))
    except ConfigError:
        raise ConfigError.for_field(_flag(name), value, hint) from None
    if amount.num_bytes is None:
        raise ConfigError.for_field(_flag(name), value, hint)
    return amount.num_bytes


def parse_rate(name: str, value: object) -> float:
    """Parses `500MB` or `500MB/s` to bytes per second."""
    hint = "Write a size per second such as 500MB or 2GiB."
    try:
        amount = MemoryAmount.parse(str(value).strip().removesuffix("/s"))
    except ConfigError:
        raise ConfigError.for_field(_flag(name), value, hint) from None
    if amount.num_bytes is None:
        raise ConfigError.for_field(_flag(name), value, hint)
    return float(amount.num_bytes)


def _milliseconds(name: str, value: object) -> float:
    return float(_number(float, "milliseconds")(name, value)) / 1e3  # type: ignore[arg-type]


def _flag(name: str) -> str:
    return "K" if name == "k" else name.replace("_", "-")


_whole, _real = _number(int, "a whole number"), _number(float, "a number")

_PARSERS: dict[str, Callable[[str, object], object]] = {
    "model": _text,
    "system": _text,
    "precision": _choice(Precision),
    "dtype": _choice(ComputeDtype),
    "budget": _budget,
    "memory": _memory,
    "k": _whole,
    "context": _whole,
    "link_rate": parse_rate,
    "link_latency": _milliseconds,
    "threads": _whole,
    "prefetch": _switch,
    "compile": _choice(CompileMode),
    "draft_experts": _choice(DraftExperts),
    "draft_dense": _choice(DraftDense),
    "trace": _text,
    "temperature": _real,
    "top_k": _whole,
    "top_p": _real,
    "min_p": _real,
    "repetition_penalty": _real,
    "seed": _whole,
    "max_tokens": _whole,
}
_ENGINE_FIELDS = {
    "precision": "precision",
    "dtype": "dtype",
    "budget": "budget",
    "memory": "memory_bytes",
    "k": "num_draft_tokens",
    "context": "context_length",
    "threads": "num_threads",
    "prefetch": "is_prefetch_enabled",
    "compile": "compile_mode",
    "draft_experts": "draft_experts",
    "draft_dense": "draft_dense",
    "trace": "trace_path",
}
_SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "max_tokens": "max_new_tokens",
}

"""What the person chose: defaults, then the file, then the environment, then flags. Pure.

Which settings there are, and what they take, is the table in `setting_fields`; reading
and writing the file is `settings_file`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from mira_engine.api import ConfigError, EngineConfig, LinkConfig, SamplingConfig

from .catalog import BUILTIN
from .setting_fields import (
    DEFAULTS,
    FIELDS,
    FIELDS_BY_NAME,
    ChatSettings,
    InterfaceSettings,
    Part,
    SettingField,
)

VARIABLE_PREFIX = "MIRA_CHAT_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a run needs to know.

    Attributes:
        model: `builtin`, or the folder of a checkpoint; `is_model_given` tells whether the
            person named it.
        engine: How the model is loaded.
        sampling: How tokens are chosen.
        given_sampling: What of that the command line says, by attribute: it holds for this run,
            in chats too that have a sampling of their own, and is never kept with one.
        lasting_sampling: `sampling` without the command line, `None` where nothing of it is
            from there.
        system_prompt: First message of every chat; empty leaves it to the model's template.
        interface: How the application looks and behaves.
        connect: Address of the server whose model answers, `None` for the engine here. Then
            only a model named in the same place, or a later one, counts as given.
    """

    model: str = BUILTIN
    is_model_given: bool = False
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(
        default_factory=lambda: DEFAULTS[SamplingConfig]  # type: ignore[arg-type, return-value]
    )
    given_sampling: Mapping[str, object] = field(default_factory=dict)
    lasting_sampling: SamplingConfig | None = None
    system_prompt: str = ""
    interface: InterfaceSettings = field(default_factory=InterfaceSettings)
    connect: str | None = None

    def sampling_of(self, own: SamplingConfig | None) -> SamplingConfig:
        """Returns how tokens of a chat are chosen in this run.

        Args:
            own: What the chat has of its own, `None` for nothing.
        """
        return self.sampling if own is None else dataclasses.replace(own, **self.given_sampling)

    def changed_sampling(
        self, own: SamplingConfig | None, now: SamplingConfig, chosen: SamplingConfig
    ) -> SamplingConfig | None:
        """Returns what a chat has of its own once the person has changed its sampling.

        Only what differs is the person's: the rest may be the command line's, which is not
        to be kept.

        Args:
            own: What the chat had of its own, `None` for nothing.
            now: How its tokens were chosen in this run.
            chosen: How they are to be chosen.
        """
        lasting = self.lasting_sampling or self.sampling
        changed = {
            name: getattr(chosen, name)
            for name in (each.name for each in dataclasses.fields(chosen))
            if getattr(chosen, name) != getattr(now, name)
        }
        kept = dataclasses.replace(own or lasting, **changed)
        return None if kept == lasting else kept


class Origin(enum.StrEnum):
    """Where a value comes from; later ones win."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The value of one setting, and where it comes from.

    Attributes:
        value: What holds in this run.
        origin: Where it comes from.
        lasting: What would hold without the command line.
    """

    value: object
    origin: Origin
    lasting: object


def variable_of(setting: SettingField, environ: Mapping[str, str]) -> str:
    """Returns the environment variable that holds a setting, or would."""
    variable = VARIABLE_PREFIX + setting.name.upper()
    is_short = setting.short_variable and not environ.get(variable, "").strip()
    return setting.short_variable if is_short and environ.get(setting.short_variable) else variable


def choose_settings(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    file: Mapping[str, object] | None = None,
) -> dict[str, Chosen]:
    """Returns the value of each setting by name, each checked by itself.

    Args:
        flags: Values by setting name; `None` was not given.
        environ: Environment variables.
        file: What the settings file holds, by setting name.

    Raises:
        ConfigError: A name is no setting, or a value cannot be used.
    """
    for name in (*flags, *(file or {})):
        if name not in FIELDS_BY_NAME:
            known = ", ".join(FIELDS_BY_NAME)
            raise ConfigError(f"There is no setting {name!r}.", hint=f"Known: {known}.")
    chosen: dict[str, Chosen] = {}
    for setting in FIELDS:
        given = flags.get(setting.name)
        value = None if given is None else setting.read(given)
        try:
            lasting, origin = _lasting(setting, environ, file or {})
        except ConfigError:
            if given is None:
                raise
            lasting = setting.default  # A mistake that a flag covers is none in this run.
        if given is None:
            value = lasting
        else:
            origin = Origin.FLAG
        chosen[setting.name] = Chosen(value=value, origin=origin, lasting=lasting)
    return chosen


def _lasting(
    setting: SettingField, environ: Mapping[str, str], file: Mapping[str, object]
) -> tuple[object, Origin]:
    """Returns the value of a setting without the command line, and where it comes from."""
    variable = variable_of(setting, environ)
    text = environ.get(variable)
    if text is not None and text.strip():
        try:
            return setting.read(text), Origin.ENVIRONMENT
        except ConfigError as error:
            hint = f"{error.hint} It comes from the variable {variable}."
            raise ConfigError(error.message, hint=hint.strip()) from None
    if setting.name in file:
        return setting.read(file[setting.name]), Origin.FILE
    return setting.default, Origin.DEFAULT


def build_settings(chosen: Mapping[str, Chosen]) -> Settings:
    """Puts the values where they are used.

    Raises:
        ConfigError: Two values cannot be used together.
    """
    values: dict[type[Part], dict[str, object]] = {part: {} for part in DEFAULTS}
    lasting: dict[str, object] = {}
    for setting in FIELDS:
        values[setting.part][setting.attribute] = chosen[setting.name].value
        if setting.part is SamplingConfig:
            lasting[setting.attribute] = chosen[setting.name].lasting
    chat = ChatSettings(**values[ChatSettings])  # type: ignore[arg-type]
    link = LinkConfig(**values[LinkConfig])  # type: ignore[arg-type]
    return Settings(
        model=chat.model,
        is_model_given=_is_model_given(chosen),
        engine=EngineConfig(link=link, **values[EngineConfig]),  # type: ignore[arg-type]
        sampling=SamplingConfig(**values[SamplingConfig]),  # type: ignore[arg-type]
        given_sampling={
            setting.attribute: chosen[setting.name].value
            for setting in FIELDS
            if setting.part is SamplingConfig and chosen[setting.name].origin is Origin.FLAG
        },
        lasting_sampling=SamplingConfig(**lasting),  # type: ignore[arg-type]
        system_prompt=chat.system_prompt,
        interface=InterfaceSettings(**values[InterfaceSettings]),  # type: ignore[arg-type]
        connect=chat.connect,
    )


def _is_model_given(chosen: Mapping[str, Chosen]) -> bool:
    """Whether the person named the model, and meant it for where it is to run.

    A file's model of this machine says nothing of a server that a flag names.
    """
    order = list(Origin)
    model, server = chosen["model"], chosen["connect"]
    if model.origin is Origin.DEFAULT or server.value is None:
        return model.origin is not Origin.DEFAULT
    return order.index(model.origin) >= order.index(server.origin)


def load_settings(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    file: Mapping[str, object] | None = None,
) -> Settings:
    """Combines what was given; a flag that is `None` was not given.

    Args:
        flags: Values by setting name, for example `{"max_tokens": 20}`.
        environ: Environment variables.
        file: What the settings file holds, by setting name.

    Raises:
        ConfigError: A name is no setting, or a value cannot be used.
    """
    return build_settings(choose_settings(flags, environ, file))

"""The table of settings: from it follow parsing, the documented file and `config`. Pure.

A setting has one name everywhere: in the file under its section, as `MIRA_CHAT_<NAME>` in
the environment, and as a flag where the command line has one. Adding a setting is one
line here and one attribute where it is used.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mira_engine.api import (
    CompileMode,
    ComputeDtype,
    ConfigError,
    DraftDense,
    DraftExperts,
    EngineConfig,
    LinkConfig,
    Precision,
    SamplingConfig,
)

from .catalog import BUILTIN
from .setting_parsers import (
    make_choice_parser,
    make_number_parser,
    parse_budget,
    parse_keymap,
    parse_memory,
    parse_milliseconds,
    parse_rate,
    parse_server,
    parse_switch,
    parse_text,
    show_budget,
    show_bytes,
    show_milliseconds,
    show_plain,
)

DEFAULT_MAX_TOKENS = 1024
"""Most tokens of a reply where nobody chose: a small model may repeat itself for ever."""

PANEL_WIDTHS = range(35, 81)
"""Columns that the live panels may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """Which model answers, and what it is told first.

    Attributes:
        model: `builtin`, or the folder of a checkpoint.
        system_prompt: First message of every chat; empty leaves it to the model's template.
        connect: Address of the server whose model answers, `None` for the engine here.
    """

    model: str = BUILTIN
    system_prompt: str = ""
    connect: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceSettings:
    """How the application looks and behaves.

    Attributes:
        theme: Name of a theme; `terminal` takes the terminal's own colours.
        keymap: Keys by the id of the binding that they replace.
        is_mouse_enabled: Whether the app takes the mouse; without, the terminal selects.
        are_panels_shown: Whether the live panels are shown at start.
        panel_width: Columns of the live panels beside the chat.
        is_chat_restored: Whether the app opens the chat of the last time.
        history_path: File of the chats, `None` for the one in the data directory.
    """

    theme: str = "mira-dark"
    keymap: Mapping[str, str] = field(default_factory=dict)
    is_mouse_enabled: bool = True
    are_panels_shown: bool = True
    panel_width: int = 35
    is_chat_restored: bool = True
    history_path: str | None = None

    def __post_init__(self) -> None:
        if self.panel_width not in PANEL_WIDTHS:
            hint = f"Give {PANEL_WIDTHS[0]} to {PANEL_WIDTHS[-1]} columns."
            raise ConfigError.for_field("panel-width", self.panel_width, hint)


class Section(enum.StrEnum):
    """Tables of the settings file."""

    CHAT = "chat"
    ENGINE = "engine"
    REPLY = "reply"
    INTERFACE = "interface"
    KEYMAP = "keymap"


SECTION_TITLES = {
    Section.CHAT: "Which model answers, and what it is told first.",
    Section.ENGINE: "How a model is loaded and run.",
    Section.REPLY: "How a reply is made.",
    Section.INTERFACE: "How the application looks and behaves.",
    Section.KEYMAP: "Keys by the binding that they replace; F1 in the app lists both.",
}

Part = ChatSettings | EngineConfig | LinkConfig | SamplingConfig | InterfaceSettings

DEFAULTS: Mapping[type[Part], Part] = {
    ChatSettings: ChatSettings(),
    EngineConfig: EngineConfig(),
    LinkConfig: LinkConfig(),
    SamplingConfig: SamplingConfig(max_new_tokens=DEFAULT_MAX_TOKENS),
    InterfaceSettings: InterfaceSettings(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingField:
    """One setting.

    Attributes:
        name: Its name everywhere.
        section: Its table in the settings file.
        part: The class that holds it, in its `attribute`.
        parse: Turns what was given into the value; takes the name for its message.
        show: Turns the value into what a settings file holds.
        about: What it does, for people; says what it takes.
        example: What a settings file could hold, where the default is no value.
        short_variable: Another environment variable that holds it, where there is one.
    """

    name: str
    section: Section
    part: type[Part]
    attribute: str
    parse: Callable[[str, object], object]
    show: Callable[[object], object] = show_plain
    about: str
    example: object = None
    short_variable: str = ""

    @property
    def default(self) -> object:
        """The value where nothing is given."""
        return getattr(DEFAULTS[self.part], self.attribute)

    @property
    def is_table(self) -> bool:
        """Whether it is a whole table of the settings file."""
        return self.section is Section.KEYMAP

    def read(self, value: object) -> object:
        """Turns what was given into the value, and checks it by itself.

        Raises:
            ConfigError: It cannot be used.
        """
        parsed = self.parse(self.name, value)
        dataclasses.replace(DEFAULTS[self.part], **{self.attribute: parsed})
        return parsed

    def shown(self, value: object) -> object:
        """Returns a value as a settings file would hold it, `None` for no value."""
        return None if value is None else self.show(value)


_whole = make_number_parser(int, "a whole number")
_real = make_number_parser(float, "a number")


def _chat(name: str, attribute: str, about: str, **more: object) -> SettingField:
    return SettingField(
        name=name, section=Section.CHAT, part=ChatSettings, attribute=attribute, about=about,
        **({"parse": parse_text} | more),  # type: ignore[arg-type]
    )  # fmt: skip


def _engine(
    name: str, attribute: str, parse: Callable[[str, object], object], about: str, **more: object
) -> SettingField:
    return SettingField(
        name=name, section=Section.ENGINE, attribute=attribute, parse=parse, about=about,
        **({"part": EngineConfig} | more),  # type: ignore[arg-type]
    )  # fmt: skip


def _reply(
    name: str, attribute: str, parse: Callable[[str, object], object], about: str, **more: object
) -> SettingField:
    return SettingField(
        name=name, section=Section.REPLY, part=SamplingConfig, attribute=attribute,
        parse=parse, about=about, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def _interface(
    name: str, attribute: str, parse: Callable[[str, object], object], about: str, **more: object
) -> SettingField:
    return SettingField(
        name=name, attribute=attribute, parse=parse, about=about, part=InterfaceSettings,
        **({"section": Section.INTERFACE} | more),  # type: ignore[arg-type]
    )  # fmt: skip


FIELDS: tuple[SettingField, ...] = (
    _chat("model", "model", "Model to open: builtin, or the folder of a checkpoint."),
    _chat("system", "system_prompt", "System prompt of new chats; empty takes the model's own."),
    _chat(
        "connect", "connect",
        "Address of an OpenAI-compatible server whose model answers instead of one here. Its "
        "key stands in MIRA_API_KEY or OPENAI_API_KEY, never in this file.",
        parse=parse_server, example="http://127.0.0.1:8000/v1", short_variable="MIRA_CONNECT",
    ),
    _engine(
        "precision", "precision", make_choice_parser(Precision),
        "Expert format of the model: nested, int8, bf16, int4 or float32.",
    ),
    _engine(
        "dtype", "dtype", make_choice_parser(ComputeDtype),
        "Arithmetic: bfloat16, float32, or float16 on a card. Without it, bfloat16, or float16 on "
        "a card that has no bfloat16.", example="float32",
    ),
    _engine(
        "budget", "budget", parse_budget,
        "Device memory for experts, draft and slots together: a size such as 300MiB, or a "
        "share such as 40% of all experts in INT8. Without it, the model's default.",
        show=show_budget, example="40%",
    ),
    _engine(
        "memory", "memory_bytes", parse_memory,
        "All that the engine may hold on the device, such as 8GiB. Without it, what is free.",
        show=show_bytes, example="8GiB",
    ),
    _engine(
        "k", "num_draft_tokens", _whole,
        "Draft tokens per round, 0 (no drafting) to 32. Without it, chosen while it runs.",
        example=4,
    ),
    _engine(
        "context", "context_length", _whole,
        "Tokens of context to keep room for. Without it, the model's own up to 8192.",
        example=4096,
    ),
    _engine(
        "prefetch", "is_prefetch_enabled", parse_switch,
        "Whether experts are loaded ahead: true or false.",
    ),
    _engine(
        "link_rate", "bytes_per_s", parse_rate,
        "Hold the expert link to this rate per second, such as 500MB. Without it, its own.",
        part=LinkConfig, show=show_bytes, example="500MB",
    ),
    _engine(
        "link_latency", "latency_s", parse_milliseconds,
        "Milliseconds added to each record.", part=LinkConfig, show=show_milliseconds,
    ),
    _engine(
        "threads", "num_threads", _whole,
        "Threads of the arithmetic. Without it, all cores but one.", example=4,
    ),
    _engine(
        "gpu", "gpu", _whole,
        "Number of the NVIDIA card to compute on. Without it, the processor. Never measured on "
        "a card yet.", example=0,
    ),
    _engine(
        "deterministic", "is_deterministic", parse_switch,
        "Whether beside a card the processor computes no missing experts, since it rounds "
        "otherwise: true or false.",
    ),
    _engine(
        "compile", "compile_mode", make_choice_parser(CompileMode),
        "Compile steps: auto (beside the chat, once), wait (before the first reply) or off.",
    ),
    _engine(
        "draft_experts", "draft_experts", make_choice_parser(DraftExperts),
        "Which experts a draft computes with: auto, all (in INT4, resident) or cached "
        "(those in the slots).",
    ),
    _engine(
        "draft_dense", "draft_dense", make_choice_parser(DraftDense),
        "What a draft reads of dense layers: auto, split (half of each weight), int8 "
        "(copies) or target (all).",
    ),
    _engine(
        "trace", "trace_path", parse_text,
        "File to record in which experts each token chose. Without it, none.",
        example="routing.trace",
    ),
    _reply(
        "temperature", "temperature", _real, "0 takes the likeliest token; up to 10."
    ),
    _reply("top_k", "top_k", _whole, "Keep the N likeliest tokens; 0 keeps all."),
    _reply("top_p", "top_p", _real, "Keep this much probability; 1 keeps all."),
    _reply("min_p", "min_p", _real, "Drop tokens below this share of the likeliest; 0 is off."),
    _reply(
        "repetition_penalty", "repetition_penalty", _real,
        "Above 1, repeats become less likely; 1 is off.",
    ),
    _reply(
        "seed", "seed", _whole, "Seed of the random numbers. Without it, a new one each time.",
        example=7,
    ),
    _reply("max_tokens", "max_new_tokens", _whole, "Most tokens of a reply."),
    _interface(
        "theme", "theme", parse_text,
        "Colours: mira-dark, mira-light, terminal (the terminal's own) or a name that "
        "Ctrl+P shows.",
    ),
    _interface(
        "mouse", "is_mouse_enabled", parse_switch,
        "Whether the app takes the mouse: true or false. Without, the terminal selects text.",
    ),
    _interface(
        "panels", "are_panels_shown", parse_switch, "Whether the live panels are shown at start."
    ),
    _interface("panel_width", "panel_width", _whole, "Columns of the live panels, 35 to 80."),
    _interface(
        "restore_chat", "is_chat_restored", parse_switch,
        "Whether the app opens the model and the chat of the last time.",
    ),
    _interface(
        "history", "history_path", parse_text,
        "File of the chats. Without it, history.sqlite3 in the data directory.",
        example="~/chats.sqlite3",
    ),
    _interface(
        "keymap", "keymap", parse_keymap,
        "One line for each key that is to be another one.",
        section=Section.KEYMAP, example={"chat.new": "ctrl+k"},
    ),
)  # fmt: skip

FIELDS_BY_NAME: Mapping[str, SettingField] = {field.name: field for field in FIELDS}

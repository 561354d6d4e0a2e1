"""Options that several commands share: one for each setting, written down once.

A command says which settings it takes with `takes_settings` and gets those that were
given as one mapping. Imports only what parses arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

Flags = Mapping[str, Any]
"""Values by setting name, as `mira_app.settings` takes them; `None` was not given."""


def option(*names: str, help: str, metavar: str | None = None) -> Any:
    """Returns an option whose default is not worth a word in the help."""
    return typer.Option(*names, help=help, metavar=metavar, show_default=False)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Plain = Annotated[bool, typer.Option("--plain", help="Plain lines: no bars, no colours.")]
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="`builtin`, `owner/name` of the hub, or a folder; the chosen model without it.",
    ),
]

OPTIONS: dict[str, Any] = {
    "model": Annotated[
        str | None,
        option("--model", metavar="M", help="`builtin`, `owner/name` of the hub, or a folder."),
    ],
    "connect": Annotated[
        str | None,
        option(
            "--connect",
            metavar="URL",
            help="Chat with the model of an OpenAI-compatible server; MIRA_API_KEY holds its key.",
        ),
    ],
    "budget": Annotated[
        str | None,
        option(
            "--budget",
            metavar="300MiB|40%",
            help="Device memory for experts, draft and slots together; % of all experts in INT8.",
        ),
    ],
    "memory": Annotated[
        str | None,
        option(
            "--memory",
            metavar="8GiB",
            help="All that the engine may hold on the device; without --budget, experts get "
            "the rest.",
        ),
    ],
    "k": Annotated[
        int | None, option("-k", metavar="K", help="Draft tokens per round; 0 turns drafting off.")
    ],
    "precision": Annotated[
        str | None,
        option(
            "--precision",
            metavar="P",
            help="Expert format of the target: nested, int8, bf16, int4 or float32.",
        ),
    ],
    "dtype": Annotated[
        str | None,
        option("--dtype", metavar="D", help="Arithmetic: bfloat16, float32, or float16 on a card."),
    ],
    "max_tokens": Annotated[
        int | None,
        option("--max-tokens", metavar="N", help="Most tokens of the reply; 1024 without it."),
    ],
    "temperature": Annotated[
        float | None, option("--temperature", metavar="T", help="0 takes the likeliest token.")
    ],
    "top_k": Annotated[
        int | None, option("--top-k", metavar="N", help="Keep the N likeliest tokens.")
    ],
    "top_p": Annotated[
        float | None, option("--top-p", metavar="P", help="Keep this much probability.")
    ],
    "min_p": Annotated[
        float | None,
        option("--min-p", metavar="P", help="Drop tokens below this share of the top."),
    ],
    "repetition_penalty": Annotated[
        float | None,
        option("--repetition-penalty", metavar="R", help="Above 1: repeats become less likely."),
    ],
    "seed": Annotated[
        int | None, option("--seed", metavar="S", help="Seed of the random numbers.")
    ],
    "system": Annotated[
        str | None,
        option("--system", metavar="TEXT", help="System prompt; without it, the model's own."),
    ],
    "context": Annotated[
        int | None, option("--context", metavar="N", help="Tokens of context to keep room for.")
    ],
    "link_rate": Annotated[
        str | None,
        option(
            "--link-rate", metavar="500MB", help="Hold the expert link to this rate per second."
        ),
    ],
    "link_latency": Annotated[
        float | None,
        option("--link-latency", metavar="MS", help="Add milliseconds to each record."),
    ],
    "threads": Annotated[
        int | None,
        option("--threads", metavar="N", help="Threads of the arithmetic; all cores but one else."),
    ],
    "gpu": Annotated[
        int | None,
        option("--gpu", metavar="N", help="Compute on NVIDIA card N; the processor computes else."),
    ],
    "deterministic": Annotated[
        bool | None,
        option(
            "--deterministic/--no-deterministic",
            help="Beside a card, never let the processor compute missing experts, which rounds "
            "otherwise.",
        ),
    ],
    "compile": Annotated[
        str | None,
        option(
            "--compile",
            metavar="WHEN",
            help="Compile steps: auto (beside the chat, once), wait (before the first reply) "
            "or off.",
        ),
    ],
    "draft_experts": Annotated[
        str | None,
        option(
            "--draft-experts",
            metavar="WHICH",
            help="Which experts a draft computes with: all (in INT4, resident), cached (those "
            "in the slots, no memory) or auto.",
        ),
    ],
    "draft_dense": Annotated[
        str | None,
        option(
            "--draft-dense",
            metavar="HOW",
            help="What a draft reads of dense layers: auto, split (half of each weight), "
            "int8 (copies) or target (all).",
        ),
    ],
    "prefetch": Annotated[
        bool | None,
        option("--prefetch/--no-prefetch", help="Load experts ahead, or on demand only."),
    ],
    "trace": Annotated[
        str | None,
        option("--trace", metavar="FILE", help="Record which experts each token chose in FILE."),
    ],
}
"""The option of each setting that has one, by the setting's name."""

CHAT_SETTINGS = tuple(name for name in OPTIONS if name != "trace")
"""What can be chosen for a chat."""

LOAD_SETTINGS = (
    "budget", "precision", "dtype", "link_rate", "link_latency", "threads", "gpu",
    "deterministic", "compile",
)  # fmt: skip
"""What can be chosen where a model is loaded and somebody else picks K."""


def takes_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of these settings, in place of its parameter `flags`.

    Raises:
        KeyError: A setting has no option.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        shared = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=OPTIONS[name]
            )
            for name in names
        ]
        parameters = [
            each
            for parameter in own
            for each in (
                shared
                if parameter.name == "flags"
                else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
            )
        ]

        @functools.wraps(command)
        def with_flags(**given: Any) -> None:
            flags = {name: given.pop(name) for name in names}
            command(flags=flags, **given)

        # typer reads both: the order from one, the types from the other.
        with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {each.name: each.annotation for each in parameters}
        return with_flags

    return decorate

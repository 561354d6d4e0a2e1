"""What a chat asks of a server, as the fields of its request. Pure.

Only what differs from "off" is sent, because servers know different fields. One that a
server refuses is left out from then on, and the person is told.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from mira_engine.api import ChatMessage, SamplingConfig

THINKING_FIELD = "reasoning_content"
USAGE_FIELD = "stream_options"
LIMIT_FIELD, NEW_LIMIT_FIELD = "max_tokens", "max_completion_tokens"
"""Two names of one field: newer models of some servers refuse the first."""

_NOT_KNOWN = re.compile(
    r"support|unrecogni|unknown|unexpected|extra|permitted|not allowed|max_completion_tokens",
    re.IGNORECASE,
)

Fields = dict[str, object]


def option_fields(sampling: SamplingConfig, left_out: Collection[str] = ()) -> Fields:
    """Returns the fields besides model and messages.

    Args:
        sampling: How tokens are chosen.
        left_out: Fields that the server does not take.
    """
    fields: Fields = {
        "temperature": sampling.temperature,
        USAGE_FIELD: {"include_usage": True},
    }
    if sampling.max_new_tokens is not None:
        limit = NEW_LIMIT_FIELD if LIMIT_FIELD in left_out else LIMIT_FIELD
        fields[limit] = sampling.max_new_tokens
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if not sampling.is_greedy:
        fields |= _if_set("top_p", sampling.top_p, off=1.0)
        fields |= _if_set("top_k", sampling.top_k, off=0)
        fields |= _if_set("min_p", sampling.min_p, off=0.0)
    fields |= _if_set("repetition_penalty", sampling.repetition_penalty, off=1.0)
    return {name: value for name, value in fields.items() if name not in left_out}


def _if_set(name: str, value: float, *, off: float) -> Fields:
    return {} if value == off else {name: value}


def message_fields(messages: Sequence[ChatMessage], left_out: Collection[str] = ()) -> list[Fields]:
    """Returns the messages; what an assistant thought goes with them, unless left out."""
    has_thinking = THINKING_FIELD not in left_out
    return [
        {"role": each.role, "content": each.content}
        | ({THINKING_FIELD: each.thinking} if each.thinking and has_thinking else {})
        for each in messages
    ]


def refused_field(
    param: str, said: str, sent: Mapping[str, object], messages: Sequence[Mapping[str, object]]
) -> str | None:
    """Returns the optional field that a server does not know, `None` where it is another matter.

    A field that it knows, with a value that it does not like, is the person's to change.

    Args:
        param: The field that the server names in so many words, or an empty string.
        said: What it says.
        sent: The fields that were sent besides model and messages.
        messages: The messages that were sent.
    """
    if not _NOT_KNOWN.search(said):
        return None
    names = [*sent]
    if any(THINKING_FIELD in each for each in messages):
        names.append(THINKING_FIELD)
    for name in names:
        if param and (param == name or param.startswith(f"{name}.")):
            return name
    # The longest first: one name may be a part of another.
    for name in sorted(names, key=len, reverse=True):
        if re.search(rf"\b{name}\b", said):
            return name
    return None

"""Reads what a client asks for. Pure.

A field is used, or known to change nothing here, or refused by its name: none that would
change the reply is passed over in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from mira_engine.api import ChatMessage, ConfigError, SamplingConfig

from .errors import ApiError, unsupported, wrong_value

MAX_STOPS = 16
_MAX_STOP_CHARS = 1000

_NUMBERS: Mapping[str, tuple[str, type[int] | type[float]]] = {
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "top_k": ("top_k", int),
    "min_p": ("min_p", float),
    "repetition_penalty": ("repetition_penalty", float),
    "seed": ("seed", int),
    "max_tokens": ("max_new_tokens", int),
    "max_completion_tokens": ("max_new_tokens", int),
}
"""Fields that choose tokens, by the attribute of `SamplingConfig`; the last one given wins."""

_ONLY: Mapping[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), "Only one choice is made for a request"),
    "best_of": ((1,), "Only one choice is made for a request"),
    "tools": (([],), "Tools are not supported"),
    "functions": (([],), "Functions are not supported"),
    "tool_choice": (("none", "auto"), "Tools are not supported"),
    "function_call": (("none", "auto"), "Functions are not supported"),
    "logprobs": ((False,), "Log probabilities are not supported"),
    "top_logprobs": ((0,), "Log probabilities are not supported"),
    "logit_bias": (({},), "Biases of tokens are not supported"),
    "frequency_penalty": ((0,), "This penalty is not supported; repetition_penalty is"),
    "presence_penalty": ((0,), "This penalty is not supported; repetition_penalty is"),
    "response_format": (({"type": "text"},), "Only text is produced"),
    "modalities": ((["text"],), "Only text is produced"),
    "audio": ((), "Only text is produced"),
    "prediction": ((), "Predicted output is not supported"),
    "web_search_options": ((), "The web is not searched"),
}
"""Fields that ask for what the engine has not, with the values that ask for nothing."""

_WITHOUT_EFFECT = frozenset({
    "model", "messages", "stream", "stream_options", "stop", "user", "metadata", "store",
    "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
})  # fmt: skip
"""Fields read elsewhere, and those that say nothing about the reply."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a client asks for.

    Attributes:
        model: The model it names, `None` for none.
        messages: The chat.
        sampling: How tokens are chosen.
        stops: Texts that end the reply and are not part of it.
        is_streamed: Whether the reply is wanted as it comes.
        is_usage_wanted: Whether a stream ends with the count of tokens.
    """

    model: str | None
    messages: tuple[ChatMessage, ...]
    sampling: SamplingConfig
    stops: tuple[str, ...] = ()
    is_streamed: bool = False
    is_usage_wanted: bool = False


def read_chat_request(body: object, defaults: SamplingConfig) -> ChatRequest:
    """Reads a request.

    Args:
        body: The parsed JSON.
        defaults: What holds for fields that are not given.

    Raises:
        ApiError: It cannot be answered; names the field.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "The body is no JSON object.")
    for name, value in body.items():
        _refuse_unsupported(name, value)
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise wrong_value("model", "Give a text.")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise wrong_value("stream_options", "Give an object.")
    return ChatRequest(
        model=model,
        messages=_messages(body.get("messages")),
        sampling=_sampling(body, defaults),
        stops=_stops(body.get("stop")),
        is_streamed=_switch("stream", body.get("stream")),
        is_usage_wanted=_switch("stream_options.include_usage", options.get("include_usage")),
    )


def _refuse_unsupported(name: str, value: object) -> None:
    if name in _ONLY:
        allowed, what = _ONLY[name]
        if value is not None and not any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed
        ):
            raise unsupported(name, what)
    elif name not in _NUMBERS and name not in _WITHOUT_EFFECT:
        raise unsupported(name[:80], "This field is not known here")


def _switch(name: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise wrong_value(name, "Give true or false.")
    return bool(value)


def _sampling(body: Mapping[str, object], defaults: SamplingConfig) -> SamplingConfig:
    sampling = defaults
    for name, (attribute, kind) in _NUMBERS.items():
        value = body.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (kind is int and value != int(_finite(name, value))):
            raise wrong_value(name, f"Give {'a whole' if kind is int else 'a'} number.")
        try:
            sampling = dataclasses.replace(sampling, **{attribute: kind(_finite(name, value))})
        except ConfigError as error:
            raise wrong_value(name, f"It cannot be {value}. {error.hint}") from None
    return sampling


def _finite(name: str, value: object) -> float:
    if not isinstance(value, int | float) or value != value or abs(value) > 2**63:
        raise wrong_value(name, "Give a number.")
    return value


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise wrong_value("stop", "Give a text, or a list of texts.")
    if len(stops) > MAX_STOPS or any(not each or len(each) > _MAX_STOP_CHARS for each in stops):
        raise wrong_value("stop", f"Give up to {MAX_STOPS} texts of 1 to {_MAX_STOP_CHARS} signs.")
    return tuple(stops)


def _messages(value: object) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not value:
        raise wrong_value("messages", "Give a list of messages, at least one.")
    return tuple(_message(each, f"messages[{place}]") for place, each in enumerate(value))


def _message(value: object, place: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise wrong_value(place, "Give an object with role and content.")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong_value(f"{place}.role", f"Give one of {', '.join(_ROLES)}.")
    if value.get("tool_calls") or value.get("function_call"):
        raise unsupported(f"{place}.tool_calls", "Tools are not supported")
    thinking = value.get("reasoning_content") or value.get("reasoning") or ""
    if not isinstance(thinking, str):
        raise wrong_value(f"{place}.reasoning_content", "Give a text.")
    return ChatMessage(
        role=_ROLES[role],
        content=_content(value.get("content"), f"{place}.content"),
        thinking=thinking if role == "assistant" else "",
    )


def _content(value: object, place: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_value(place, "Give a text, or a list of parts.")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            raise wrong_value(f"{place}[{index}]", "Give an object with a type.")
        if part.get("type") != "text":
            raise unsupported(f"{place}[{index}].type", "Only text is read")
        if not isinstance(part.get("text"), str):
            raise wrong_value(f"{place}[{index}].text", "Give a text.")
        texts.append(part["text"])
    return "".join(texts)

"""Between chats and tokens: templates, end-of-text ids, incremental detokenisation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jinja2
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..errors import CheckpointError, GenerationError, UnsupportedModelError
from ..events import ChatMessage

_REPLACEMENT = "\ufffd"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer lies beside a model."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer beside a model; never remote code."""
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def check_chat_files(folder: Path) -> None:
    """Refuses a model that could not chat, before anything is converted for it.

    Raises:
        CheckpointError: Its tokenizer is missing or damaged; names the file.
        UnsupportedModelError: It has no chat template.
    """
    found = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise CheckpointError(
            f"{folder} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)} is there.",
            hint="Download the missing file.",
        )
    for name in found:
        if name.endswith(".json"):
            try:
                json.loads((folder / name).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"{folder / name} is damaged: {error}.", hint="Download that file again."
                ) from error
    try:
        tokenizer = load_tokenizer(folder)
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"The tokenizer in {folder} cannot be loaded: {reason}",
            hint=f"Found: {', '.join(found)}. Download the tokenizer's files again.",
        ) from error
    ChatRenderer(tokenizer)


def end_token_ids(
    folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """Returns the union of the end-of-text ids of config, generation config and tokenizer."""
    sources: list[object] = [
        getattr(config, "eos_token_id", None),
        getattr(config.get_text_config(), "eos_token_id", None),
    ]
    if (folder / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(folder).eos_token_id)
    if tokenizer is not None:
        sources.append(tokenizer.eos_token_id)
    ids: set[int] = set()
    for source in sources:
        if isinstance(source, int):
            ids.add(source)
        elif isinstance(source, (list, tuple)):
            ids.update(int(i) for i in source)
    return frozenset(ids)


class ChatRenderer:
    """Renders a chat to the tokens the model was trained on."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        if not tokenizer.chat_template:
            raise UnsupportedModelError(
                "The model has no chat template, so it is not a chat model.",
                hint="Choose the model's chat or instruct version.",
            )

    def render(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Returns the chat's tokens, ready for the assistant's turn.

        A template that refuses the system role gets its text at the head of the first
        user message.

        Raises:
            GenerationError: The template cannot render this chat.
        """
        plain = [{"role": m.role, "content": m.content} for m in messages]
        try:
            text = self._apply(plain)
        except jinja2.TemplateError as error:
            folded = _fold_system(plain)
            if folded == plain:
                raise _refused(error) from error
            try:
                text = self._apply(folded)
            except jinja2.TemplateError as again:
                raise _refused(again) from again
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _apply(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )


def _refused(error: jinja2.TemplateError) -> GenerationError:
    return GenerationError(
        f"The model's chat template refuses this chat: {error}.",
        hint="Start a new chat, or leave the system prompt out.",
    )


def _fold_system(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return messages
    first = {
        "role": "user",
        "content": messages[0]["content"] + "\n\n" + messages[1]["content"],
    }
    return [first, *messages[2:]]


class Detokeniser:
    """Turns tokens into text piece by piece.

    Holds back bytes of an unfinished UTF-8 character, and keeps whitespace tokens: each
    piece is the difference between two decodings of the same window, so that a
    tokenizer's treatment of leading spaces cancels out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0
        self._emitted = 0

    def push(self, token: int) -> str:
        """Adds a token. Returns the text that is complete now, often empty."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._emitted])
        after = self._decode(self._ids[self._start :])
        if after.endswith(_REPLACEMENT) or len(after) <= len(before):
            return ""
        self._start, self._emitted = self._emitted, len(self._ids)
        return after[len(before) :]

    def flush(self) -> str:
        """Returns what is still held back, without a character that never got whole."""
        before = self._decode(self._ids[self._start : self._emitted])
        after = self._decode(self._ids[self._start :])
        self._start = self._emitted = len(self._ids)
        return after[len(before) :].rstrip(_REPLACEMENT)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

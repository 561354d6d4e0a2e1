"""Between chats and tokens: templates, end-of-text ids, incremental detokenisation."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import jinja2
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..errors import CheckpointError, GenerationError, UnsupportedModelError
from ..events import ChatMessage
from .reply_parts import CHANNEL_MARKS, THINK_TAGS, uses_channels

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
    """Returns the end-of-text ids of config, generation config, tokenizer and template together.

    Published models disagree with themselves here: one that lists only its text's end would
    go on after its turn's.
    """
    sources: list[object] = [
        getattr(config, "eos_token_id", None),
        getattr(config.get_text_config(), "eos_token_id", None),
    ]
    if (folder / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(folder).eos_token_id)
    if tokenizer is not None:
        sources.append(tokenizer.eos_token_id)
        sources.append(_turn_end_id(tokenizer))
    ids: set[int] = set()
    for source in sources:
        if isinstance(source, int):
            ids.add(source)
        elif isinstance(source, (list, tuple)):
            ids.update(int(i) for i in source)
    return frozenset(ids)


def _turn_end_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the special token that the chat template writes behind a reply, if it does."""
    if not tokenizer.chat_template:
        return None
    reply = "a reply"
    chat = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": reply}]
    try:
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=False, tokenize=False)
    except (jinja2.TemplateError, TypeError):
        return None
    _, found, rest = text.rpartition(reply)
    following = _tokens_of(tokenizer, rest.lstrip()) if found else []
    return following[0] if following and following[0] in _special_ids(tokenizer) else None


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}


def _tokens_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class ChatRenderer:
    """Renders a chat to the tokens the model was trained on.

    Attributes:
        template: The chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        if not tokenizer.chat_template:
            raise UnsupportedModelError(
                "The model has no chat template, so it is not a chat model.",
                hint="Choose the model's chat or instruct version.",
            )
        self.template: str = tokenizer.get_chat_template()

    def render(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Returns the chat's tokens, ready for the assistant's turn.

        Raises:
            GenerationError: The template cannot render this chat.
        """
        return self.tokens(self.text(messages))

    def text(self, messages: Sequence[ChatMessage]) -> str:
        """Returns the chat as text, ready for the assistant's turn.

        A template that refuses the system role, or leaves its text out, gets it at the head
        of the first user message; one whose roles must alternate gets messages of the same
        role joined.

        Raises:
            GenerationError: The template cannot render this chat.
        """
        whole = [_fields(message) for message in messages]
        system = whole[0]["content"].strip() if whole and whole[0]["role"] == "system" else ""
        refusal: Exception | None = None
        for chat in (whole, _fold_system(whole), _join(whole), _fold_system(_join(whole))):
            try:
                text = self._tokenizer.apply_chat_template(
                    chat, add_generation_prompt=True, tokenize=False
                )
            except (jinja2.TemplateError, TypeError) as error:
                refusal = refusal or error
                continue
            if system in text:
                return text
        raise GenerationError(
            f"The model's chat template refuses this chat: {refusal or 'no system prompt'}.",
            hint="Start a new chat, or leave the system prompt out.",
        ) from refusal

    def tokens(self, text: str) -> list[int]:
        """Returns a rendered chat's tokens, with the template's beginning of text alone.

        Raises:
            GenerationError: The text holds halves of characters.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise GenerationError(
                "The chat holds half a character (a lone surrogate), which is no text.",
                hint="Take it out of the message.",
            ) from error
        ids = _tokens_of(self._tokenizer, text)
        bos = self._tokenizer.bos_token_id
        if len(ids) > 1 and ids[0] == ids[1] == bos:
            del ids[0]  # Some tokenizers add one whatever they are told.
        return ids


def _fields(message: ChatMessage) -> dict[str, str]:
    fields = {"role": message.role, "content": message.content}
    if message.thinking and message.role == "assistant":
        # Templates know it by one name or the other, and those that know none leave it out.
        fields |= {"thinking": message.thinking, "reasoning_content": message.thinking}
    return fields


def _fold_system(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return messages
    first = {
        "role": "user",
        "content": messages[0]["content"] + "\n\n" + messages[1]["content"],
    }
    return [first, *messages[2:]]


def _join(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Joins neighbours of the same role, as questions that were never answered are."""
    joined: list[dict[str, str]] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"]:
            last = joined.pop()
            both = (last["content"], message["content"])
            message = last | message | {"content": "\n\n".join(text for text in both if text)}
        joined.append(message)
    return joined


def reply_marks(tokenizer: PreTrainedTokenizerBase, template: str) -> frozenset[str]:
    """Returns the special tokens that tell a reply's parts, for `Detokeniser` to give."""
    marks = [tag for pair in THINK_TAGS for tag in pair]
    if uses_channels(template):
        marks += CHANNEL_MARKS
    return frozenset(mark for mark in marks if mark in tokenizer.get_added_vocab())


class Detokeniser:
    """Turns tokens into text piece by piece.

    Holds back bytes of an unfinished UTF-8 character, and keeps whitespace tokens: each
    piece is the difference between two decodings of the same window, so that a
    tokenizer's treatment of leading spaces cancels out.

    Args:
        tokenizer: The model's.
        kept: Special tokens whose text is given; of all others it is left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kept: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = _special_ids(tokenizer) - {
            tokenizer.convert_tokens_to_ids(token) for token in kept
        }
        self._ids: list[int] = []
        self._start = 0
        self._emitted = 0

    def push(self, token: int) -> str:
        """Adds a token. Returns the text that is complete now, often empty."""
        if token in self._skipped:
            return ""
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
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

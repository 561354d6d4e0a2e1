"""Chats on a tiny model: what is read again, and what is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.errors import ContextLengthError
from mira_engine.events import ChatMessage, ContextTrimmed, Event, GenerationDone
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.types import ComputeDtype, Precision, ReplyPart
from tiny_models import CHAT_TEMPLATE

CONFIG = EngineConfig(
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=2.0),
    num_draft_tokens=2,
    context_length=256,
    num_threads=1,
)
BRIEF = SamplingConfig(max_new_tokens=8)

THINK_TEMPLATE = CHAT_TEMPLATE.replace("assistant\n{%", "assistant\n<think>\n{%")
"""Opens the thinking, and does not render that of earlier replies."""

SYSTEM = ChatMessage(role="system", content="Brief.")


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def assistant(text: str, thinking: str = "") -> ChatMessage:
    return ChatMessage(role="assistant", content=text, thinking=thinking)


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> ModelHome:
    """A tiny chat model with full attention, prepared."""
    library = ModelLibrary(tmp_path_factory.mktemp("conversing"))
    made = library.resolve(str(tiny_checkpoint("olmoe", tokenizer=True)))
    prepare(made, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)
    return made


@pytest.fixture(scope="module")
def engine(home: ModelHome) -> Iterator[Engine]:
    made = Engine.load(home, CONFIG)
    yield made
    made.close()


@pytest.fixture
def thinking_engine(home: ModelHome, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = Engine.load(home, CONFIG)
    monkeypatch.setattr(made._chats._tokenizer, "chat_template", THINK_TEMPLATE)
    yield made
    made.close()


def ask(engine: Engine, *messages: ChatMessage) -> tuple[list[Event], GenerationDone]:
    events = list(engine.stream("r", messages, BRIEF))
    assert isinstance(events[-1], GenerationDone)
    return events, events[-1]


def test_only_what_follows_stripped_thinking_is_read_again(thinking_engine: Engine) -> None:
    first, third = user("Two and two?"), user("And three?")
    _, done = ask(thinking_engine, SYSTEM, first)
    assert done.thinking
    assert not done.text, "this model never ends its thinking"
    prompt = thinking_engine.render([SYSTEM, first])
    chat = (SYSTEM, first, assistant("Four.", done.thinking), third)
    longer = thinking_engine.render(chat)
    num_common = next(i for i, (a, b) in enumerate(zip(prompt, longer, strict=False)) if a != b)
    assert len(prompt) - num_common == len("<think>\n"), "all but what opens the thinking"
    assert longer[:num_common] == prompt[:num_common]

    _, done = ask(thinking_engine, *chat)
    assert done.stats.num_prompt_tokens == len(longer)
    assert done.stats.num_cached_tokens == num_common

    again = user("And four?")
    _, last = ask(thinking_engine, *chat, assistant("Seven.", done.thinking), again)
    assert last.stats.num_cached_tokens == len(longer) - len("<think>\n")


def test_turns_left_out_are_told_first_and_the_reply_comes(engine: Engine) -> None:
    chat = [SYSTEM]
    for number in range(6):
        chat += [user(f"question {number}"), assistant(f"reply {number}")]
    chat.append(user("the last"))
    assert len(engine.render(chat)) > CONFIG.context_length
    events, done = ask(engine, *chat)
    told = events[0]
    assert isinstance(told, ContextTrimmed)
    assert told.limit == 256
    assert told.num_turns % 2 == 0
    kept = [SYSTEM, *chat[1 + told.num_turns :]]
    assert told.num_tokens == len(engine.render(kept)) == done.stats.num_prompt_tokens
    assert told.num_tokens + done.stats.num_new_tokens <= 256
    assert done.stats.num_new_tokens == 8

    # The next turn goes on where this one was cut, and reads only what is new.
    chat += [assistant("short"), user("more")]
    events, done = ask(engine, *chat)
    assert isinstance(events[0], ContextTrimmed)
    assert events[0].num_turns == told.num_turns
    assert done.stats.num_cached_tokens >= told.num_tokens


def test_chat_that_fits_tells_nothing(engine: Engine) -> None:
    events, _ = ask(engine, SYSTEM, user("Hello"))
    assert not any(isinstance(event, ContextTrimmed) for event in events)


def test_question_too_long_by_itself_is_an_error_with_a_hint(engine: Engine) -> None:
    with pytest.raises(ContextLengthError, match="holds 256") as caught:
        ask(engine, SYSTEM, user("x" * 300))
    assert "--context" in caught.value.hint
    assert "512" in caught.value.hint
    assert ask(engine, SYSTEM, user("x"))[1].stats.num_new_tokens == 8


def test_hint_names_no_larger_context_where_there_is_none(engine: Engine, monkeypatch) -> None:
    monkeypatch.setattr(Engine, "longest_context", 256)
    with pytest.raises(ContextLengthError) as caught:
        ask(engine, user("x" * 300))
    assert "--context" not in caught.value.hint
    assert "Shorten" in caught.value.hint


def test_thinking_is_streamed_as_such(thinking_engine: Engine) -> None:
    events, done = ask(thinking_engine, user("Hello"))
    parts = {e.part for e in events if getattr(e, "text", "") and hasattr(e, "part")}
    assert parts == {ReplyPart.THINKING}
    assert done.stats.num_new_tokens == 8

"""What of a reply is thinking, however its text is cut into pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mira_engine.model.reply_parts import (
    CHANNEL_MARKS,
    THINK_TAGS,
    Channels,
    ReplyParts,
    ThinkTags,
    opened_tag,
    split_reply,
    uses_channels,
)
from mira_engine.types import ReplyPart

A, T = ReplyPart.ANSWER, ReplyPart.THINKING

CHANNELS = (
    "<|channel|>analysis<|message|>They ask. <b>Hm</b><|end|>"
    "<|start|>assistant<|channel|>final<|message|>Four < five.<|return|>"
)


def parts_of(parser: ReplyParts, pieces: Sequence[str]) -> list[tuple[ReplyPart, str]]:
    """Returns the parts of a reply, neighbours of the same part joined."""
    joined: list[tuple[ReplyPart, str]] = []
    for part, text in [*(p for piece in pieces for p in parser.push(piece)), *parser.flush()]:
        assert text
        if joined and joined[-1][0] is part:
            joined[-1] = (part, joined[-1][1] + text)
        else:
            joined.append((part, text))
    return joined


@pytest.mark.parametrize(
    ("opened", "text", "expected"),
    [
        (None, "Hello.", [(A, "Hello.")]),
        (None, "\n Hello. \n", [(A, "\n Hello. \n")]),
        (None, "<think>\nLet me see.\n</think>\n\nFour.", [(T, "Let me see."), (A, "Four.")]),
        (None, "  <think>a</think>b", [(T, "a"), (A, "b")]),
        (None, "<think>\n\n</think>\n\nFour.", [(A, "Four.")]),
        (None, "[THINK]a[/THINK]b", [(T, "a"), (A, "b")]),
        (None, "<thinking>a</think>b</thinking>c", [(T, "a</think>b"), (A, "c")]),
        (None, "Write <think>x</think>.", [(A, "Write <think>x</think>.")]),
        (None, "<think>a</think>b </think> <think>c", [(T, "a"), (A, "b </think> <think>c")]),
        (None, "<think>never closed </thi", [(T, "never closed </thi")]),
        (None, "<thin", [(A, "<thin")]),
        (None, "<table>", [(A, "<table>")]),
        ("<think>", "Let me see.\n</think>\n\nFour.", [(T, "Let me see."), (A, "Four.")]),
        ("<think>", "<think>\na</think>b", [(T, "a"), (A, "b")]),
        ("<think>", "</think>b", [(A, "b")]),
        ("<think>", "a  \n b </th x", [(T, "a  \n b </th x")]),
        ("[THINK]", "a[/THINK]b", [(T, "a"), (A, "b")]),
    ],
)
def test_think_tags_part_a_reply(
    opened: str | None, text: str, expected: list[tuple[ReplyPart, str]]
) -> None:
    assert parts_of(ThinkTags(opened), [text]) == expected
    assert parts_of(ThinkTags(opened), list(text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CHANNELS, [(T, "They ask. <b>Hm</b>"), (A, "Four < five.")]),
        ("<|channel|>final<|message|>Hi", [(A, "Hi")]),
        ("<|message|>Hi<|return|>", [(A, "Hi")]),
        ("Hi there", [(A, "Hi there")]),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary"
            "<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>c",
            [(T, "a\n\nb"), (A, "c")],
        ),
        (" to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}", [(T, "{}")]),
        # The end of the thinking is missing.
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", [(T, "a"), (A, "b")]),
        ("<|channel|>analysis<|message|>a<|end|>b", [(T, "a"), (A, "b")]),
        # Stopped inside a head: that is no text.
        ("<|channel|>anal", []),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assis", [(T, "a")]),
        ("<|channel|>" + 99 * "text ", [(A, 99 * "text ")]),
    ],
)
def test_channels_part_a_reply(text: str, expected: list[tuple[ReplyPart, str]]) -> None:
    assert parts_of(Channels(), [text]) == expected
    assert parts_of(Channels(), list(text)) == expected


def test_answer_is_streamed_and_not_held_back() -> None:
    parser = ThinkTags()
    assert parser.push("Hel") == [(A, "Hel")]
    assert parser.push("lo <") == [(A, "lo <")]
    channels = Channels()
    assert channels.push("<|channel|>final<|message|>Hel") == [(A, "Hel")]
    assert channels.push("lo <") == [(A, "lo ")]
    assert channels.push("b") == [(A, "<b")]


def test_part_is_known_before_text_comes() -> None:
    assert ThinkTags("<think>").part is T
    assert ThinkTags().part is A
    parser = Channels()
    assert parser.part is T
    parser.push("<|channel|>final<|message|>")
    assert parser.part is A


_WORDS = st.sampled_from(
    [*(tag for pair in THINK_TAGS for tag in pair), *CHANNEL_MARKS]
    + [
        "<",
        "</",
        "think",
        ">",
        "|",
        "<|",
        " ",
        "\n",
        "a",
        "é",
        "final",
        "analysis",
        "to=",
        "[",
        "]",
    ]
)
_TEXTS = st.lists(_WORDS, max_size=24).map("".join)
_PARSERS: tuple[Callable[[], ReplyParts], ...] = (
    ThinkTags,
    lambda: ThinkTags("<think>"),
    Channels,
)


@given(text=_TEXTS, data=st.data())
@pytest.mark.parametrize("make", _PARSERS)
def test_any_split_gives_the_same_parts(
    make: Callable[[], ReplyParts], text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parts_of(make(), [text])
    assert parts_of(make(), pieces) == whole
    assert parts_of(make(), list(text)) == whole


@given(text=_TEXTS)
@pytest.mark.parametrize("opened", [None, "<think>"])
def test_think_tags_lose_nothing_but_the_frame(opened: str | None, text: str) -> None:
    """Every character comes out in order, but for one pair of tags and space around them."""
    out = "".join(piece for _, piece in parts_of(ThinkTags(opened), [text]))
    frames = [("", "")] if opened is None else []
    frames += [pair for pair in THINK_TAGS if opened is None or pair[0] == opened]
    candidates = {text}
    for opening, closing in frames:
        body = text.lstrip()
        if body.startswith(opening):
            body = body[len(opening) :]
        candidates.add(body.replace(closing, "", 1) if closing else body)
    squeezed = {"".join(each.split()) for each in candidates}
    assert "".join(out.split()) in squeezed


@given(thought=st.text(st.characters(exclude_characters="<|"), min_size=1), answer=st.text())
def test_framed_channels_lose_nothing(thought: str, answer: str) -> None:
    answer = answer.replace("<|", "")
    text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
    text += f"<|channel|>final<|message|>{answer}<|return|>"
    expected = [(T, thought), *([(A, answer)] if answer else [])]
    assert parts_of(Channels(), list(text)) == expected


@pytest.mark.parametrize(
    ("prompt", "tag"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>"),
        ("<|im_start|>assistant\n", None),
        ("<|im_start|>assistant\n<think></think>", None),
        ("what does <think> do?<|im_end|>\n<|im_start|>assistant\n", None),
    ],
)
def test_opened_tag_is_seen_at_the_prompt_s_end_only(prompt: str, tag: str | None) -> None:
    assert opened_tag(prompt) == tag


def test_template_decides_how_a_reply_is_split() -> None:
    template = "... <|start|>assistant<|channel|>final<|message|> ..."
    assert uses_channels(template)
    assert isinstance(split_reply(template, ""), Channels)
    opened = split_reply("plain", "<think>\n")
    assert isinstance(opened, ThinkTags)
    assert opened.part is T

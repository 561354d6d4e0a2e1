"""What is exported can be read back, and what was spoilt is refused by its line."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mira_app.conversation import Conversation, Role, Turn, TurnStatus
from mira_app.export import ImportFormatError, from_jsonl, from_markdown, to_jsonl, to_markdown
from mira_app.sanitise import sanitise
from mira_app.stored_chat import StoredChat
from mira_engine.api import ReplyStats, SamplingConfig

NASTY = "#-<>\\`\n \r\u2028\x1b"
TEXT = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(NASTY)))
MARK_LIKE = st.sampled_from(
    ["<!-- mira-chat:end -->", "\\<!-- mira-chat:turn {} -->", "\n## You\n\n", "\n\n</details>\n\n"]
)
MESSAGE = st.one_of(TEXT, st.lists(st.one_of(TEXT, MARK_LIKE), max_size=4).map("\n".join))
STATS = ReplyStats(num_new_tokens=7, decode_s=1.5, governor_reason="K 2")


@st.composite
def chats(draw) -> StoredChat:
    chat = Conversation(system_prompt=draw(MESSAGE))
    for _ in range(draw(st.integers(0, 5))):
        if chat.turns:
            chat = chat.at(draw(st.sampled_from([None, *range(len(chat.turns))])))
        if chat.head is not None and chat.head.role is Role.USER and draw(st.booleans()):
            chat = chat.with_reply(
                draw(MESSAGE),
                status=draw(st.sampled_from(TurnStatus)),
                error=draw(TEXT),
                stats=draw(st.sampled_from([None, STATS])),
                thinking=draw(MESSAGE),
                model=draw(TEXT),
            )
        else:
            chat = chat.with_user(draw(MESSAGE))
    return StoredChat(
        chat_id=draw(st.text("abc123", min_size=1)),
        title=draw(TEXT),
        model=draw(TEXT),
        conversation=chat,
        sampling=draw(st.sampled_from([None, SamplingConfig(temperature=0.7, top_k=9)])),
        updated_at=draw(st.sampled_from([None, datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)])),
    )


@given(st.lists(chats(), max_size=3))
def test_jsonl_keeps_every_chat_whole(many):
    exported = to_jsonl(many)
    assert from_jsonl(exported) == tuple(many)
    assert exported.isascii()
    assert exported.count("\n") == sum(1 + len(chat.conversation.turns) for chat in many)


@pytest.mark.parametrize("visited", ["3", "[1]", "[-1]", "[true]", '"x"'])
def test_places_visited_that_are_no_turns_are_refused(visited):
    exported = to_jsonl([StoredChat(chat_id="c", conversation=Conversation().with_user("q"))])
    broken = exported.replace('"visited": []', f'"visited": {visited}')
    assert broken != exported
    with pytest.raises(ImportFormatError, match="visited"):
        from_jsonl(broken)


def shown(turn: Turn) -> tuple:
    return (turn.role, sanitise(turn.content), sanitise(turn.thinking), turn.status, turn.model)


@given(chats())
def test_markdown_keeps_the_shown_path(chat):
    exported = to_markdown(chat)
    back = from_markdown(exported)
    assert [shown(t) for t in back.conversation.path()] == [
        shown(t) for t in chat.conversation.path()
    ]
    assert back.conversation.system_prompt == sanitise(chat.conversation.system_prompt)
    assert (back.model, back.sampling) == (chat.model, chat.sampling)
    assert to_markdown(back) == exported


def sample() -> StoredChat:
    chat = Conversation(system_prompt="be kind").with_user("why?")
    chat = chat.with_reply("first try").before_reply()
    chat = chat.with_reply("be**cause**", thinking="hm\n\nyes", model="builtin", stats=STATS)
    return StoredChat(chat_id="c", title="Why", model="builtin", conversation=chat)


def test_markdown_reads_well():
    lines = to_markdown(sample()).split("\n")
    text = "\n".join(line for line in lines if not line.startswith("<!--"))
    assert "# Why\n\n## System\n\nbe kind\n\n## You\n\nwhy?\n\n## builtin\n\n" in text
    assert "<details><summary>Thinking</summary>\n\nhm\n\nyes\n\n</details>" in text
    assert "first try" not in text


def test_markdown_of_a_stopped_reply_says_so():
    chat = Conversation().with_user("q").with_reply("par", status=TurnStatus.STOPPED, model="m")
    assert "## m (stopped)" in to_markdown(StoredChat(chat_id="c", conversation=chat))


def test_markdown_holds_no_escape_sequence():
    chat = Conversation(system_prompt="\x1b[2J").with_user("a\x9b31mb")
    chat = chat.with_reply("c", thinking="\x1b]0;t\x07", model="\x1b[31mm", error="\x1b[0m")
    exported = to_markdown(StoredChat(chat_id="c", title="\x1b[5mt", conversation=chat))
    assert not {"\x1b", "\x9b", "\x07"} & set(exported)


def test_markdown_mark_is_one_comment_whatever_the_model_is_called():
    chat = Conversation().with_user("q").with_reply("a", model="--> b")
    exported = to_markdown(StoredChat(chat_id="c", model="--> b", conversation=chat))
    marks = [line for line in exported.split("\n") if line.startswith("<!--")]
    assert all(mark.count("-->") == 1 for mark in marks)
    assert from_markdown(exported).conversation.turns[1].model == "--> b"


def spoilt(line: int, **fields) -> str:
    """The sample's lines with fields of one of them, from 1, changed."""
    lines = to_jsonl([sample()]).splitlines()
    lines[line - 1] = json.dumps(json.loads(lines[line - 1]) | fields)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (to_jsonl([sample()]) + "{", "Line 5: this is no JSON"),
        (to_jsonl([sample()]) + "\n[1]", "Line 6: this is no JSON object"),
        (to_jsonl([sample()]) + "[" * 100_000, "Line 5: this is no JSON"),
        ("hello", "Line 1: this is no JSON"),
        (to_jsonl([sample()]).split("\n", 1)[1], "Line 1: a chat has to come first"),
        (spoilt(2, type="word"), "Line 2: type 'word'"),
        (spoilt(2, type=None), "Line 2: type is no text"),
        (spoilt(2, role="system"), "Line 2: role cannot be 'system'"),
        (spoilt(3, content=5), "Line 3: content is no text: 5"),
        (spoilt(3, turn_id=7), "Line 3: turn 7 stands where turn 1 should"),
        (spoilt(3, parent_id=1), "Line 3: turn 1 cannot follow turn 1"),
        (spoilt(3, parent_id=True), "Line 3: parent_id is no whole number"),
        (spoilt(3, parent_id=None), "Line 3: turn 1 is a reply without a question"),
        (spoilt(4, stats=[]), "Line 4: stats is no object"),
        (spoilt(4, stats={"num_hits": "many"}), "Line 4: stats.num_hits cannot be 'many'"),
        (spoilt(4, status="fine"), "Line 4: status cannot be 'fine'"),
        (spoilt(1, head_id=9), "Line 1: the chat stands at turn 9"),
        (spoilt(1, sampling={"temperature": 99}), "Line 1: sampling: temperature"),
        (spoilt(1, sampling={"temperature": "hot"}), "Line 1: sampling:"),
        (spoilt(1, updated_at="soon"), "Line 1: "),
        (spoilt(1, format=2), "Line 1: format 2 is not known"),
    ],
    ids=lambda value: value.split("\n")[0][:40],
)
def test_spoilt_jsonl_is_refused_by_its_line(text, message):
    with pytest.raises(ImportFormatError) as raised:
        from_jsonl(text)
    assert raised.value.message.startswith(message)
    assert "Nothing was imported" in raised.value.hint


def test_figures_of_another_version_are_passed_over():
    (chat,) = from_jsonl(spoilt(4, stats={"num_hits": 3, "stall_s": 1, "num_unicorns": 1}))
    assert chat.conversation.turns[2].stats == ReplyStats(num_hits=3, stall_s=1.0)


MARKDOWN = to_markdown(sample())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# Some notes\n", "Line 1: this is no chat that mira-chat exported"),
        ("", "Line 1: this is no chat that mira-chat exported"),
        (MARKDOWN.split("<!-- mira-chat:end")[0], "the text ends before its end mark"),
        (MARKDOWN.replace("mira-chat:turn {", "mira-chat:turn [", 1), "Line 9: this mark"),
        (MARKDOWN.replace('"role": "user"', '"role": user', 1), "Line 9: this is no JSON"),
        (MARKDOWN.replace('"role": "user"', '"role": "u"', 1), "Line 9: role cannot be 'u'"),
        (MARKDOWN.replace("## You\n\n", "", 1), "Line 12: turn does not belong here"),
        (MARKDOWN.replace("\n\n</details>", "", 1), "the thoughts are not whole"),
        (MARKDOWN.replace("<!-- mira-chat:content -->\n", "", 1), "the thoughts are not whole"),
        (MARKDOWN.replace('"format": 1', '"format": 3', 1), "Line 1: format 3"),
    ],
    ids=lambda value: value.split("\n")[0][:40],
)
def test_spoilt_markdown_is_refused_by_its_line(text, message):
    with pytest.raises(ImportFormatError) as raised:
        from_markdown(text)
    assert message in raised.value.message

"""The tree of turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mira_app.conversation import Conversation, Role, TurnStatus


def contents(conversation: Conversation) -> list[str]:
    return [message.content for message in conversation.messages()]


def test_messages_follow_the_path_with_system_prompt_first():
    chat = Conversation(system_prompt="be kind").with_user("q").with_reply("a").with_user("r")
    assert contents(chat) == ["be kind", "q", "a", "r"]
    assert [m.role for m in chat.messages()] == ["system", "user", "assistant", "user"]


def test_regenerated_reply_is_a_sibling_and_old_one_can_be_shown_again():
    chat = Conversation().with_user("q").with_reply("one")
    again = chat.before_reply().with_reply("two")
    assert [t.content for t in again.siblings(again.head_id)] == ["one", "two"]
    assert contents(again) == ["q", "two"]
    assert contents(again.at(chat.head_id)) == ["q", "one"]


def test_branch_that_is_come_back_to_stands_where_it_was_left():
    chat = Conversation().with_user("q").with_reply("one").with_user("more").with_reply("first")
    again = chat.before_reply().with_reply("second")
    old = again.at_sibling(again.head_id, -1)
    assert contents(old)[-1] == "first"
    other = old.before_reply(1).with_reply("two")
    assert contents(other) == ["q", "two"]
    back = other.at_sibling(other.head_id, -1)
    assert contents(back) == ["q", "one", "more", "first"], "not the newest, which is second"
    assert back.at_sibling(1, 0) is not None
    assert contents(back.at_sibling(1, 0)) == contents(back), "the path is left as it is"


def test_branch_that_was_never_left_is_shown_to_its_newest_end():
    chat = Conversation().with_user("q").with_reply("one").with_user("more").with_reply("end")
    stored = Conversation(turns=chat.turns, head_id=chat.head_id).before_reply(1).with_reply("two")
    forgotten = Conversation(turns=stored.turns, head_id=stored.head_id)
    assert contents(forgotten.at_sibling(stored.head_id, -1)) == ["q", "one", "more", "end"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=30))
def test_places_visited_are_few_and_none_lies_on_the_way_to_another(steps):
    chat = Conversation().with_user("q")
    for is_moving, number in steps:
        if is_moving:
            chat = chat.at(number % len(chat.turns))
        else:
            chat = chat.with_user(f"q{len(chat.turns)}")
    assert len({*chat.visited}) == len(chat.visited) <= len(chat.turns)


def test_partial_reply_stays_and_empty_one_is_left_out_with_its_question():
    chat = Conversation().with_user("q").with_reply("hal", status=TurnStatus.STOPPED)
    assert contents(chat.with_user("r")) == ["q", "hal", "r"]
    broken = Conversation().with_user("q").with_reply("", status=TurnStatus.ERROR)
    assert contents(broken.with_user("r")) == ["r"]


def test_version_is_grafted_on_another_as_a_branch_of_it():
    start = Conversation(system_prompt="s").with_user("q").with_reply("a")
    theirs = start.with_user("r").with_reply("b").before_reply().with_reply("c")
    mine = start.with_user("r").with_reply("d").with_user("x").at(1).with_user("y")
    both = mine.grafted_on(theirs)
    assert both.turns[:5] == theirs.turns
    assert contents(both) == contents(mine) == ["s", "q", "a", "y"]
    assert [turn.content for turn in both.siblings(both.head_id)] == ["r", "y"]
    assert [turn.content for turn in both.siblings(3)] == ["b", "c", "d"]
    assert contents(both.at_sibling(both.head_id, -1)) == ["s", "q", "a", "r", "d", "x"]
    assert mine.grafted_on(both) == both, "a second time adds nothing"
    assert start.grafted_on(theirs).turns == theirs.turns


def grown(start: Conversation, steps) -> Conversation:
    for is_moving, number in steps:
        if is_moving and start.turns:
            start = start.at(number % len(start.turns))
        else:
            start = start.with_user(f"q{number % 3}")
    return start


def said(chat: Conversation) -> tuple[str, ...]:
    return tuple(turn.content for turn in chat.path())


def paths(chat: Conversation) -> set[tuple[str, ...]]:
    return {said(chat.at(turn.turn_id)) for turn in chat.turns}


@given(*[st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=12)] * 3)
def test_grafted_version_has_all_of_both_and_stands_where_it_stood(common, one, other):
    start = grown(Conversation().with_user("q"), common)
    mine, theirs = grown(start, one), grown(start, other)
    both = mine.grafted_on(theirs)
    assert both.turns[: len(theirs.turns)] == theirs.turns
    assert len(both.turns) <= len(theirs.turns) + len(mine.turns) - len(start.turns)
    assert said(both) == said(mine)
    assert [said(both.at(v)) for v in both.visited] == [said(mine.at(v)) for v in mine.visited]
    assert mine.grafted_on(both) == both
    numbers = mine.numbers_in(both)
    assert [said(both.at(numbers[t.turn_id])) for t in mine.turns] == [
        said(mine.at(t.turn_id)) for t in mine.turns
    ]
    assert numbers[mine.head_id] == both.head_id
    assert paths(both) == paths(mine) | paths(theirs)


def test_operations_leave_the_old_conversation_alone():
    chat = Conversation().with_user("q")
    chat.with_reply("a")
    assert len(chat.turns) == 1


def test_reply_without_question_and_regenerate_of_nothing_are_refused():
    with pytest.raises(ValueError, match="question"):
        Conversation().with_reply("a")
    with pytest.raises(ValueError, match="question"):
        Conversation().before_reply()
    with pytest.raises(ValueError, match="no turn"):
        Conversation().at(0)


@given(st.lists(st.sampled_from(["ask", "reply", "empty", "again"]), max_size=20))
def test_roles_always_alternate_and_end_with_the_question(steps):
    chat = Conversation()
    for step in steps:
        head = chat.head
        if step == "ask":
            chat = chat.with_user(f"q{len(chat.turns)}")
        elif step == "again" and head is not None:
            chat = chat.before_reply()
        elif head is not None and head.role is Role.USER:
            chat = chat.with_reply("" if step == "empty" else "a")
    roles = [message.role for message in chat.messages()]
    assert all(a != b for a, b in zip(roles, roles[1:], strict=False))
    if chat.head is not None and chat.head.role is Role.USER:
        assert chat.messages()[-1].content == chat.head.content

"""Nothing that steers a terminal gets through, and plain text is never harmed."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mira_app.sanitise import MAX_STRING_CHARS, Sanitiser, sanitise

NASTY = st.text(
    alphabet="\x1b[]0;1m?PX^_\\\x07\x9b\x9c\x9d\x18 a\n\t\r\u202e\ud800é(B", max_size=60
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPdata\x1b\\after", "after"),
        ("\x9b2Jafter", "after"),
        ("\x9dtitle\x9cafter", "after"),
        ("\x1b(Bafter", "after"),
        ("\x1bcafter", "after"),
        ("a\r\nb\tc\x08\x7f\x00", "a\nb\tc"),
        ("\u202eevil\u2066", "evil"),
        ("\ud800", "\ufffd"),
        ("\x1b[31\nstill here", "\nstill here"),
        ("\x1b]never ended\nstill here", "\nstill here"),
        ("\x1b\x1b[1mx", "x"),
        ("naïve 日本 🙂 \u200d שלום", "naïve 日本 🙂 \u200d שלום"),
    ],
)
def test_known_sequences(text, shown):
    assert sanitise(text) == shown


def test_unfinished_string_swallows_a_bounded_part_only():
    assert sanitise("\x1b]" + "x" * (MAX_STRING_CHARS + 100)).endswith("x" * 99)


@given(st.lists(NASTY | st.text(), max_size=8))
def test_splitting_the_stream_changes_nothing(pieces):
    sanitiser = Sanitiser()
    assert "".join(map(sanitiser.feed, pieces)) == sanitise("".join(pieces))


@given(NASTY | st.text())
def test_result_holds_no_control_characters_and_is_stable(text):
    shown = sanitise(text)
    controls = {c for c in shown if unicodedata.category(c) in ("Cc", "Cs")}
    assert controls <= {"\n", "\t"}
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    assert sanitise(shown) == shown


@given(st.text(alphabet=st.characters(exclude_categories=["Cc", "Cf", "Cs"]) | st.just("\n")))
def test_plain_text_is_unchanged(text):
    assert sanitise(text) == text

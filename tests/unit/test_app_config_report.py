"""`mira-chat config`: every setting, its value and where it comes from."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from mira_app.config_report import init_config, make_config_report
from mira_app.setting_fields import FIELDS
from mira_app.settings_file import read_settings_file
from mira_engine.api import ConfigError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "config.toml"


def line_of(report, name: str) -> list[str]:
    (line,) = [line for line in report.lines() if line.split()[:1] == [name]]
    return line.split()


def test_report_says_where_each_value_comes_from(path):
    path.write_text('[engine]\nk = 3\nbudget = "40%"\n', encoding="utf-8")
    environ = {"MIRA_CHAT_K": "5", "MIRA_CHAT_LINK_RATE": "500MB/s"}
    report = make_config_report(environ, path, {"temperature": 0.5})
    assert line_of(report, "k") == ["k", "5", "environment", "(MIRA_CHAT_K)"]
    assert line_of(report, "budget") == ["budget", "40%", "file"]
    assert line_of(report, "link_rate")[1] == "500MB"
    assert line_of(report, "temperature") == ["temperature", "0.5", "flag"]
    assert line_of(report, "theme") == ["theme", "mira-dark", "default"]
    assert line_of(report, "memory") == ["memory", "-", "default"]
    assert str(path) in report.lines()[0]


def test_report_as_json_has_every_setting_in_the_form_of_the_file(path):
    text = '[keymap]\n"chat.new" = "f9"\n[engine]\nlink_latency = 2\n[chat]\nsystem = "→"\n'
    path.write_text(text, encoding="utf-8")
    written = make_config_report({}, path).to_json()
    assert written.isascii(), "any encoding has it"
    report = json.loads(written)
    assert list(report["settings"]) == [setting.name for setting in FIELDS]
    assert report["settings"]["keymap"]["value"] == {"chat.new": "f9"}
    assert report["settings"]["link_latency"] | {"about": ""} == {
        "value": 2.0, "origin": "file", "section": "engine", "about": "",
    }  # fmt: skip
    assert report["settings"]["budget"]["value"] is None
    assert report["is_there"]
    assert report["problems"] == []


def test_report_tells_every_mistake_and_shows_the_rest(path):
    path.write_text("[engine]\nk = 99\nthreads = 2\n", encoding="utf-8")
    report = make_config_report({"MIRA_CHAT_SEED": "x", "MIRA_CHAT_DTYPE": "float32"}, path)
    text = "\n".join(report.lines())
    assert "line 2: K cannot be 99" in text
    assert "MIRA_CHAT_SEED" in text
    assert line_of(report, "k") == ["k", "-", "default"]
    assert line_of(report, "threads") == ["threads", "2", "file"]
    assert line_of(report, "dtype")[1] == "float32"
    problems = json.loads(report.to_json())["problems"]
    assert [problem["code"] for problem in problems] == ["ConfigError"] * 2


def test_report_without_a_file_says_how_to_get_one(path):
    assert "config --init" in make_config_report({}, path).lines()[0]


def test_init_writes_the_documented_file_once(path):
    assert str(path) in init_config(path)
    assert read_settings_file(path).problems == ()
    with pytest.raises(ConfigError, match="there already"):
        init_config(path)


def test_report_names_themes_and_keys_that_are_none_with_their_lines(path):
    path.write_text(
        '[interface]\ntheme = "mira-lihgt"\n\n[keymap]\n"chat.nwe" = "f9"\n'
        '"chat.new" = "ctl+k"\nchat.fold = "f10"\n',
        encoding="utf-8",
    )
    report = make_config_report({}, path)
    said = [f"{problem.message} {problem.hint}" for problem in report.problems]
    assert said == [
        f"{path}, line 2: There is no theme 'mira-lihgt'. Did you mean mira-light?",
        f"{path}, line 5: keymap: there is no binding 'chat.nwe'. Did you mean chat.new?",
        f"{path}, line 6: keymap: chat.new cannot be on 'ctl+k'. Did you mean ctrl+k?",
    ]
    assert line_of(report, "theme") == ["theme", "mira-lihgt", "file"]


def test_report_names_the_variable_of_a_theme_that_is_none(path):
    path.write_text('[interface]\ntheme = "terminal"\n', encoding="utf-8")
    (problem,) = make_config_report({"MIRA_CHAT_THEME": "drakula"}, path).problems
    assert problem.message == "There is no theme 'drakula'."
    assert problem.hint == "Did you mean dracula? It comes from the variable MIRA_CHAT_THEME."


def test_report_names_both_variables_of_a_setting_where_both_are_wrong(path):
    path.write_text('[chat]\nconnect = "http://host:8000"\n', encoding="utf-8")
    environ = {"MIRA_CHAT_CONNECT": "ftp://x", "MIRA_CONNECT": "http://"}
    report = make_config_report(environ, path)
    assert [problem.hint.rpartition(" ")[2] for problem in report.problems] == [
        "MIRA_CHAT_CONNECT.", "MIRA_CONNECT.",
    ]  # fmt: skip
    assert [line[:8] for line in report.lines() if "connect cannot be" in line] == ["problem:"] * 2
    assert line_of(report, "connect") == ["connect", "http://host:8000/v1", "file"]
    one_right = make_config_report(environ | {"MIRA_CONNECT": "http://other"}, path)
    assert line_of(one_right, "connect")[2:] == ["environment", "(MIRA_CONNECT)"]
    assert len(one_right.problems) == 1


def test_report_notes_variables_that_are_no_settings(path):
    environ = {
        "MIRA_CHAT_BUDGT": "40%", "MIRA_CHAT_WHATEVER": "1", "MIRA_CHAT_K": "2",
        "MIRA_CHAT_DATA_DIR": "/x", "MIRA_CHATTER": "1", "_MIRA_CHAT_COMPLETE": "1",
    }  # fmt: skip
    report = make_config_report(environ, path)
    assert report.problems == ()
    assert [note.message.split()[2] for note in report.notes] == [
        "MIRA_CHAT_BUDGT", "MIRA_CHAT_WHATEVER",
    ]  # fmt: skip
    assert report.notes[0].hint == "Did you mean MIRA_CHAT_BUDGET?"
    assert report.lines()[-2].startswith("note: The variable MIRA_CHAT_WHATEVER")
    assert len(json.loads(report.to_json())["notes"]) == 2


def test_report_of_a_named_file_that_is_not_there_is_a_problem(path):
    (problem,) = make_config_report({"MIRA_CHAT_CONFIG": str(path)}, path).problems
    assert "MIRA_CHAT_CONFIG names it" in problem.message


def test_report_takes_every_theme_and_binding_that_there_is(path):
    path.write_text('[interface]\ntheme = "nord"\n[keymap]\napp.help = "f10"\n', encoding="utf-8")
    assert make_config_report({}, path).problems == ()


def test_report_without_looks_or_keys_loads_no_terminal_interface(path):
    path.write_text("[engine]\nk = 3\n", encoding="utf-8")
    code = (
        "import sys, pathlib; from mira_app.config_report import make_config_report\n"
        f"make_config_report({{}}, pathlib.Path({str(path)!r}))\n"
        "print('textual' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

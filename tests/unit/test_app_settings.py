"""Defaults, the file, environment, flags, and what is refused."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
from mira_app.atomic_file import UnwritableFileError
from mira_app.paths import (
    cache_dir,
    config_dir,
    config_path,
    data_dir,
    history_path,
    log_dir,
    state_path,
)
from mira_app.setting_fields import FIELDS, FIELDS_BY_NAME
from mira_app.settings import load_settings
from mira_app.settings_file import (
    change_settings,
    default_document,
    open_settings,
    read_settings_file,
    write_default_file,
)
from mira_engine.api import (
    CompileMode,
    ComputeDtype,
    ConfigError,
    DraftDense,
    MemoryAmount,
    Precision,
)


def test_defaults_leave_the_engine_its_own():
    settings = load_settings({"k": None, "budget": None}, {})
    assert settings.model == "builtin"
    assert not settings.is_model_given
    assert settings.engine.budget is None
    assert settings.engine.num_draft_tokens is None


def test_flags_win_over_environment_and_environment_over_defaults():
    environ = {"MIRA_CHAT_BUDGET": "40%", "MIRA_CHAT_K": "2", "MIRA_CHAT_PRECISION": "int8"}
    settings = load_settings({"k": 8, "dtype": "float32"}, environ)
    assert settings.engine.budget == MemoryAmount(share=0.4)
    assert settings.engine.num_draft_tokens == 8
    assert settings.engine.precision is Precision.INT8
    assert settings.engine.dtype is ComputeDtype.FLOAT32


def test_compiling_and_the_drafts_layers_are_chosen_by_name():
    settings = load_settings({}, {})
    assert settings.engine.compile_mode is CompileMode.AUTO
    assert settings.engine.draft_dense is DraftDense.AUTO
    environ = {"MIRA_CHAT_COMPILE": "WAIT", "MIRA_CHAT_DRAFT_DENSE": "int8"}
    settings = load_settings({}, environ)
    assert settings.engine.compile_mode is CompileMode.WAIT
    assert settings.engine.draft_dense is DraftDense.INT8
    settings = load_settings({"compile": "off", "draft_dense": "split"}, environ)
    assert settings.engine.compile_mode is CompileMode.OFF
    assert settings.engine.draft_dense is DraftDense.SPLIT


def test_largest_seed_is_taken():
    assert load_settings({"seed": 2**63 - 1}, {}).sampling.seed == 2**63 - 1


def test_link_and_sampling_values_are_converted():
    settings = load_settings(
        {"link_rate": "500MB/s", "link_latency": 2.0, "seed": 7, "prefetch": False, "system": ""},
        {},
    )
    assert settings.engine.link.bytes_per_s == 500e6
    assert settings.engine.link.latency_s == pytest.approx(0.002)
    assert settings.sampling.seed == 7
    assert not settings.engine.is_prefetch_enabled
    assert settings.system_prompt == ""


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("precision", "int3", "nested"),
        ("dtype", "fp16", "bfloat16"),
        ("budget", "lots", "300MiB"),
        ("budget", "0%", "budget"),
        ("k", "many", "whole number"),
        ("k", 33, "0 to 32"),
        ("k", -1, "0 to 32"),
        ("temperature", "nan", "0 to 10"),
        ("link_rate", "40%", "link-rate"),
        ("link_rate", "fast", "link-rate"),
        ("link_latency", -1, "latency"),
        ("prefetch", "maybe", "yes or no"),
        ("compile", "later", "off, auto, wait"),
        ("draft_dense", "int4", "auto, target, split, int8"),
        ("draft_experts", "some", "auto, all, cached"),
        ("max_tokens", 0, "at least 1"),
        ("colour", "red", "colour"),
        ("seed", -1, "0 to 9223372036854775807"),
        ("seed", 2**63, "0 to 9223372036854775807"),
        ("seed", "many", "whole number"),
    ],
)
def test_values_that_cannot_be_used_are_refused_with_what_can(name, value, said):
    with pytest.raises(ConfigError) as caught:
        load_settings({name: value}, {})
    assert said in str(caught.value)


def test_data_dir_variable_moves_data_and_logs(tmp_path):
    environ = {"MIRA_CHAT_DATA_DIR": str(tmp_path)}
    assert data_dir(environ) == tmp_path
    assert log_dir(environ) == tmp_path / "logs"
    assert cache_dir(environ) == tmp_path / "cache"
    assert data_dir({}).name == "mira-chat"
    assert "mira-chat" in cache_dir({}).parts
    assert cache_dir({}) not in (data_dir({}), log_dir({}))
    assert isinstance(log_dir({}), Path)


def test_memory_is_bytes_and_never_a_share():
    assert load_settings({"memory": "1.5GiB"}, {}).engine.memory_bytes == 3 * 2**29
    assert load_settings({}, {"MIRA_CHAT_MEMORY": "8GB"}).engine.memory_bytes == 8 * 10**9
    assert load_settings({}, {}).engine.memory_bytes is None
    for text in ("40%", "lots", "0MiB"):
        with pytest.raises(ConfigError, match="memory"):
            load_settings({"memory": text}, {})


# -- the file


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "settings" / "config.toml"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def problem_texts(path: Path) -> list[str]:
    return [str(problem) for problem in read_settings_file(path).problems]


def test_file_wins_over_defaults_environment_over_file_and_flags_over_all(path):
    write(path, '[engine]\nk = 3\nbudget = "40%"\n[reply]\nseed = 1\n[interface]\nmouse = false\n')
    opened = open_settings({"seed": 3}, {"MIRA_CHAT_SEED": "2", "MIRA_CHAT_BUDGET": "50%"}, path)
    settings = opened.settings
    assert settings.engine.num_draft_tokens == 3
    assert settings.engine.budget == MemoryAmount(share=0.5)
    assert settings.sampling.seed == 3
    assert not settings.interface.is_mouse_enabled
    assert settings.interface.theme == "mira-dark"
    assert opened.problems == ()


def test_file_that_is_not_there_leaves_the_defaults(path):
    opened = open_settings({}, {}, path)
    assert opened.settings == load_settings({}, {})
    assert not opened.file.is_there


def test_model_of_the_file_counts_as_given(path):
    write(path, '[chat]\nmodel = "/models/one"\n')
    settings = open_settings({}, {}, path).settings
    assert (settings.model, settings.is_model_given) == ("/models/one", True)


def test_documented_file_holds_every_setting_and_is_valid_when_all_are_in_force(path):
    text = default_document()
    write(path, text)
    assert read_settings_file(path).values == {}
    write(path, re.sub(r"^# ([\w\".]+ = .*)$", r"\1", text, flags=re.MULTILINE))
    file = read_settings_file(path)
    assert file.problems == ()
    assert set(file.values) == set(FIELDS_BY_NAME)
    for setting in FIELDS:
        if setting.default not in (None, {}):
            assert setting.read(file.values[setting.name]) == setting.default


def test_every_value_shown_is_read_back_as_it_was():
    given = {
        "budget": "40%", "memory": "1500MB", "link_rate": "3GiB", "link_latency": 0.25,
        "k": 4, "keymap": {"chat.new": "f9"}, "compile": "wait", "mouse": "off",
    }  # fmt: skip
    for name, value in given.items():
        setting = FIELDS_BY_NAME[name]
        read = setting.read(value)
        assert setting.read(setting.shown(read)) == read
    assert FIELDS_BY_NAME["memory"].shown(1500 * 10**6) == "1500MB"
    assert FIELDS_BY_NAME["memory"].shown(12345) == "12345B"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[interface]\nmouse = \n", "line 2, column 9"),
        ('[interface]\ntheme = "terminal\n', "line 2"),
        ("[engine]\nk", "line 2, column 2 (the end) is not TOML"),
        ("[engine]\n\nbugdet = 3\n", "line 3: There is no setting 'bugdet'. Did you mean budget?"),
        ("[engin]\nk = 3\n", "line 1: There is no section [engin]. Did you mean engine?"),
        ("k = 3\n", "line 1: k belongs to [engine]. Move it under a line [engine]."),
        ("[reply]\nk = 3\n", "line 2: k belongs to [engine]"),
        ("[engine]\nk = 33\n", "line 2: K cannot be 33. Give 0 to 32"),
        ('[engine]\nk = "many"\n', "Give a whole number"),
        ("[engine]\nk = true\n", "Give a whole number"),
        ("[chat]\nmodel = 3\n", "model cannot be 3. Give a text, in quotes"),
        ('[interface]\nmouse = "perhaps"\n', "Give yes or no"),
        ("[interface]\npanel_width = 5\n", "35 to 80"),
        ("[engine]\nbudget = 40\n", "40%"),
        ('[keymap]\n"chat.new" = 3\n', "keymap chat.new cannot be 3"),
        ("interface = 3\n", "There is no setting 'interface'"),
        ("\xff", "TOML"),
    ],
)
def test_mistake_in_the_file_is_named_with_its_place_and_what_it_takes(path, text, said):
    write(path, text)
    (found,) = problem_texts(path)
    assert str(path) in found
    assert said in found
    with pytest.raises(ConfigError) as caught:
        open_settings({}, {}, path)
    assert said in str(caught.value)


def test_mistakes_cost_only_their_own_lines_where_the_app_opens_anyway(path):
    write(path, '[interface]\ntheme = "terminal"\nmous = true\n[engine]\nk = 99\n')
    opened = open_settings({}, {}, path, is_lenient=True)
    assert opened.settings.interface.theme == "terminal"
    assert opened.settings.engine.num_draft_tokens is None
    assert len(opened.problems) == 2
    with pytest.raises(ConfigError, match="lists 1 more"):
        open_settings({}, {}, path)


def test_syntax_error_leaves_defaults_where_the_app_opens_anyway(path):
    write(path, "[interface\ntheme = 1\n")
    opened = open_settings({}, {"MIRA_CHAT_K": "2"}, path, is_lenient=True)
    assert opened.settings.engine.num_draft_tokens == 2
    assert "line 1" in opened.problems[0].message


def test_values_that_do_not_go_together_leave_the_file_out_where_the_app_opens_anyway(path):
    write(path, '[engine]\nk = 4\nprecision = "int4"\n')
    with pytest.raises(ConfigError, match="int4"):
        open_settings({}, {}, path)
    opened = open_settings({}, {}, path, is_lenient=True)
    assert opened.settings == load_settings({}, {})
    assert "left out" in opened.problems[0].message


def test_flag_that_cannot_be_used_is_refused_in_the_app_too(path):
    write(path, "[engine]\nk = 4\n")
    with pytest.raises(ConfigError, match="K cannot be 40"):
        open_settings({"k": 40}, {}, path, is_lenient=True)


def test_variable_that_cannot_be_used_is_named():
    with pytest.raises(ConfigError, match="MIRA_CHAT_K"):
        load_settings({}, {"MIRA_CHAT_K": "many"})


@pytest.mark.parametrize("text", ['"chat.new" = "ctrl+k"', 'chat.new = "ctrl+k"'])
def test_keymap_is_read_with_and_without_quotes(path, text):
    write(path, f"[keymap]\n{text}\n")
    assert open_settings({}, {}, path).settings.interface.keymap == {"chat.new": "ctrl+k"}
    environ = {"MIRA_CHAT_KEYMAP": "chat.new=ctrl+k  app.help=f10"}
    keymap = load_settings({}, environ).interface.keymap
    assert keymap == {"chat.new": "ctrl+k", "app.help": "f10"}


def test_folder_in_the_place_of_the_file_is_told(path):
    path.mkdir(parents=True)
    assert "cannot be read" in problem_texts(path)[0]


def test_file_that_is_no_text_is_told(path):
    path.parent.mkdir()
    path.write_bytes(b"\xff\xfe\x00k")
    assert "not UTF-8" in problem_texts(path)[0]


# -- writing it


def test_changed_setting_keeps_comments_and_every_other_line(path):
    text = (
        "# mine\n[interface]  # looks\n# why\ntheme = 'nord'  # quiet\nmouse = false\n"
        "[keymap]\n# fingers\n'chat.new' = 'f9'\n"
    )
    write(path, text)
    change_settings(path, {"theme": "terminal", "k": 3, "keymap": {"app.help": "f10"}})
    changed = path.read_text()
    for kept in ("# mine\n[interface]  # looks\n# why\n", "# quiet", "mouse = false", "# fingers"):
        assert kept in changed
    settings = open_settings({}, {}, path).settings
    assert settings.interface.theme == "terminal"
    assert settings.interface.keymap == {"app.help": "f10"}
    assert settings.engine.num_draft_tokens == 3
    change_settings(path, {"k": None})
    assert open_settings({}, {}, path).settings.engine.num_draft_tokens is None


def test_changed_setting_stands_under_its_documentation_in_a_new_file(path):
    change_settings(path, {"theme": "terminal"})
    lines = path.read_text().splitlines()
    at = lines.index('theme = "terminal"')
    assert lines[at - 1].startswith("# ")
    assert "# mouse = true" in lines


def test_change_of_a_broken_file_is_refused_and_leaves_it(path):
    write(path, "[interface\n")
    with pytest.raises(ConfigError, match="line 1"):
        change_settings(path, {"theme": "terminal"})
    assert path.read_text() == "[interface\n"


def test_change_that_cannot_be_written_is_told_and_leaves_the_old_file(path, monkeypatch):
    write(path, "[engine]\nk = 3\n")

    def fail(*args):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UnwritableFileError, match="only be read") as caught:
        change_settings(path, {"k": 4})
    assert str(path) in caught.value.message
    assert path.read_text() == "[engine]\nk = 3\n"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_documented_file_never_replaces_one(path):
    write(path, "# mine\n")
    with pytest.raises(ConfigError, match="there already"):
        write_default_file(path)
    assert path.read_text() == "# mine\n"


def test_config_variable_names_another_file_and_data_variable_moves_the_rest(tmp_path):
    environ = {"MIRA_CHAT_CONFIG": str(tmp_path / "mine.toml"), "MIRA_CHAT_DATA_DIR": str(tmp_path)}
    assert config_path(environ) == tmp_path / "mine.toml"
    assert config_path({}) == config_dir() / "config.toml"
    assert state_path(environ) == tmp_path / "state" / "state.json"
    assert "mira-chat" in state_path({}).parts
    assert history_path(environ) == tmp_path / "history.sqlite3"
    assert history_path(environ, str(tmp_path / "chats.db")) == tmp_path / "chats.db"

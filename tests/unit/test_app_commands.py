"""The commands of the program: what they take, print and refuse."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from app_fakes import FakeShelf
from mira_app import cli, wiring
from mira_app.catalog import CatalogEntry, ModelState
from mira_app.commands import COMMANDS
from mira_app.model_list import model_lines, models_json
from mira_app.options import CHAT_SETTINGS, OPTIONS, takes_settings
from mira_app.progress import LineProgress, duration_text
from mira_app.settings import load_settings
from mira_assets.models import load_models
from mira_engine import api
from typer.testing import CliRunner

PROGRAM = Path(__file__).parents[1] / "app_fakes.py"
TIMEOUT_S = 300


@pytest.fixture
def invoke(monkeypatch):
    monkeypatch.setenv("TERMINAL_WIDTH", "100")

    def run(*args: str, stdin: str | bytes | None = None):
        return CliRunner().invoke(cli.app, list(args), input=stdin, prog_name="mira-chat")

    return run


@pytest.fixture
def mira(tmp_path):
    """The program as a process, against the fake engine."""

    def run(*args: str, modes: str = "", stdin: str = ""):
        return subprocess.run(
            [sys.executable, str(PROGRAM), str(tmp_path / "marker"), modes, *args],
            input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip

    return run


# -- how commands are found and what they share ---------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_command_of_the_table_is_there_and_explains_itself(invoke, name):
    command = COMMANDS[name]
    module = importlib.import_module(f"mira_app.commands.{command.module}")
    assert callable(getattr(module, command.function))
    done = invoke(name, "--help")
    assert done.exit_code == 0, done.output
    assert f"mira-chat {name} " in done.output
    assert command.summary.endswith(".")


def test_help_lists_every_command_and_imports_none():
    code = (
        "import sys, json\n"
        "from typer.testing import CliRunner\n"
        "from mira_app import cli\n"
        "print(CliRunner().invoke(cli.app, ['--help']).output)\n"
        "print(json.dumps([m for m in sys.modules if m.startswith(('mira_', 'textual', 'torch'))]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *shown, loaded = done.stdout.splitlines()
    names = [line.split()[0] for line in shown[shown.index("Commands:") + 1 :] if line.strip()]
    assert names == list(COMMANDS)
    assert set(json.loads(loaded)) == {
        "mira_app", "mira_app.cli", "mira_app.commands", "mira_app.options", "mira_app.reporting",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("moddels",), "No such command 'moddels'. Did you mean models?"),
        (("doctr",), "Did you mean doctor?"),
        (("zzz",), "See mira-chat --help."),
        (("run", "--modle", "x"), "--model"),
        (("--bugdet", "1GiB"), "--budget"),
        (("completion", "tcsh"), "bash"),
        (("chat", "abc", "--continue"), "leave the id out"),
        (("run", "--json", "--json-events", "x"), "one of them"),
        (("--plain", "models"), "options come after the command"),
        (("export",), "name one chat, or give --all"),
        (("export", "--all", "--format", "md"), "jsonl"),
    ],
)
def test_wrong_usage_exits_2_and_names_the_nearest(invoke, args, said):
    done = invoke(*args)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.replace("│", " ").split())


def test_each_shared_option_is_a_setting():
    values = {"model": "m", "system": "s", "trace": "t", "prefetch": False, "compile": "off"}
    values |= {"precision": "int8", "dtype": "float32", "draft_experts": "all"}
    values |= {
        "draft_dense": "auto",
        "context": 64,
        "min_p": 0.5,
        "budget": "1GiB",
        "memory": "1GiB",
        "connect": "localhost:8000",
        "link_rate": "1GB",
    }
    given = {name: values.get(name, 1) for name in OPTIONS}
    settings = load_settings(given, {})
    assert settings.engine.trace_path == "t"
    assert settings.engine.is_prefetch_enabled is False
    assert "trace" not in CHAT_SETTINGS


def test_takes_settings_puts_options_where_flags_stood_and_hands_them_on():
    seen = {}

    @takes_settings("budget", "k")
    def command(first: str, flags: dict, last: bool = False) -> None:
        seen.update(first=first, flags=flags, last=last)

    import inspect

    assert list(inspect.signature(command).parameters) == ["first", "budget", "k", "last"]
    command(first="a", budget="1GiB", k=None, last=True)
    assert seen == {"first": "a", "flags": {"budget": "1GiB", "k": None}, "last": True}
    with pytest.raises(KeyError):
        takes_settings("no_such_setting")(lambda flags: None)


# -- models -----------------------------------------------------------------------------------


def entry(**fields) -> CatalogEntry:
    return CatalogEntry(
        **{"model": "builtin", "title": "A", "about": "b", "is_ready": False} | fields
    )


def last_line(**fields) -> str:
    return list(model_lines([entry(**fields)], api.Precision.INT8))[-1].strip()


def test_models_show_the_figures_of_the_catalog():
    granite = load_models()["ibm-granite/granite-3.1-1b-a400m-instruct"]
    known = entry(
        model=granite.repo, title=granite.title, about="b\x1b[31m", facts=granite,
        prepared_bytes=3 * 2**20,
    )  # fmt: skip
    name, what, figures = model_lines([known], api.Precision.NESTED)
    assert (name, what) == (granite.repo, "    Granite 3.1 1B A400M Instruct: b")
    assert figures == (
        "    nested: not downloaded · 1.33B parameters, 0.43B of them per token · "
        "download 2.5 GiB · about 3.0 MiB once prepared · Apache-2.0"
    )
    unknown = dataclasses.replace(granite, licence=None)
    assert last_line(facts=unknown).endswith("licence not known")
    (told,) = json.loads(models_json([known]))
    assert told["facts"]["config"]["num_local_experts"] == 32
    assert (told["is_ready"], told["state"]) == (False, "available")


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "int8: not prepared"),
        ({"model": "/models/mine"}, "int8: not prepared"),
        ({"model": "owner/moe"}, "int8: not downloaded"),
        ({"is_ready": True}, "int8: ready"),
        ({"state": ModelState.DOWNLOADED}, "int8: downloaded, not prepared"),
        ({"state": ModelState.PREPARED}, "int8: prepared in another precision"),
        (
            {"is_ready": True, "prepared_bytes": 2**30, "is_size_measured": True},
            "int8: ready · takes 1.0 GiB",
        ),
    ],
)
def test_models_tell_the_state_in_plain_words(fields, shown):
    assert last_line(**fields) == shown


def test_models_of_an_empty_disk_are_the_catalog(invoke, data_dir):
    names = [each["model"] for each in json.loads(invoke("models", "--json").stdout)]
    assert names == ["builtin", *load_models()]
    assert len(invoke("models").stdout.splitlines()) == 3 * len(names)


def test_pull_tells_bytes_rate_and_time_left():
    clock = iter([0.0, 1.0, 2.0, 3.0, 9.0]).__next__
    out = io.StringIO()
    display = LineProgress(out, clock)

    def show(step: str, done: int, total: int, unit: str = "bytes") -> None:
        display.show(
            api.PrepareProgress(request_id="r", step=step, done=done, total=total, unit=unit)
        )

    mib = 2**20
    show("download", 400 * mib, 1000 * mib)  # what was there before costs no time
    show("download", 500 * mib, 1000 * mib)
    show("download", 600 * mib, 1000 * mib)
    show("convert", 1, 30, "layers")
    show("convert", 9, 30, "layers")
    assert out.getvalue().splitlines() == [
        "prepare: download, 400.0 MiB of 1000.0 MiB",
        "prepare: download, 500.0 MiB of 1000.0 MiB · 100.0 MiB/s · 5 s left",
        "prepare: download, 600.0 MiB of 1000.0 MiB · 100.0 MiB/s · 4 s left",
        "prepare: convert, 1 of 30 layers",
        "prepare: convert, 9 of 30 layers",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.4, "4 s"), (120, "2 min"), (7500, "2 h 05 min"), (89.6, "90 s")]
)
def test_time_left_is_short(seconds, text):
    assert duration_text(seconds) == text


def test_progress_of_steps_that_take_turns_is_a_line_for_each_tenth():
    out = io.StringIO()
    display = LineProgress(out, now=lambda: 0.0)
    for shard in range(100):
        for step in ("download", "backbone", "convert"):
            display.show(
                api.PrepareProgress(
                    request_id="r", step=step, done=shard + 1, total=100, unit="files"
                )
            )
    assert len(out.getvalue().splitlines()) == 3 * 11


def test_pull_prepares_even_what_looks_ready(mira):
    assert mira("pull", "builtin").returncode == 0
    again = mira("pull", "builtin")
    assert again.returncode == 0
    assert "prepare: convert" in again.stderr
    assert "builtin is ready in nested." in again.stderr
    assert "prepare: convert" not in mira("prepare", "builtin", "--no-predictors").stderr


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    made = FakeShelf(tmp_path / "removed")
    monkeypatch.setattr(wiring, "make_catalog", lambda: made)
    return made


def test_rm_says_what_it_frees(invoke, shelf):
    done = invoke("rm", "owner/moe", "--yes")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "Removed owner/moe: 3.0 MiB are free again.\n"
    assert shelf.removed.exists()
    assert invoke("rm", "owner/moe", "--yes").stderr == "Nothing was made for owner/moe.\n"


def test_rm_removes_nothing_where_nobody_can_be_asked(invoke, shelf):
    done = invoke("rm", "owner/moe")
    assert done.exit_code == 2
    assert "This frees 3.0 MiB." in done.stderr
    assert "hint: Give --yes." in done.stderr
    assert not shelf.removed.exists()


def test_rm_of_unknown_model_exits_1(invoke, shelf):
    done = invoke("rm", "nope", "--yes")
    assert done.exit_code == 1
    assert "no model 'nope'" in done.stderr


def test_rm_takes_an_added_model_off_the_list_unasked(invoke, data_dir):
    wiring.make_catalog().add("owner/moe")
    done = invoke("rm", "owner/moe")
    assert (done.exit_code, done.stderr) == (
        0, "Took owner/moe off the list; nothing was made for it.\n",
    )  # fmt: skip
    assert "owner/moe" not in invoke("models").stdout


def test_rm_removes_an_interrupted_download_that_models_lists(invoke, data_dir):
    home = data_dir / "models" / "owner--moe"
    (home / "download").mkdir(parents=True)
    (home / "download" / "part").write_bytes(bytes(2**20))
    (home / "source.json").write_text(json.dumps({"repo": "owner/moe"}))
    assert "owner/moe\n" in invoke("models").stdout
    assert "1.0 MiB are free again" in invoke("rm", "owner/moe", "-y").stderr
    assert not home.exists()


# -- config and completion --------------------------------------------------------------------


@pytest.fixture
def settings_file(data_dir, tmp_path):
    """Where the commands look for settings; nothing is in it yet."""
    return tmp_path / "config.toml"


def precision_in_force(invoke, *args: str) -> str:
    return invoke("models", *args).stdout.splitlines()[2].split()[0].rstrip(":")


def test_commands_take_the_file_unless_environment_or_flags_say_otherwise(
    invoke, settings_file, monkeypatch
):
    assert precision_in_force(invoke) == "nested"
    settings_file.write_text('[engine]\nprecision = "int8"\n')
    assert precision_in_force(invoke) == "int8"
    monkeypatch.setenv("MIRA_CHAT_PRECISION", "int4")
    assert precision_in_force(invoke) == "int4"
    assert precision_in_force(invoke, "--precision", "bf16") == "bf16"


def test_run_and_plan_send_the_engine_what_the_file_says(mira, settings_file):
    settings_file.write_text(
        '[chat]\nsystem = "Be brief."\n[engine]\nmemory = "5GiB"\n', encoding="utf-8"
    )
    assert mira("run", "x", modes="echo").stdout == "system: Be brief.\nuser: x\n"
    given = mira("run", "--system", "Be long.", "x", modes="echo")
    assert given.stdout == "system: Be long.\nuser: x\n"
    assert json.loads(mira("plan", "--json").stdout)["memory_bytes"] == 5 * 2**30
    given = mira("plan", "--json", "--memory", "6GiB")
    assert json.loads(given.stdout)["memory_bytes"] == 6 * 2**30


@pytest.mark.parametrize(
    "args",
    [
        ("run", "x"), ("models",), ("plan",), ("pull", "builtin"), ("bench",), ("profile",),
        ("chat", "--plain"), ("export", "--all"), (),
    ],
)  # fmt: skip
def test_mistaken_file_ends_a_command_with_its_line_and_column(invoke, settings_file, args):
    settings_file.write_text("[engine]\nk = \n")
    done = invoke(*args)
    assert done.exit_code == 2, done.output
    assert f"error: {settings_file}, line 2, column 5 is not TOML" in done.stderr
    assert "hint: " in done.stderr
    assert not done.stdout


def test_mistaken_value_names_its_line_and_counts_the_others(invoke, settings_file):
    settings_file.write_text("[engine]\nk = 99\nthread = 2\n")
    done = invoke("run", "x")
    assert done.exit_code == 2
    assert f"{settings_file}, line 2: K cannot be 99" in done.stderr
    assert "`mira-chat config` lists 1 more." in done.stderr


def test_run_json_tells_a_mistaken_file_as_one_object(invoke, settings_file):
    settings_file.write_text("k")
    told = json.loads(invoke("run", "--json", "x").stdout)
    assert told["error"]["code"] == "ConfigError"
    assert "line 1, column 2" in told["error"]["message"]


def test_config_shows_each_setting_and_where_it_comes_from(invoke, settings_file, monkeypatch):
    settings_file.write_text("[engine]\nk = 3\nthreads = 2\n")
    monkeypatch.setenv("MIRA_CHAT_K", "5")
    done = invoke("config")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.stdout.startswith(f"settings file: {settings_file}\n")
    assert ["k", "5", "environment", "(MIRA_CHAT_K)"] in lines
    assert ["threads", "2", "file"] in lines
    assert ["precision", "nested", "default"] in lines
    told = json.loads(invoke("config", "--json").stdout)
    assert told["settings"]["k"]["origin"] == "environment"
    assert told["settings"]["threads"] | {"about": ""} == {
        "value": 2, "origin": "file", "section": "engine", "about": "",
    }  # fmt: skip


@pytest.mark.parametrize("args", [(), ("--json",)])
def test_config_with_a_problem_exits_2_and_prints_the_report_all_the_same(
    invoke, settings_file, args
):
    settings_file.write_text("[engine]\nk = \n")
    done = invoke("config", *args)
    assert done.exit_code == 2
    assert "line 2, column 5" in done.stdout
    assert "temperature" in done.stdout


def test_config_path_and_init_are_about_the_file_in_force(invoke, settings_file):
    settings_file.unlink()
    assert invoke("config", "--path").stdout == f"{settings_file}\n"
    assert "config --init" in invoke("config").stdout.splitlines()[0]
    done = invoke("config", "--init")
    assert (done.exit_code, done.stdout.split()[:2]) == (0, ["wrote", f"{settings_file};"])
    document = settings_file.read_text()
    again = invoke("config", "--init")
    assert again.exit_code == 2
    assert f"{settings_file} is there already." in again.stderr
    assert settings_file.read_text() == document
    assert invoke("config").exit_code == 0


def test_config_init_where_it_cannot_be_written_exits_1(invoke, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MIRA_CHAT_CONFIG", str(tmp_path / "file" / "config.toml"))
    done = invoke("config", "--init")
    assert done.exit_code == 1
    assert "cannot be written" in done.stderr


@pytest.mark.parametrize("command", [("config",), ("models",), ("run", "hello")])
def test_settings_file_that_is_named_and_not_there_is_wrong_usage(invoke, settings_file, command):
    settings_file.unlink()
    done = invoke(*command)
    assert done.exit_code == 2
    assert f"{settings_file} is not there, though MIRA_CHAT_CONFIG names it." in done.output
    assert "config --init" in done.output


def test_settings_file_that_nobody_named_may_be_missing(invoke, settings_file, monkeypatch):
    monkeypatch.delenv("MIRA_CHAT_CONFIG")
    done = invoke("config")
    assert (done.exit_code, "problem" in done.stdout) == (0, False)


@pytest.mark.parametrize("command", [("run", "hello"), ("chat", "--plain")])
def test_options_of_the_engine_are_refused_where_a_server_runs_the_model(
    invoke, data_dir, monkeypatch, command
):
    monkeypatch.setattr(wiring, "make_remote_client", lambda address: pytest.fail("asked"))
    given = ("--memory", "8GiB", "-k", "2", "--no-prefetch", "--max-tokens", "9")
    done = invoke(*command, "--connect", "http://host:8000", *given)
    assert done.exit_code == 2
    assert "that host:8000 runs: --memory, -k, --no-prefetch." in done.output
    assert "max-tokens" not in done.output


def test_options_of_the_engine_are_taken_where_no_server_is_and_from_the_environment(monkeypatch):
    monkeypatch.setenv("MIRA_CHAT_MEMORY", "8GiB")
    for flags in ({"memory": "8GiB", "connect": ""}, {"connect": "http://host:8000"}):
        wiring.refuse_engine_flags(flags, wiring.read_settings(flags))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_this_program(invoke, shell):
    done = invoke("completion", shell)
    assert done.exit_code == 0
    assert "mira-chat" in done.stdout
    assert "_MIRA_CHAT_COMPLETE" in done.stdout


def test_completion_script_completes_commands_and_options(tmp_path):
    """As bash does it: the script is evaluated, and its function asked."""
    program = tmp_path / "mira-chat"
    program.write_text(f"#!{sys.executable}\nimport mira_app.cli\nmira_app.cli.main()\n")
    program.chmod(0o755)
    ask = (
        f'PATH="{tmp_path}:$PATH"; eval "$(mira-chat completion bash)"; complete -p mira-chat; '
        "ask() { _mira_chat_completion mira-chat; echo ${COMPREPLY[@]}; }; "
        "COMP_WORDS=(mira-chat do); COMP_CWORD=1; ask; "
        "COMP_WORDS=(mira-chat run --draft); COMP_CWORD=2; ask"
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=TIMEOUT_S)
    binding, commands, options = done.stdout.splitlines()
    assert "mira-chat" in binding
    assert commands == "doctor"
    assert options.split() == ["--draft-experts", "--draft-dense"]

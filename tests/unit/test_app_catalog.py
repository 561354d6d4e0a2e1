"""The catalog: what is listed, in which state, and how well it would run here."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
from app_fakes import FakeEngineClient, fake_engine_command
from fake_engine import ALTERNATIVES, MACHINE
from mira_app.catalog import (
    ADDED_FILE,
    BUILTIN,
    CatalogEntry,
    LibraryCatalog,
    ModelState,
    is_repo_name,
    model_name,
)
from mira_app.catalog_configs import find_entry
from mira_app.engine_client import EngineClient
from mira_app.model_sizes import expected_prepared_bytes
from mira_app.verdicts import VERDICTS_FILE, VerdictBoard, rate_text, verdict_of
from mira_assets.models import CatalogModel, load_models
from mira_engine import api
from mira_engine.checkpoint.architecture import load_config, meta_model
from mira_engine.checkpoint.experts import find_expert_modules
from mira_engine.checkpoint.files import BACKBONE_MARKER, MANIFEST_FILE
from mira_engine.checkpoint.formats import make_format
from mira_engine.events import DepthResult

OLMOE = "allenai/OLMoE-1B-7B-0924-Instruct"
NESTED = api.Precision.NESTED
GIB = 2**30

VERIFIED = {
    "ibm-granite/granite-3.1-1b-a400m-instruct": "granite-3.1-1b-a400m-instruct",
    OLMOE: "OLMoE-1B-7B",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": "Qwen1.5-MoE-A2.7B",
    "deepseek-ai/DeepSeek-V2-Lite-Chat": "DeepSeek-V2-Lite",
    "microsoft/Phi-3.5-MoE-instruct": "Phi-3.5-MoE",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "Mixtral-8x7B",
}
PLANNABLE = [model for model in load_models().values() if model.config]


@pytest.fixture
def catalog(tmp_path):
    return LibraryCatalog(tmp_path / "data")


def make_folder(tmp_path: Path, name: str = "my-moe") -> Path:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def prepare(catalog: LibraryCatalog, folder: Path, *precisions: str) -> None:
    home = catalog._library.resolve(str(folder))
    home.backbone_dir.mkdir(parents=True)
    (home.backbone_dir / BACKBONE_MARKER).touch()
    for precision in precisions:
        store = home.store_dir(api.Precision(precision))
        store.mkdir(parents=True)
        (store / MANIFEST_FILE).write_text("x" * 1000)
    (home.root / "source.json").write_text(json.dumps({"folder": str(folder)}))


def entry_of(catalog: LibraryCatalog, model: str) -> CatalogEntry:
    return next(each for each in catalog.entries(NESTED) if each.model == model)


# -- the models that ship with the program


def test_catalog_holds_at_least_twelve_models_the_small_ones_first():
    models = list(load_models().values())
    assert len(models) >= 12
    assert all(is_repo_name(model.repo) for model in models)
    assert {model.repo for model in models if model.is_verified} == set(VERIFIED)


@pytest.mark.parametrize("model", PLANNABLE, ids=lambda model: model.title)
def test_figures_of_a_model_agree_with_what_its_configuration_builds(model: CatalogModel, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(model.config)))
    built = meta_model(load_config(tmp_path))
    modules = find_expert_modules(built)
    shape = modules[0].shape
    total = sum({id(each): each.numel() for each in built.parameters()}.values())
    assert total == pytest.approx(model.total_billions * 1e9, rel=0.04)
    assert len(modules) == model.num_layers - model.num_dense_layers
    assert modules[0].num_experts == model.num_experts
    assert (shape.hidden_size, shape.intermediate_size) == (model.hidden_size, model.expert_width)
    for precision in api.Precision:
        fmt = make_format(
            precision, shape, layout="rows" if precision in ("int4", NESTED) else None
        )
        bytes_of = [fmt.record_bytes(plane) for plane in fmt.planes]
        if precision not in (api.Precision.INT4, NESTED):
            draft = make_format(api.Precision.INT4, shape, layout="rows")
            bytes_of += [draft.record_bytes(plane) for plane in draft.planes]
        expected = model.num_routed_experts * sum(bytes_of) + 2 * model.non_expert_weights
        assert expected_prepared_bytes(model, precision) == expected


@pytest.mark.parametrize(("repo", "folder"), VERIFIED.items())
def test_verified_model_agrees_with_its_published_configuration(repo, folder, shared_inputs):
    path = shared_inputs / "data/configs" / folder / "config.json"
    if not path.exists():
        pytest.skip(f"no configuration {folder}")
    published = json.loads(path.read_text())
    model = load_models()[repo]
    assert {name: published.get(name) for name in model.config} == dict(model.config)
    assert model.context_tokens == published["max_position_embeddings"]


# -- entries


def test_entries_begin_with_the_builtin_model_and_list_the_catalog(catalog):
    models = [entry.model for entry in catalog.entries(NESTED)]
    assert models == [BUILTIN, *load_models()]
    entry = entry_of(catalog, OLMOE)
    assert (entry.state, entry.is_ready, entry.is_removable) == ("available", False, False)
    assert entry.prepared_bytes > entry.facts.download_bytes / 3
    assert not entry.is_size_measured


@pytest.mark.parametrize(
    ("precisions", "state"),
    [((), "downloaded"), (("int4",), "prepared"), (("int4", "nested"), "ready")],
)
def test_entry_of_a_folder_tells_its_state(catalog, tmp_path, precisions, state):
    folder = make_folder(tmp_path)
    if precisions:
        prepare(catalog, folder, *precisions)
    else:
        catalog.add(str(folder))
    entry = entry_of(catalog, str(folder))
    assert entry.state is ModelState(state)
    assert entry.is_ready == (state == "ready")
    assert entry.is_removable
    if precisions:
        assert (entry.prepared_bytes, entry.is_size_measured) == (1000 * len(precisions), True)


def test_find_of_an_unknown_repository_is_left_to_the_engine(catalog):
    entry = catalog.find("somebody/some-moe", NESTED)
    assert (entry.model, entry.is_ready, entry.facts) == ("somebody/some-moe", False, None)
    with pytest.raises(api.UnknownModelError):
        catalog.find("no-such-model", NESTED)


# -- adding


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("owner/name", "owner/name"),
        ("  'owner/name' ", "owner/name"),
        ("owner/name@v1.0", "owner/name@v1.0"),
        ("https://hub.example/owner/name/tree/main", "owner/name"),
    ],
)
def test_model_name_takes_what_people_paste(text, name):
    assert model_name(text) == name


@pytest.mark.parametrize(
    "text",
    ["", "  ", "name", "owner/name/more", "owner/a name", "https://hub.example/owner", "/no"],
)
def test_model_name_refuses_what_is_neither_with_a_hint(text):
    with pytest.raises(api.ConfigError) as refused:
        model_name(text)
    assert refused.value.hint


def test_added_repository_is_listed_once_and_can_be_removed(catalog, tmp_path):
    assert catalog.add("Somebody/Some-MoE") == "Somebody/Some-MoE"
    catalog.add("somebody/some-moe")
    catalog.add(OLMOE.lower())
    assert json.loads((tmp_path / "data" / ADDED_FILE).read_text()) == ["Somebody/Some-MoE"]
    assert entry_of(catalog, "Somebody/Some-MoE").is_removable
    assert catalog.remove("Somebody/Some-MoE") == 0
    assert "Somebody/Some-MoE" not in [entry.model for entry in catalog.entries(NESTED)]


def test_added_folder_that_is_gone_is_found_and_can_be_removed(catalog, tmp_path):
    folder = make_folder(tmp_path)
    name = catalog.add(str(folder))
    (folder / "config.json").unlink()
    assert catalog.find(name, NESTED).is_removable
    catalog.remove(name)
    with pytest.raises(api.UnknownModelError):
        catalog.find(name, NESTED)


def test_added_folder_without_a_model_is_refused(catalog, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(api.UnknownModelError, match=r"config\.json"):
        catalog.add(str(tmp_path / "empty"))


def test_added_model_on_a_disk_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    catalog = LibraryCatalog(tmp_path / "file")
    with pytest.raises(api.PrepareError):
        catalog.add("owner/name")


@pytest.mark.parametrize("text", ["", "{}", "[1, null]", "["])
def test_damaged_list_of_added_models_is_empty(catalog, tmp_path, text):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / ADDED_FILE).write_text(text)
    assert len(catalog.entries(NESTED)) == 1 + len(load_models())


def test_removed_model_frees_what_the_library_says(catalog, tmp_path):
    folder = make_folder(tmp_path)
    prepare(catalog, folder, "nested")
    assert catalog.disk_bytes(str(folder)) == catalog.remove(str(folder)) > 1000
    assert catalog.disk_bytes(str(folder)) == 0
    assert (folder / "config.json").exists()
    assert str(folder) not in [entry.model for entry in catalog.entries(NESTED)]


def test_free_bytes_of_a_directory_that_does_not_exist_yet(catalog):
    assert catalog.free_bytes() > 0


# -- verdicts


def made(*alternatives: api.PlanAlternative, refusal: str = "") -> api.PlanMade:
    return api.PlanMade(
        request_id="r", model="m", title="M", machine=MACHINE, memory_bytes=7 * GIB,
        context_length=2048, num_prompt_tokens=512, alternatives=alternatives,
        refusal=refusal, hint="Give more." if refusal else "",
    )  # fmt: skip


def test_verdict_of_a_plan_tells_mode_draft_and_rate():
    verdict = verdict_of(made(*ALTERNATIVES))
    assert verdict.text == "about 81 tok/s, estimate, large, draft 4"
    assert "240 of 480 experts" in verdict.reason


def test_verdict_of_a_plan_with_a_profile_tells_what_was_measured():
    measured = DepthResult(num_draft_tokens=2, tpot_s=0.0247, num_replies=9)
    verdict = verdict_of(dataclasses.replace(made(*ALTERNATIVES), measured=measured))
    assert verdict.text == "about 40 tok/s, measured, large, draft 2"
    slow = dataclasses.replace(measured, num_draft_tokens=0)
    verdict = verdict_of(dataclasses.replace(made(*ALTERNATIVES), measured=slow))
    assert verdict.text == "about 40 tok/s, measured, large, no draft"


def test_verdict_in_a_narrow_column_keeps_the_rate_and_where_it_comes_from():
    verdict = verdict_of(made(*ALTERNATIVES))
    assert verdict.fitting(40) == verdict.text
    assert verdict.fitting(39) == verdict.fitting(32) == "about 81 tok/s, estimate, large"
    assert verdict.fitting(10) == "about 81 tok/s, estimate"


@pytest.mark.parametrize(
    ("rate", "text"),
    [(1234.0, "1200"), (99.6, "100"), (81.3, "81"), (9.96, "10"), (8.13, "8.1"), (0.0456, "0.046")],
)
def test_rate_has_two_digits(rate, text):
    assert rate_text(rate) == text


def test_verdict_of_a_refusal_tells_the_missing_bytes():
    verdict = verdict_of(made(ALTERNATIVES[1], refusal="This model needs more."))
    assert verdict.text == "needs 5.0 MiB more"
    assert verdict.reason == "This model needs more. Give more."


class Board:
    """A board whose engine the test speaks for."""

    def __init__(self, cache_dir: Path, free_bytes: int = 8 * GIB) -> None:
        self.clients: list[FakeEngineClient] = []
        self.free_bytes = free_bytes
        self.board = VerdictBoard(
            self.make_client, api.EngineConfig(), cache_dir, free_memory=lambda: self.free_bytes
        )

    def make_client(self) -> FakeEngineClient:
        self.clients.append(FakeEngineClient())
        return self.clients[-1]

    @property
    def num_asked(self) -> int:
        return sum(len(client.requests) for client in self.clients)

    def answer(self, event: api.PlanMade | api.MiraError) -> bool:
        call = self.clients[-1].calls[-1]
        if isinstance(event, api.MiraError):
            call.fail(event)
        else:
            call.deliver(event)
        return self.board.poll()


def entries_of(*repos: str) -> tuple[CatalogEntry, ...]:
    return tuple(
        CatalogEntry(
            model=repo, title=repo, about="", is_ready=False, facts=load_models().get(repo)
        )
        for repo in repos
    )


GPT, QWEN = "openai/gpt-oss-20b", "Qwen/Qwen1.5-MoE-A2.7B-Chat"


def test_board_asks_one_by_one_and_ends_its_process(tmp_path):
    board = Board(tmp_path)
    board.board.want(entries_of(OLMOE, QWEN), is_memory_free=True)
    assert not board.board.poll()
    assert board.num_asked == 1
    assert board.board.is_pending(OLMOE)
    assert board.board.is_pending(QWEN)
    assert board.board.of(OLMOE) is None
    assert board.answer(made(*ALTERNATIVES))
    assert board.board.of(OLMOE).mode is api.CacheMode.LARGE
    assert board.num_asked == 2
    assert len(board.clients) == 1
    board.answer(made(*ALTERNATIVES))
    assert board.board._client is None


def test_board_plans_what_is_not_downloaded_from_known_figures(tmp_path):
    board = Board(tmp_path)
    board.board.want(entries_of(GPT), is_memory_free=True)
    board.board.poll()
    (request,) = board.clients[-1].requests
    config = json.loads((Path(request.model) / "config.json").read_text())
    assert config["model_type"] == "gpt_oss"
    assert "quantization_config" not in config


def test_board_knows_kept_verdicts_without_a_process(tmp_path):
    first = Board(tmp_path)
    first.board.want(entries_of(OLMOE), is_memory_free=True)
    first.board.poll()
    first.answer(made(*ALTERNATIVES))
    second = Board(tmp_path)
    second.board.want(entries_of(OLMOE), is_memory_free=True)
    second.board.poll()
    assert second.board.of(OLMOE) == first.board.of(OLMOE)
    assert second.clients == []


@pytest.mark.parametrize(
    ("free_bytes", "is_memory_free", "num_asked"),
    [(7 * GIB, True, 0), (2 * GIB, True, 1), (2 * GIB, False, 0)],
)
def test_board_asks_anew_only_when_free_memory_has_changed_much(
    tmp_path, free_bytes, is_memory_free, num_asked
):
    first = Board(tmp_path)
    first.board.want(entries_of(OLMOE), is_memory_free=True)
    first.board.poll()
    first.answer(made(*ALTERNATIVES))
    second = Board(tmp_path, free_bytes)
    second.board.want(entries_of(OLMOE), is_memory_free=is_memory_free)
    second.board.poll()
    assert second.num_asked == num_asked


def test_board_tells_models_that_cannot_run(tmp_path):
    board = Board(tmp_path)
    board.board.want(entries_of(OLMOE), is_memory_free=True)
    board.board.poll()
    assert board.answer(api.UnsupportedModelError("This family is unknown.", hint="Another."))
    assert board.board.of(OLMOE).text == "cannot run"
    assert board.board.of(OLMOE).reason == "This family is unknown. Another."


def test_board_gives_up_on_an_engine_that_dies(tmp_path):
    board = Board(tmp_path)
    wanted = entries_of(OLMOE, QWEN)
    board.board.want(wanted, is_memory_free=True)
    board.board.poll()
    assert not board.answer(api.EngineProcessError("It died."))
    board.board.want(wanted, is_memory_free=True)
    board.board.poll()
    assert board.num_asked == 1
    assert not board.board.is_pending(QWEN)


def test_board_asks_nothing_of_repositories_it_knows_nothing_of(tmp_path):
    board = Board(tmp_path)
    board.board.want(entries_of("owner/name", "LiquidAI/LFM2-8B-A1B"), is_memory_free=True)
    for _ in range(3):
        board.board.poll()
    assert board.num_asked == 0


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1, "verdicts": {"m": {"key": 1}}}'])
def test_board_takes_a_damaged_file_for_none(tmp_path, text):
    (tmp_path / VERDICTS_FILE).write_text(text)
    assert Board(tmp_path).board.of("m") is None


def test_board_with_a_process_gets_a_verdict(tmp_path):
    board = VerdictBoard(
        lambda: EngineClient(fake_engine_command(), log_dir=tmp_path), api.EngineConfig(), tmp_path
    )
    board.want(entries_of(OLMOE), is_memory_free=True)
    deadline = time.monotonic() + 60
    while not board.poll():
        assert time.monotonic() < deadline
    assert board.of(OLMOE).num_draft_tokens == 4
    board.close()


def test_home_of_nobody_is_no_model(tmp_path):
    name = "~nobody-of-this-name/x"
    with pytest.raises(api.UnknownModelError, match="does not exist"):
        find_entry(name, LibraryCatalog(tmp_path), NESTED)
    with pytest.raises(api.ConfigError, match="does not exist"):
        model_name(name)

"""Models of the hub against a server that speaks its protocol, with every fault it can have.

The rule of each fault: the first try ends in a sentence a person can act on, and the
second one finishes with the same bytes as a run without faults.
"""

import io
import json
from dataclasses import replace
from pathlib import Path

import hub_server
import huggingface_hub
import pytest
import tiny_models
from hub_checks import check_finished, ignore, make
from hub_scenes import (
    NEEDED,
    PASSING_FAULTS,
    REPO,
    SHARD,
    SHORT,
    TOLD_FAULTS,
    hashes,
    patience_with,
)
from huggingface_hub import constants
from mira_engine import wire
from mira_engine.checkpoint import hub, writing
from mira_engine.errors import (
    CheckpointError,
    DiskSpaceError,
    HubAccessError,
    HubBusyError,
    HubUnreachableError,
    UnknownModelError,
    UnsupportedModelError,
)
from mira_engine.events import (
    DescribeModel,
    ModelDescribed,
    Notice,
    PlanMade,
    PlanModel,
    PrepareDone,
    PrepareModel,
    RequestFailed,
)
from mira_engine.library import SOURCE_FILE
from mira_engine.model_report import describe
from mira_engine.prepare import prepare
from mira_engine.types import Precision
from mira_engine.worker import EventWriter, Worker


@pytest.fixture
def server(hub_with_model):
    return hub_with_model


@pytest.fixture
def library(hub_library):
    return hub_library


# -- without faults -----------------------------------------------------------------------


def test_prepare_hub_model_ends_with_the_bytes_of_a_folder(library, server, published, whole):
    seen = []
    make(library, on_progress=lambda *args: seen.append(args))
    check_finished(library, published, whole)
    assert list(dict.fromkeys(step for step, *_ in seen)) == ["download", "backbone", "convert"]
    downloads = [(done, total, unit, text) for step, done, total, unit, text in seen
                 if step == "download"]  # fmt: skip
    total = sum((published / name).stat().st_size for name in NEEDED if name.startswith("model-"))
    assert [each[0] for each in downloads] == sorted(each[0] for each in downloads)
    assert {each[1:3] for each in downloads} == {(total, "bytes")}
    assert downloads[-1][0] == total
    assert downloads[-1][3].startswith("10 of 10 files, ")
    source = json.loads((library.resolve(REPO).root / SOURCE_FILE).read_text())
    assert source["commit"] == server.repos[REPO].commits[0][0]
    assert source["license"] == "apache-2.0"


def test_download_is_found_by_the_client_itself(library):
    make(library)
    cached = huggingface_hub.hf_hub_download(
        REPO, "config.json", local_files_only=True, cache_dir=constants.HF_HUB_CACHE
    )
    assert Path(cached).parent == library.resolve(REPO).checkpoint_dir
    found = huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE)
    assert found.warnings == []
    ((repo,),) = ([*found.repos],)
    assert (repo.repo_id, repo.refs.keys()) == (REPO, {"main"})


def test_prepare_again_asks_the_hub_nothing(library, server):
    make(library)
    before = len(server.requests)
    make(library)
    constants.HF_HUB_OFFLINE = True
    prepare(library.resolve(REPO), Precision.INT4, on_progress=ignore)
    assert len(server.requests) == before


def test_files_that_the_client_has_are_not_fetched_again(library, server, published, whole):
    huggingface_hub.hf_hub_download(
        REPO, SHARD, cache_dir=constants.HF_HUB_CACHE, endpoint=server.endpoint
    )
    num_before = len(server.bodies(SHARD))
    make(library)
    assert len(server.bodies(SHARD)) == num_before
    check_finished(library, published, whole)
    assert library.remove(REPO) > 0
    assert (Path(constants.HF_HUB_CACHE) / "models--owner--tiny").is_dir()


def test_remove_and_prepare_again_starts_from_nothing(library, server, published, whole):
    make(library)
    assert library.remove(REPO) == pytest.approx(
        sum((published / name).stat().st_size for name in NEEDED) + 300_000, rel=0.5
    )
    assert not (Path(constants.HF_HUB_CACHE) / "models--owner--tiny").exists()
    make(library)
    assert len(server.bodies(SHARD)) == 2
    check_finished(library, published, whole)


def test_drop_download_leaves_a_ready_model_and_another_precision_downloads_again(
    library, server, published, whole
):
    assert library.drop_download(REPO) == 0
    make(library)
    weights = sum((published / name).stat().st_size for name in NEEDED)
    assert library.drop_download(REPO) == weights
    assert library.resolve(REPO).is_ready(Precision.NESTED)
    before = len(server.requests)
    make(library)
    assert len(server.requests) == before
    assert describe(library.resolve(REPO), DescribeModel(request_id="r", model=REPO)).num_experts
    assert len(server.requests) == before
    prepare(library.resolve(REPO), Precision.INT4, on_progress=ignore, patience=SHORT)
    assert len(server.bodies(SHARD)) == 2


def test_worker_describes_plans_and_prepares_a_hub_model(library, tmp_path, monkeypatch):
    (tmp_path / REPO).mkdir(parents=True)
    (tmp_path / REPO / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    stream = io.StringIO()
    worker = Worker(library, EventWriter(stream))
    requests = (
        PlanModel(request_id="plan", model=REPO),
        DescribeModel(request_id="describe", model=REPO),
        DescribeModel(request_id="none", model="owner/none"),
        PrepareModel(request_id="prepare", model=REPO),
    )
    lines = "".join(wire.encode(request) + "\n" for request in requests)
    worker.read_requests(io.StringIO(lines))
    worker.run()
    told = [wire.decode(line) for line in stream.getvalue().splitlines()]
    described = next(event for event in told if isinstance(event, ModelDescribed))
    assert described.num_experts == 8
    assert f"./{REPO}" in described.notes[0]
    assert any(isinstance(event, PlanMade) for event in told)
    (failed,) = (event for event in told if isinstance(event, RequestFailed))
    assert (failed.request_id, failed.code) == ("none", "UnknownModelError")
    assert any(isinstance(event, Notice) and f"./{REPO}" in event.text for event in told)
    assert isinstance(told[-1], PrepareDone)


def test_single_file_model_is_fetched_and_described_by_its_header(
    library, server, tmp_path, monkeypatch
):
    folder = tiny_models.save_tiny("mixtral", tmp_path / "single")
    tiny_models.tiny_tokenizer(folder)
    server.add("owner/single", folder)
    made = describe(library.resolve("owner/single"), DescribeModel(request_id="r", model="m"))
    assert (made.refusal, made.num_experts, made.num_layers) == ("", 4, 2)
    assert server.bodies("model.safetensors") == ["bytes=0-100000"]
    make(library, "owner/single")
    assert library.resolve("owner/single").is_ready(Precision.NESTED)


def test_revision_is_a_model_of_its_own(library, server, published, tmp_path):
    first = server.repos[REPO].commits[0][0]
    changed = dict(server.repos[REPO].commits[0][1])
    changed["chat_template.jinja"] = b"{{ 'other' }}"
    server.repos[REPO].push(changed)
    make(library)
    make(library, f"{REPO}@{first}")
    for name, text in ((REPO, b"{{ 'other' }}"), (f"{REPO}@{first}", None)):
        template = library.resolve(name).backbone_dir / "chat_template.jinja"
        assert template.read_bytes() == (text or (published / template.name).read_bytes())
    assert len(server.bodies(SHARD)) == 1
    assert {home.name for home in library.installed()} == {REPO, f"{REPO}@{first}"}


# -- the fault matrix ---------------------------------------------------------------------


@pytest.mark.parametrize("name", TOLD_FAULTS)
def test_fault_in_a_file_is_told_and_the_second_try_finishes(
    name, library, server, published, whole
):
    case = TOLD_FAULTS[name]
    server.faults[SHARD] = list(case.faults)
    with pytest.raises(case.kind) as caught:
        make(library, patience=patience_with(name))
    assert case.words in str(caught.value)
    assert caught.value.hint
    assert not server.faults[SHARD]
    assert not library.resolve(REPO).ready_precisions
    make(library)
    check_finished(library, published, whole)


@pytest.mark.parametrize("name", PASSING_FAULTS)
def test_fault_that_passes_is_not_told(name, library, server, published, whole):
    server.faults[SHARD] = list(PASSING_FAULTS[name])
    make(library, patience=patience_with(name))
    assert not server.faults[SHARD]
    check_finished(library, published, whole)


def test_cut_file_goes_on_where_it_was_cut(library, server, published):
    server.faults[SHARD] = [hub_server.cut(0.5)]
    make(library)
    half = (published / SHARD).stat().st_size // 2
    first, second = server.bodies(SHARD)
    assert first == ""
    assert half - 65_536 <= int(second.removeprefix("bytes=").removesuffix("-")) <= half


def test_information_that_fails_for_a_moment_is_asked_again(library, server, published, whole):
    server.faults["api"] = [hub_server.status(500)]
    make(library)
    check_finished(library, published, whole)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (hub_server.status(503), HubBusyError, "out of order"),
        (hub_server.status(429, Retry_After="30"), HubBusyError, "in 30 seconds"),
        (hub_server.empty, HubUnreachableError, "cannot be read"),
    ],
)
def test_information_that_keeps_failing_is_told(fault, kind, words, library, server):
    server.faults["api"] = [fault] * 2
    with pytest.raises(kind, match=words):
        make(library)


def test_no_network_is_told(library, server, monkeypatch):
    server.close()
    with pytest.raises(HubUnreachableError, match="no connection") as caught:
        make(library)
    assert "HF_ENDPOINT" in caught.value.hint
    assert not (library.models_dir / "owner--tiny").exists()


def test_offline_mode_is_told_and_a_complete_cache_will_do(
    library, server, published, whole, monkeypatch
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnreachableError, match="offline mode") as caught:
        make(library)
    assert "HF_HUB_OFFLINE" in caught.value.hint
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in sorted(NEEDED):
        huggingface_hub.hf_hub_download(
            REPO, name, cache_dir=constants.HF_HUB_CACHE, endpoint=server.endpoint
        )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    make(library)
    assert hashes(library.resolve(REPO)) == whole
    assert [home.name for home in library.installed()] == [REPO]


@pytest.mark.parametrize(
    ("model", "gate", "token", "kind", "words"),
    [
        ("owner/none", "", None, UnknownModelError, "no public repository owner/none"),
        ("owner/none", "", hub_server.TOKEN, UnknownModelError, "no repository owner/none"),
        (REPO, "private", None, UnknownModelError, "private"),
        (f"{REPO}@v9", "", None, UnknownModelError, "no revision 'v9'"),
        (REPO, "token", None, HubAccessError, "there is no token"),
        (REPO, "licence", hub_server.TOKEN, HubAccessError, "licence is not accepted"),
        (REPO, "", "hf_anotherToken", HubAccessError, "does not know your token"),
        ("owner/--x", "", None, UnknownModelError, "no name of a repository"),
    ],
)
def test_refusal_says_what_to_do_and_no_token(
    model, gate, token, kind, words, library, server, published, monkeypatch, caplog
):
    server.repos[REPO].gate = gate
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(kind) as caught:
        make(library, model)
    assert words in str(caught.value)
    if gate in ("token", "licence"):
        assert f"{server.endpoint}/{REPO}" in caught.value.hint
    assert "hf_" not in str(caught.value) + caplog.text
    assert not list(library.models_dir.glob("*/*"))


def test_gated_model_with_a_token_is_fetched_and_the_token_stays_with_the_hub(
    library, server, published, whole, monkeypatch, caplog
):
    server.repos[REPO].gate = "token"
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    make(library)
    check_finished(library, published, whole)
    assert server.leaked == []
    assert "hf_" not in caplog.text
    assert "hf_" not in (library.resolve(REPO).root / SOURCE_FILE).read_text()


@pytest.mark.parametrize(
    ("drop", "kind", "words"),
    [
        ([SHARD], CheckpointError, f"lacks {SHARD}"),
        (["model-", "model.safetensors.index.json"], UnsupportedModelError, "GGUF and pickled"),
        (["tokenizer"], CheckpointError, "no tokenizer"),
        (["chat_template", "tokenizer_config"], UnsupportedModelError, "template"),
        (["config.json"], UnknownModelError, "no config.json"),
    ],
)
def test_repository_that_lacks_files_is_refused_before_the_first_weight(
    drop, kind, words, library, server
):
    repo = server.repos[REPO]
    files = repo.commits[-1][1]
    repo.push({n: d for n, d in files.items() if not n.startswith(tuple(drop))})
    with pytest.raises(kind, match=words):
        make(library)
    assert not server.bodies(SHARD)


def test_names_that_lead_out_of_the_snapshot_are_left_alone(library, server, tmp_path):
    repo = server.repos[REPO]
    names = ("additional_chat_templates/../../../../../../evil.jinja", "../../../../evil.json")
    index = json.loads(repo.commits[-1][1]["model.safetensors.index.json"])
    index["weight_map"]["lm_head.weight"] = names[1]
    files = {"model.safetensors.index.json": json.dumps(index).encode()}
    repo.push({**repo.commits[-1][1], **files, **dict.fromkeys(names, b"evil " * 9000)})
    with pytest.raises(CheckpointError, match=r"lacks \.\./.*evil"):
        make(library)
    assert not list(tmp_path.rglob("evil*"))


def test_index_damaged_is_refused(library, server):
    repo = server.repos[REPO]
    repo.push({**repo.commits[-1][1], "model.safetensors.index.json": b"{}"})
    with pytest.raises(CheckpointError, match="index"):
        make(library)


def test_branch_that_moves_meanwhile_does_not_mix_two_commits(library, server, published, whole):
    repo = server.repos[REPO]
    server.faults[SHARD] = [hub_server.status(503)] * 2
    with pytest.raises(HubBusyError):
        make(library)
    repo.push({**repo.commits[0][1], SHARD: b"other weights " * 3000})
    make(library)
    check_finished(library, published, whole)


def test_commit_that_was_taken_back_is_replaced_by_what_the_branch_names(
    library, server, published, whole
):
    repo = server.repos[REPO]
    server.faults[SHARD] = [hub_server.status(503)] * 2
    with pytest.raises(HubBusyError):
        make(library)
    files = repo.commits.pop()[1]
    commit = repo.push({**files, "note.txt": b"again"})
    make(library)
    assert library.resolve(REPO).checkpoint_dir.name == commit
    check_finished(library, published, whole)


def test_blob_of_wrong_contents_in_the_cache_is_fetched_anew(library, server, published, whole):
    server.faults["model-00009-of-00010.safetensors"] = [hub_server.status(503)] * 2
    one_by_one = replace(SHORT, num_parallel=1)
    with pytest.raises(HubBusyError):
        make(library, patience=one_by_one)
    repo_dir = hub.cached_repo_dir(REPO)
    damaged = next((repo_dir / "snapshots").glob(f"*/{SHARD}"), None)
    assert damaged is not None
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.resolve().write_bytes(bytes(data))
    make(library)
    check_finished(library, published, whole)


def test_snapshot_damaged_after_the_download_is_mended_by_the_next_try(library, published, whole):
    make(library)
    shard = library.resolve(REPO).checkpoint_dir / SHARD
    shard.resolve().write_bytes(shard.read_bytes()[:-7])
    home = library.resolve(REPO)
    with pytest.raises(CheckpointError, match="truncated") as caught:
        prepare(home, Precision.INT4, on_progress=ignore, patience=SHORT)
    assert "Run it again" in caught.value.hint
    prepare(home, Precision.INT4, on_progress=ignore, patience=SHORT)
    assert home.is_ready(Precision.INT4)


def test_no_room_is_said_before_a_weight_is_fetched(library, server, monkeypatch):
    free = writing.free_bytes
    monkeypatch.setattr(writing, "free_bytes", lambda path: 1_000_000)
    with pytest.raises(
        DiskSpaceError, match=r"owner/tiny with .* needs .*\(1000000 bytes\)"
    ) as caught:
        make(library)
    assert "HF_HOME" in caught.value.hint
    assert not server.bodies(SHARD)
    monkeypatch.setattr(writing, "free_bytes", free)
    make(library)

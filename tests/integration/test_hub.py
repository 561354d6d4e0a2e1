"""Models of the hub against a server that speaks its protocol, with every fault it can have.

The rule of each fault: the first try ends in a sentence a person can act on, and the
second one finishes with the same bytes as a run without faults.
"""

import io
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import hub_server
import huggingface_hub
import pytest
import tiny_models
from hub_scenes import (
    NEEDED,
    PASSING_FAULTS,
    REPO,
    SHARD,
    SHARDS,
    SHORT,
    TOLD_FAULTS,
    forking_child,
    hashes,
    patience_with,
)
from huggingface_hub import constants
from mira_engine import wire
from mira_engine.checkpoint import hub, hub_download, writing
from mira_engine.checkpoint.hub import Patience
from mira_engine.checkpoint.preflight import SPARE_BYTES
from mira_engine.errors import (
    CancelledError,
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
from mira_engine.planning import plan_model
from mira_engine.prepare import prepare
from mira_engine.types import Precision
from mira_engine.worker import EventWriter, Worker

CHILD = Path(__file__).parent / "hub_child.py"


def ignore(*args):
    """Takes progress and drops it."""


@pytest.fixture
def server(hub_with_model):
    return hub_with_model


@pytest.fixture
def library(hub_library):
    return hub_library


def make(library, name=REPO, *, on_progress=ignore, patience=SHORT, **fields):
    prepare(
        library.resolve(name),
        Precision.NESTED,
        on_progress=on_progress,
        patience=patience,
        **fields,
    )


def check_finished(library, published, whole, name=REPO):
    """The model is ready, made of exactly the published bytes, and nothing else was fetched."""
    home = library.resolve(name)
    assert home.is_ready(Precision.NESTED)
    assert {path.name for path in home.checkpoint_dir.iterdir()} == NEEDED
    for file in NEEDED:
        assert (home.checkpoint_dir / file).read_bytes() == (published / file).read_bytes()
    assert not list(home.checkpoint_dir.parent.parent.rglob(f"*{hub_download.PARTIAL_SUFFIX}"))
    assert hashes(home) == whole


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
    worker._cancelled_ids.clear()
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
    with pytest.raises(HubBusyError):
        make(library)
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


# -- cancelled and killed -----------------------------------------------------------------


def test_cancel_during_a_stall_ends_at_once_and_keeps_what_came(library, server, published, whole):
    server.faults[SHARD] = [hub_server.stall(0.5)]
    before = threading.active_count()
    patience = Patience(read_timeout_s=60, first_wait_s=60)
    cancelled_at = []

    def is_cancelled():
        if server.stalled.is_set() and not cancelled_at:
            cancelled_at.append(time.monotonic())
        return bool(cancelled_at)

    with pytest.raises(CancelledError):
        prepare(
            library.resolve(REPO), Precision.NESTED,
            on_progress=ignore, is_cancelled=is_cancelled, patience=patience,
        )  # fmt: skip
    assert time.monotonic() - cancelled_at[0] < 30
    left = [each for each in threading.enumerate() if each.name.startswith("mira-hub")]
    for thread in left:
        thread.join(timeout=60.0)  # Told to end; how soon it does is the scheduler's.
    assert not any(thread.is_alive() for thread in left), before
    partials = list(hub.cached_repo_dir(REPO).rglob(f"*{hub_download.PARTIAL_SUFFIX}"))
    assert sum(path.stat().st_size for path in partials) > 0
    make(library)
    assert server.bodies(SHARD)[-1].startswith("bytes=")
    check_finished(library, published, whole)


def test_cancel_while_the_hub_does_not_answer_ends_at_once(library, server):
    server.faults["api"] = [hub_server.stall(0)]
    started = []

    def is_cancelled():
        started.append(server.stalled.is_set())
        return started[-1]

    with pytest.raises(CancelledError):
        make(library, is_cancelled=is_cancelled)


@pytest.fixture
def child(server, tmp_path):
    with forking_child(CHILD, server, tmp_path) as process:
        yield process


def start(child, data_dir, stop_at=-1):
    child.stdin.write(f"{data_dir} {REPO} {stop_at}\n")
    child.stdin.flush()
    word, pid = child.stdout.readline().split()
    assert word == "pid"
    return int(pid)


def kill(child, pid):
    os.kill(pid, signal.SIGKILL)
    assert child.stdout.readline().split() == ["ended", str(-signal.SIGKILL)]


def test_killed_at_ten_moments_and_run_again_ends_with_the_same_bytes(
    child, server, library, published, whole, tmp_path
):
    moments = random.Random(6)
    shards = SHARDS
    num_converted = 16
    data_dir, repo_dir = tmp_path / "data", hub.cached_repo_dir(REPO)
    for _ in range(5):
        server.stalled.clear()
        missing = [
            name
            for name in shards
            if not (
                repo_dir / "blobs" / hub_server.etag_of((published / name).read_bytes())
            ).exists()
        ]
        passes = moments.choice(missing)
        for name in missing:
            if name != passes:
                server.faults[name] = [hub_server.stall(moments.random())]
        pid = start(child, data_dir)
        assert server.stalled.wait(60)
        kill(child, pid)
        server.released.set()
        server.released = threading.Event()
        server.faults.clear()
        assert not library.resolve(REPO).ready_precisions
        for path in repo_dir.glob("snapshots/*/model-*"):
            assert path.read_bytes() == (published / path.name).read_bytes()
    for _ in range(5):
        pid = start(child, data_dir, moments.randrange(num_converted))
        assert child.stdout.readline() == "stopped\n"
        kill(child, pid)
        assert not library.resolve(REPO).ready_precisions
    start(child, data_dir)
    assert child.stdout.readline() == "done\n"
    assert child.stdout.readline() == "ended 0\n"
    check_finished(library, published, whole)


# -- described before the download --------------------------------------------------------


def test_describe_fetches_no_weight_and_tells_what_prepare_then_takes(library, server, published):
    made = describe(library.resolve(REPO), DescribeModel(request_id="r", model=REPO))
    assert not server.bodies(SHARD)
    assert (made.family, made.license, made.refusal) == ("qwen3_moe", "apache-2.0", "")
    assert (made.num_layers, made.num_experts, made.top_k) == (2, 8, 2)
    assert made.num_active_parameters < made.num_parameters
    assert made.download_bytes == sum((published / name).stat().st_size for name in NEEDED)
    small = sum((published / name).stat().st_size for name in NEEDED if "model-" not in name)
    assert made.cached_bytes == small
    sizes = {size.precision: size for size in made.sizes}
    make(library)
    home = library.resolve(REPO)
    prepared = sum(
        path.stat().st_size for path in home.root.rglob("*") if path.suffix == ".safetensors"
    )
    assert sizes[Precision.NESTED].prepared_bytes == pytest.approx(prepared, rel=0.02)
    peak = sizes[Precision.NESTED].peak_bytes - SPARE_BYTES
    assert peak == pytest.approx(library.disk_bytes(REPO), rel=0.02)
    again = describe(home, DescribeModel(request_id="r", model=REPO))
    assert (again.num_parameters, again.sizes) == (made.num_parameters, made.sizes)


def test_describe_then_plan_needs_no_weight(library, server, tmp_path):
    describe(library.resolve(REPO), DescribeModel(request_id="r", model=REPO))
    made = plan_model(
        library.resolve(REPO),
        PlanModel(request_id="r", model=REPO),
        data_dir=tmp_path,
        cache_dir=None,
    )
    assert any(each.is_chosen for each in made.alternatives)
    assert not server.bodies(SHARD)
    assert library.installed() == []


def test_describe_model_that_cannot_run_gives_the_reason_and_its_figures(library, server, tmp_path):
    config = tiny_models.tiny_config("gpt_oss")
    config.architectures = ["GptOssForCausalLM"]
    config.quantization_config = {"quant_method": "awq"}
    folder = tmp_path / "quantised"
    config.save_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-1.safetensors"}})
    )
    (folder / "model-1.safetensors").write_bytes(bytes(30_000))
    server.add("owner/quantised", folder)
    made = describe(library.resolve("owner/quantised"), DescribeModel(request_id="r", model="m"))
    assert "awq" in made.refusal
    assert made.hint
    assert made.num_experts == 4
    with pytest.raises(UnsupportedModelError, match="awq"):
        make(library, "owner/quantised")
    assert not server.bodies("model-1.safetensors")


def test_describe_model_with_code_of_its_own_gives_the_reason(library, server, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    fields = {"model_type": "own_moe", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "configuration_own.py").write_text("raise SystemExit('remote code ran')")
    (folder / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    server.add("owner/own", folder)
    made = describe(library.resolve("owner/own"), DescribeModel(request_id="r", model="m"))
    assert "code from its own repository" in made.refusal
    assert made.num_parameters == 0


def test_describe_folder_and_builtin_need_no_hub(library, server, published):
    folder = describe(library.resolve(str(published)), DescribeModel(request_id="r", model="m"))
    builtin = describe(library.resolve("builtin"), DescribeModel(request_id="r", model="m"))
    assert (folder.refusal, folder.num_experts, folder.download_bytes) == ("", 8, 0)
    assert (builtin.refusal, builtin.num_experts) == ("", 16)
    assert builtin.download_bytes > 90_000_000
    assert server.requests == []

"""The disk while a model of the hub is prepared: what is promised, what is deleted, and when.

Whatever is deleted and whenever the process dies, the model that comes of it has the bytes
of one that was made of a folder.
"""

import json
import random
import signal
from pathlib import Path

import hub_server
import huggingface_hub
import pytest
import tiny_models
import torch
from chosen_codes import FakeChooser, write_chosen
from disk_meter import DiskMeter, before_each_fall
from hub_scenes import (
    REPO,
    SHARD,
    SHARDS,
    SHORT,
    TOLD_FAULTS,
    forking_child,
    hashes,
    whole_bodies,
)
from huggingface_hub import constants
from mira_engine.checkpoint import gptq_store, hub, writing
from mira_engine.checkpoint.convert import checkpoint_revision, planned_manifest
from mira_engine.checkpoint.experts import CheckpointExperts
from mira_engine.checkpoint.hub_home import folder_figures
from mira_engine.checkpoint.outline import OUTLINE_FILE
from mira_engine.checkpoint.preflight import SPARE_BYTES
from mira_engine.errors import CancelledError, CheckpointError, DiskSpaceError
from mira_engine.events import DescribeModel
from mira_engine.library import ModelLibrary
from mira_engine.model_report import describe
from mira_engine.prepare import prepare
from mira_engine.types import Precision, Rounding
from transformers import AutoModelForCausalLM

CHILD = Path(__file__).parent / "moments_child.py"


@pytest.fixture
def server(hub_with_model):
    return hub_with_model


@pytest.fixture
def library(hub_library):
    return hub_library


def make(library, name=REPO, *, precision=Precision.NESTED, is_deleted=True, **fields):
    """Prepares a model; returns the notes, by their code."""
    notes = {}
    on_note = fields.pop("on_note", lambda code, text: None)

    def take(code, text):
        notes[code] = text
        on_note(code, text)

    fields = {"on_progress": lambda *args: None, "patience": SHORT} | fields
    home = library.resolve(name)
    prepare(home, precision, is_download_deleted=is_deleted, on_note=take, **fields)
    return notes


@pytest.fixture
def cached(server):
    """Names of the shards that are in the client's cache."""
    files = server.repos[REPO].commits[0][1]
    etags = {name: hub_server.etag_of(files[name]) for name in SHARDS}

    def names():
        blobs = hub.cached_repo_dir(REPO) / "blobs"
        return {name for name, etag in etags.items() if (blobs / etag).exists()}

    return names


# -- what is promised ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """Files that dwarf what a file system adds to each: 27 MB in shards of 4 MB."""
    folder = tmp_path_factory.mktemp("larger") / "larger"
    config = tiny_models.tiny_config("qwen3_moe", has_windows=False)
    config.hidden_size, config.moe_intermediate_size = 256, 128
    config.num_hidden_layers, config.num_experts, config.mlp_only_layers = 6, 16, []
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4MB")
    return tiny_models.tiny_tokenizer(folder)


@pytest.mark.parametrize(
    ("precision", "is_deleted"),
    [(Precision.NESTED, False), (Precision.NESTED, True), (Precision.INT8, True)],
)
def test_disk_holds_at_most_what_was_described(
    precision, is_deleted, library, server, larger, tmp_path
):
    server.add("owner/larger", larger)
    home = library.resolve("owner/larger")
    described = describe(home, DescribeModel(request_id="r", model="owner/larger"))
    (size,) = (each for each in described.sizes if each.precision is precision)
    assert size.peak_deleting_bytes < 0.75 * size.peak_bytes
    meter = DiskMeter(tmp_path / "data", tmp_path / "cache")
    with meter.watching():
        make(library, "owner/larger", precision=precision, is_deleted=is_deleted)
    promised = size.peak_deleting_bytes if is_deleted else size.peak_bytes
    assert meter.most_bytes == pytest.approx(promised - SPARE_BYTES, rel=0.02)


@pytest.mark.parametrize(
    ("is_deleted", "words"), [(False, "the download is kept"), (True, "is deleted as soon as")]
)
def test_space_is_told_before_the_first_weight(is_deleted, words, library, server):
    seen = []
    notes = make(
        library,
        is_deleted=is_deleted,
        on_note=lambda code, text: seen.append((code, whole_bodies(server, SHARD))),
    )
    assert seen == [("space", [])]
    assert words in notes["space"]


# -- what is deleted ----------------------------------------------------------------------


def test_deleted_download_leaves_the_bytes_of_a_folder_and_an_empty_cache(
    library, server, whole, tmp_path
):
    steps = []
    make(library, on_progress=lambda step, done, total, *rest: steps.append((step, done, total)))
    home = library.resolve(REPO)
    assert hashes(home) == whole
    assert not hub.cached_repo_dir(REPO).exists()
    for step in ("download", "backbone", "convert"):
        counts = [done for name, done, _ in steps if name == step]
        assert counts == sorted(counts)
        assert len({total for name, _, total in steps if name == step}) == 1
    assert all(len(whole_bodies(server, name)) == 1 for name in SHARDS)
    before = len(server.requests)
    make(library)
    described = describe(home, DescribeModel(request_id="r", model=REPO))
    assert (described.num_experts, len(server.requests)) == (8, before)


def test_deleted_download_never_has_more_shards_than_a_layer_takes(library, published, cached):
    seen = []
    with before_each_fall(lambda: seen.append(len(cached()))):
        make(library)
    first, second = folder_figures(published).layer_shards
    assert first & second, "no shard is needed for two layers"
    most = max(len(first), len(second))
    assert 0 < max(seen) <= most < len(SHARDS)


def test_delete_of_a_whole_download_asks_the_hub_nothing(library, server, whole):
    make(library, is_deleted=False)
    before = len(server.requests)
    constants.HF_HUB_OFFLINE = True
    make(library)
    assert hashes(library.resolve(REPO)) == whole
    assert not hub.cached_repo_dir(REPO).exists()
    assert len(server.requests) == before


def test_another_precision_after_deletion_downloads_the_experts_again(
    library, server, published, whole, cached
):
    make(library)
    make(library, precision=Precision.INT8)
    experts = frozenset().union(*folder_figures(published).layer_shards)
    assert 0 < len(experts) < len(SHARDS)
    num_bodies = {name: len(whole_bodies(server, name)) for name in SHARDS}
    assert num_bodies == {name: 2 if name in experts else 1 for name in SHARDS}
    home = library.resolve(REPO)
    assert {Precision.NESTED, Precision.INT8} <= set(home.ready_precisions)
    assert whole.items() <= hashes(home).items()
    assert not cached()


def test_delete_keeps_what_was_in_the_cache_before(library, server, whole, cached):
    huggingface_hub.hf_hub_download(
        REPO, SHARD, cache_dir=constants.HF_HUB_CACHE, endpoint=server.endpoint
    )
    assert "kept" in make(library)["download-kept"]
    assert hashes(library.resolve(REPO)) == whole
    assert cached() == set(SHARDS)


def test_delete_keeps_what_came_into_the_cache_after_an_earlier_deletion(library, server, cached):
    make(library)
    huggingface_hub.hf_hub_download(
        REPO, SHARD, cache_dir=constants.HF_HUB_CACHE, endpoint=server.endpoint
    )
    assert "download-kept" in make(library, precision=Precision.INT4)
    assert cached() == set(SHARDS)


def test_delete_keeps_a_snapshot_that_another_model_uses(library, server, cached):
    commit = server.repos[REPO].commits[0][0]
    make(library, is_deleted=False)
    make(library, f"{REPO}@{commit}", is_deleted=False)
    assert "download-kept" in make(library)
    assert "download-kept" in make(library, f"{REPO}@{commit}")
    assert cached() == set(SHARDS)


def test_delete_keeps_blobs_of_another_revision(library, server, published):
    repo = server.repos[REPO]
    first = repo.commits[0][0]
    repo.push({**repo.commits[0][1], "chat_template.jinja": b"{{ 'other' }}"})
    make(library, f"{REPO}@{first}", is_deleted=False)
    make(library)
    for name in SHARDS:
        kept = library.resolve(f"{REPO}@{first}").checkpoint_dir / name
        assert kept.read_bytes() == (published / name).read_bytes()


def test_delete_never_touches_a_folder(library, published, whole):
    before = {path: path.read_bytes() for path in published.iterdir()}
    make(library, str(published))
    assert {path: path.read_bytes() for path in published.iterdir()} == before
    assert hashes(library.resolve(str(published))) == whole


def test_delete_gives_a_chosen_draft_up_only_once_the_other_store_is_whole(library, whole):
    make(library, is_deleted=False)
    home = library.resolve(REPO)
    checkpoint = CheckpointExperts(home.checkpoint_dir)
    planned = planned_manifest(
        checkpoint, Precision.NESTED, source=home.title, revision=checkpoint_revision(checkpoint)
    )
    write_chosen(home, checkpoint, planned, FakeChooser(planned.group_size))
    gptq_store.put_in_place(home, Precision.NESTED)
    asked = []
    with pytest.raises(CancelledError):
        make(
            library,
            draft=Rounding.NEAREST,
            on_progress=lambda step, *rest: asked.append(step),
            is_cancelled=lambda: asked.count("convert") > 10,
        )
    assert home.is_ready(Precision.NESTED)
    assert home.store_dir(Precision.NESTED) == home.gptq_store_dir(Precision.NESTED)
    make(library, draft=Rounding.NEAREST)
    assert not home.gptq_store_dir(Precision.NESTED).exists()
    assert hashes(home) == whole
    assert not hub.cached_repo_dir(REPO).exists()


# -- a disk that is too small -------------------------------------------------------------


@pytest.fixture
def free(monkeypatch):
    """Sets the free bytes that preparation sees."""
    return lambda num_bytes: monkeypatch.setattr(writing, "free_bytes", lambda path: num_bytes)


def test_disk_without_room_to_keep_deletes_of_itself_and_says_so(library, whole, free):
    described = describe(library.resolve(REPO), DescribeModel(request_id="r", model=REPO))
    (size,) = (each for each in described.sizes if each.precision is Precision.NESTED)
    free((size.peak_bytes + size.peak_deleting_bytes) // 2)
    notes = make(library, is_deleted=None)
    assert "no room to keep" in notes["download-deleted"]
    assert hashes(library.resolve(REPO)) == whole
    assert not hub.cached_repo_dir(REPO).exists()


def test_disk_with_room_keeps_of_itself(library, cached):
    notes = make(library, is_deleted=None)
    assert notes.keys() == {"space"}
    assert cached() == set(SHARDS)


def test_disk_without_room_to_keep_names_the_option_where_keeping_was_asked_for(
    library, server, free
):
    free(17_000_000)
    with pytest.raises(DiskSpaceError, match="17000000 bytes") as caught:
        make(library, is_deleted=False)
    assert "--delete-download, which needs" in caught.value.hint
    assert "HF_HOME" in caught.value.hint
    assert not server.bodies(SHARD)


@pytest.mark.parametrize("is_deleted", [None, True])
def test_disk_without_room_either_way_is_told_before_a_weight_is_asked_for(
    is_deleted, library, server, free
):
    free(1_000_000)
    with pytest.raises(DiskSpaceError, match="even with --delete-download, needs"):
        make(library, is_deleted=is_deleted)
    assert not server.bodies(SHARD)


def test_disk_without_room_beside_a_whole_download_names_the_option_or_deletes_of_itself(
    library, published, whole, free, cached
):
    make(library, is_deleted=False)
    figures = folder_figures(published)
    made = figures.store_bytes(Precision.INT8) + figures.store_bytes(Precision.INT4)
    free(SPARE_BYTES + 3 * made // 4)
    with pytest.raises(DiskSpaceError) as caught:
        make(library, precision=Precision.INT8, is_deleted=False)
    assert "give --delete-download" in caught.value.hint
    assert cached() == set(SHARDS)
    assert "download-deleted" in make(library, precision=Precision.INT8, is_deleted=None)
    assert library.resolve(REPO).is_ready(Precision.INT8)
    assert not cached()


def test_ready_model_whose_run_was_killed_at_its_end_is_tidied_without_a_hub(library, server):
    outlines = []
    home = library.resolve(REPO)

    def keep():
        path = home.root / OUTLINE_FILE
        outlines.extend([path.read_text()] if path.exists() else [])

    with before_each_fall(keep):
        make(library)
    left = library.resolve(REPO).checkpoint_dir / "config.json"
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    (home.root / OUTLINE_FILE).write_text(outlines[-1])
    before = len(server.requests)
    make(library)
    assert not left.exists()
    assert not (home.root / OUTLINE_FILE).exists()
    assert len(server.requests) == before


# -- faults, cancelled, killed ------------------------------------------------------------


@pytest.mark.parametrize("name", ["cut", "wrong bytes"])
def test_fault_while_shards_are_deleted_is_told_and_the_second_try_goes_on(
    name, library, server, whole
):
    case = TOLD_FAULTS[name]

    def plant(code, text):
        server.faults[SHARD] = list(case.faults)

    with pytest.raises(case.kind, match=case.words):
        make(library, on_note=plant)
    assert not server.faults[SHARD]
    used_up = [name for name in SHARDS if name < SHARD and name not in _here(library)]
    make(library)
    assert hashes(library.resolve(REPO)) == whole
    assert all(len(whole_bodies(server, each)) == 1 for each in used_up)


def _here(library):
    return {path.name for path in library.resolve(REPO).checkpoint_dir.glob("model-*.safetensors")}


@pytest.mark.parametrize("after", [12, 24, 34])
def test_cancelled_while_shards_are_deleted_goes_on_without_being_told_to(
    after, library, server, whole
):
    asked = []

    def count(step, *rest):
        if step != "download":
            asked.append(step)

    with pytest.raises(CancelledError):
        make(library, on_progress=count, is_cancelled=lambda: len(asked) >= after)
    make(library, is_deleted=None)
    assert hashes(library.resolve(REPO)) == whole
    assert not hub.cached_repo_dir(REPO).exists()
    assert all(len(whole_bodies(server, name)) == 1 for name in SHARDS)


def test_run_begun_with_deletion_may_be_ended_keeping_the_rest(library, whole, cached):
    asked = []
    with pytest.raises(CancelledError):
        make(
            library,
            on_progress=lambda step, *rest: asked.append(step),
            is_cancelled=lambda: asked.count("convert") > 10,
        )
    notes = make(library, is_deleted=False)
    assert "the download is kept" in notes["space"]
    assert hashes(library.resolve(REPO)) == whole
    assert cached()
    assert not (library.resolve(REPO).root / OUTLINE_FILE).exists()


def test_shard_that_is_another_than_the_hub_said_is_refused_and_the_next_try_finishes(
    library, whole
):
    path = library.resolve(REPO).root / OUTLINE_FILE
    with pytest.raises(CancelledError):
        make(library, is_cancelled=path.exists)
    outline = json.loads(path.read_text())
    outline["shards"][SHARD]["sample_sha256"] = "0" * 64
    path.write_text(json.dumps(outline))
    with pytest.raises(CheckpointError, match=f"{SHARD} is not the file"):
        make(library)
    make(library)
    assert hashes(library.resolve(REPO)) == whole


@pytest.fixture
def child(server, library, tmp_path):
    with forking_child(CHILD, server, tmp_path) as process:
        yield process


def run(child, data_dir, kill_at=0):
    """Returns what one preparation said, and how it ended."""
    child.stdin.write(f"{data_dir} {REPO} {kill_at}\n")
    child.stdin.flush()
    lines = [child.stdout.readline().split()]
    while lines[-1][0] != "ended":
        lines.append(child.stdout.readline().split())
    return lines[:-1], int(lines[-1][1])


def test_killed_at_ten_moments_while_shards_are_deleted_ends_with_the_same_bytes(
    child, server, library, published, whole, tmp_path
):
    ((word, num_moments),), status = run(child, tmp_path / "undisturbed")
    assert (word, status) == ("done", 0)
    assert hashes(ModelLibrary(tmp_path / "undisturbed").resolve(REPO)) == whole
    server.requests.clear()
    moments, killed, was_here, gone = random.Random(8), 0, set(), set()
    while killed < 10:
        said, status = run(child, tmp_path / "data", moments.randint(4, int(num_moments) // 10))
        assert (said, status) == ([], -signal.SIGKILL)
        killed += 1
        home = library.resolve(REPO)
        assert not home.is_ready(Precision.NESTED)
        here = _here(library)
        for name in here:
            path = home.checkpoint_dir / name
            assert not path.exists() or path.read_bytes() == (published / name).read_bytes()
        was_here |= here
        gone |= was_here - here
    assert gone, "no run came to the first deletion"
    ((word, _),), status = run(child, tmp_path / "data")
    assert (word, status) == ("done", 0)
    assert hashes(library.resolve(REPO)) == whole
    assert not hub.cached_repo_dir(REPO).exists()
    assert {name: len(whole_bodies(server, name)) for name in SHARDS} == dict.fromkeys(SHARDS, 1)

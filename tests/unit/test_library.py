"""Names to homes; torch stays out."""

import json
import os
import subprocess
import sys

import filelock
import pytest
from mira_engine.checkpoint import hub_cache
from mira_engine.checkpoint.files import BACKBONE_MARKER, LOCK_FILE, MANIFEST_FILE
from mira_engine.errors import PrepareError, UnknownModelError
from mira_engine.library import SOURCE_FILE, ModelLibrary
from mira_engine.types import Precision


def make_ready(home, *precisions):
    home.backbone_dir.mkdir(parents=True, exist_ok=True)
    (home.backbone_dir / BACKBONE_MARKER).write_text("{}")
    for precision in precisions:
        home.store_dir(precision).mkdir(parents=True, exist_ok=True)
        (home.store_dir(precision) / MANIFEST_FILE).write_text("{}")
    if not home.is_builtin:
        (home.root / SOURCE_FILE).write_text(json.dumps({"folder": home.name}))


@pytest.fixture
def library(tmp_path):
    return ModelLibrary(tmp_path / "data")


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "Some-MoE"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_resolve_builtin_lives_under_the_data_folder(library, tmp_path):
    home = library.resolve("builtin")
    assert home.is_builtin
    assert home.checkpoint_dir == tmp_path / "data" / "models" / "builtin" / "checkpoint"


def test_resolve_folder_uses_its_real_path(library, model_folder, monkeypatch):
    home = library.resolve(str(model_folder))
    monkeypatch.chdir(model_folder.parent)
    assert library.resolve("Some-MoE") == home
    assert library.resolve(home.name) == home
    assert home.checkpoint_dir == model_folder.resolve()
    assert home.root.name.startswith("Some-MoE-")
    assert len(home.root.name) == len("Some-MoE-") + 8


def test_resolve_two_folders_of_one_name_get_two_homes(library, model_folder, tmp_path):
    other = tmp_path / "x" / "Some-MoE"
    other.mkdir(parents=True)
    (other / "config.json").write_text("{}")
    assert library.resolve(str(other)).root != library.resolve(str(model_folder)).root


@pytest.mark.parametrize("model", ["no-such-folder", "", "  "])
def test_resolve_unknown_says_what_can_be_given(library, model):
    with pytest.raises(UnknownModelError) as caught:
        library.resolve(model)
    assert "builtin" in caught.value.hint


def test_resolve_folder_without_config_says_so(library, tmp_path):
    with pytest.raises(UnknownModelError, match=r"no config\.json"):
        library.resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("precision", "needed"),
    [
        (Precision.NESTED, (Precision.NESTED,)),
        (Precision.INT4, (Precision.INT4,)),
        (Precision.INT8, (Precision.INT8, Precision.INT4)),
        (Precision.BF16, (Precision.BF16, Precision.INT4)),
        (Precision.FLOAT32, (Precision.FLOAT32, Precision.INT4)),
    ],
)
def test_is_ready_asks_for_backbone_and_every_needed_store(library, precision, needed):
    home = library.resolve("builtin")
    assert home.needed_precisions(precision) == needed
    assert not home.is_ready(precision)
    make_ready(home, *needed[:-1])
    assert not home.is_ready(precision)
    make_ready(home, *needed)
    assert home.is_ready(precision)
    (home.backbone_dir / BACKBONE_MARKER).unlink()
    assert not home.is_ready(precision)


def test_installed_lists_ready_models_builtin_first(library, model_folder):
    assert library.installed() == []
    folder_home = library.resolve(str(model_folder))
    make_ready(folder_home, Precision.NESTED)
    builtin = library.resolve("builtin")
    make_ready(builtin, Precision.INT8)
    assert library.installed() == [folder_home]
    make_ready(builtin, Precision.INT4)
    assert library.installed() == [builtin, folder_home]
    assert builtin.ready_precisions == (Precision.INT8, Precision.INT4)


def test_resolve_prepared_folder_whose_checkpoint_is_gone_is_found(library, model_folder):
    home = library.resolve(str(model_folder))
    make_ready(home, Precision.NESTED)
    (model_folder / "config.json").unlink()
    model_folder.rmdir()
    assert library.resolve(home.name) == home


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"folder": "/somewhere/else"}'])
def test_installed_passes_over_foreign_homes(library, text):
    root = library.models_dir / "foreign-01234567"
    root.mkdir(parents=True)
    (root / SOURCE_FILE).write_text(text)
    assert library.installed() == []


def test_import_loads_no_torch():
    code = "import sys, mira_engine.library; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- models of the hub --------------------------------------------------------------------

COMMIT = "0123456789" * 4


def make_cached(cache, repo_id, commit, blobs):
    """Writes a snapshot as the hub's client keeps it: name and contents of each blob."""
    repo = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir(exist_ok=True)
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / "main").write_text(commit)
    for name, data in blobs.items():
        blob = repo / "blobs" / data.decode()
        blob.write_bytes(data)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def make_hub_ready(library, name, snapshot, *, is_ours=True):
    home = library.resolve(name)
    make_ready(home, Precision.NESTED)
    fields = {"repo": home.repo_id, "revision": home.revision, "commit": snapshot.name}
    states = {"snapshot": str(snapshot), "is_ours": is_ours, "is_complete": True}
    (home.root / SOURCE_FILE).write_text(json.dumps(fields | states))
    return library.resolve(name)


@pytest.mark.parametrize(
    ("model", "repo_id", "revision"),
    [
        ("owner/some-moe", "owner/some-moe", None),
        ("owner/Some.MoE_1@v1.0", "owner/Some.MoE_1", "v1.0"),
        ("owner/moe@refs/pr/3", "owner/moe", "refs/pr/3"),
    ],
)
def test_resolve_owner_and_name_is_a_model_of_the_hub(library, model, repo_id, revision):
    home = library.resolve(model)
    assert (home.name, home.repo_id, home.revision) == (model, repo_id, revision)
    assert home.is_hub
    assert home.root.parent == library.models_dir
    assert home.root.name.startswith(repo_id.replace("/", "--"))
    assert not home.ready_precisions


def test_resolve_revisions_of_one_repository_get_their_own_homes(library):
    names = ("owner/moe", "owner/moe@a", "owner/moe@b", "other/moe")
    assert len({library.resolve(name).root for name in names}) == len(names)


def test_resolve_name_that_is_also_a_folder_means_the_hub_and_says_so(
    library, tmp_path, monkeypatch
):
    folder = tmp_path / "owner" / "moe"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    home = library.resolve("owner/moe")
    assert home.is_hub
    assert "./owner/moe" in home.note
    for path in ("./owner/moe", str(folder)):
        assert library.resolve(path).checkpoint_dir == folder
        assert not library.resolve(path).is_hub


@pytest.mark.parametrize("model", ["./owner/moe", "../owner/moe", "~/moe", "/owner/moe", "a/b/c"])
def test_resolve_path_is_never_a_model_of_the_hub(library, model):
    with pytest.raises(UnknownModelError):
        library.resolve(model)


def test_installed_lists_hub_models_by_name(library, tmp_path):
    for name in ("owner/moe", "owner/moe@v1"):
        make_hub_ready(library, name, make_cached(tmp_path / "c", "owner/moe", name[-2:], {}))
    assert {home.name for home in library.installed()} == {"owner/moe", "owner/moe@v1"}


def test_remove_hub_model_frees_its_home_and_the_blobs_that_only_it_uses(library, tmp_path):
    cache = tmp_path / "cache"
    first = make_cached(cache, "owner/moe", COMMIT, {"a": b"shared", "b": b"own" * 30})
    second = make_cached(cache, "owner/moe", COMMIT[::-1], {"a": b"shared"})
    partial = first.parent.parent / "blobs" / "x.mira-partial"
    partial.write_bytes(b"half")
    home = make_hub_ready(library, "owner/moe", first)
    made = sum(path.stat().st_size for path in home.root.rglob("*") if path.is_file())
    freed = library.disk_bytes("owner/moe")
    assert freed == made + 90 + 4
    assert library.remove("owner/moe") == freed
    assert not home.root.exists()
    assert not first.exists()
    assert (second / "a").read_bytes() == b"shared"
    assert [path.name for path in (first.parent.parent / "blobs").iterdir()] == ["shared"]
    assert library.remove("owner/moe") == 0


def test_remove_hub_model_that_was_in_the_cache_before_keeps_the_cache(library, tmp_path):
    snapshot = make_cached(tmp_path / "cache", "owner/moe", COMMIT, {"a": b"mine"})
    home = make_hub_ready(library, "owner/moe", snapshot, is_ours=False)
    library.remove("owner/moe")
    assert not home.root.exists()
    assert (snapshot / "a").read_bytes() == b"mine"


def test_remove_hub_model_whose_snapshot_another_home_uses_keeps_it(library, tmp_path):
    snapshot = make_cached(tmp_path / "cache", "owner/moe", COMMIT, {"a": b"both"})
    make_hub_ready(library, "owner/moe", snapshot)
    make_hub_ready(library, f"owner/moe@{COMMIT}", snapshot, is_ours=False)
    library.remove("owner/moe")
    assert (snapshot / "a").read_bytes() == b"both"


def test_remove_last_revision_takes_the_repository_out_of_the_cache(library, tmp_path):
    snapshot = make_cached(tmp_path / "cache", "owner/moe", COMMIT, {"a": b"all"})
    make_hub_ready(library, "owner/moe", snapshot)
    library.remove("owner/moe")
    assert list((tmp_path / "cache").iterdir()) == []


def test_drop_file_frees_a_blob_that_has_no_other_name(tmp_path):
    blobs = {"a": b"shared", "b": b"own", "c": b"twice", "d": b"twice"}
    first = make_cached(tmp_path, "owner/moe", COMMIT, blobs)
    second = make_cached(tmp_path, "owner/moe", COMMIT[::-1], {"a": b"shared"})
    freed = {name: hub_cache.drop_file(first, name) for name in ("a", "b", "c")}
    assert freed == {"a": 0, "b": 3, "c": 0}
    assert [path.name for path in first.iterdir()] == ["d"]
    assert (first / "d").read_bytes() == b"twice"
    assert (second / "a").read_bytes() == b"shared"
    assert hub_cache.drop_file(first, "d") == 5
    (first / "b").symlink_to("../../blobs/own")
    assert hub_cache.drop_file(first, "b") == 0
    assert list(first.iterdir()) == []


def test_link_replaces_what_a_killed_process_left(tmp_path):
    snapshot = make_cached(tmp_path, "owner/moe", COMMIT, {"a": b"bytes"})
    blob = (snapshot / "a").resolve()
    (snapshot / "a").rename(snapshot / "a.link")
    hub_cache.link(blob, snapshot / "a")
    assert [path.name for path in snapshot.iterdir()] == ["a"]
    assert hub_cache.drop_file(snapshot, "a") == 5


def test_drop_file_leaves_what_lies_outside_the_repository(tmp_path):
    snapshot = make_cached(tmp_path / "cache", "owner/moe", COMMIT, {})
    outside = tmp_path / "outside"
    outside.write_bytes(b"somebody's")
    (snapshot / "a").symlink_to(outside)
    assert hub_cache.drop_file(snapshot, "a") == 0
    assert outside.read_bytes() == b"somebody's"


def test_remove_folder_model_keeps_the_users_checkpoint(library, model_folder):
    home = library.resolve(str(model_folder))
    make_ready(home, Precision.NESTED)
    assert library.remove(str(model_folder)) > 0
    assert not home.root.exists()
    assert (model_folder / "config.json").read_text() == "{}"


def test_remove_while_it_is_prepared_is_refused(library, model_folder):
    home = library.resolve(str(model_folder))
    make_ready(home, Precision.NESTED)
    with (
        filelock.FileLock(home.root / LOCK_FILE),
        pytest.raises(PrepareError, match="being prepared"),
    ):
        library.remove(str(model_folder))
    assert home.is_ready(Precision.NESTED)


@pytest.mark.parametrize("text", ['{"repo": "../evil"}', '{"repo": 3}', '{"repo": "a/b"}'])
def test_installed_passes_over_homes_that_are_not_where_they_say(library, text):
    root = library.models_dir / "foreign"
    make_ready_root = root / "backbone"
    make_ready_root.mkdir(parents=True)
    (root / SOURCE_FILE).write_text(text)
    assert library.homes() == [library.resolve("builtin")]

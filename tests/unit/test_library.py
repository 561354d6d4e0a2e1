"""Names to homes; torch stays out."""

import json
import subprocess
import sys

import pytest
from mira_engine.checkpoint.files import BACKBONE_MARKER, MANIFEST_FILE
from mira_engine.errors import UnknownModelError
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


@pytest.mark.parametrize("model", ["org/some-model", "no-such-folder", "", "  "])
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

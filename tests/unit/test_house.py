"""The house rules: who imports whom, what is installed under which name, what starts cold.

The rules themselves stand in pyproject.toml; here they are run, and broken on purpose.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import grimp
import pytest

ROOTS = {
    "app": "mira_app",
    "engine": "mira_engine",
    "kernels": "mira_kernels",
    "assets": "mira_assets",
}

EFFECTS = {
    "time", "datetime", "random", "secrets", "uuid", "threading", "queue", "asyncio",
    "concurrent", "multiprocessing", "os", "sys", "io", "pathlib", "shutil", "tempfile",
    "socket", "subprocess", "logging", "sqlite3", "ctypes", "mmap", "signal",
}  # fmt: skip
"""Standard modules that a policy has no use for."""


def source_path(root: Path) -> str:
    return os.pathsep.join(str(root / folder) for folder in ROOTS)


def run_python(code: str, *, cwd: Path, path: str) -> str:
    """Runs `code` in a new interpreter and returns its last line of output."""
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [program, "--no-cache", "--config", root / "pyproject.toml"],
        cwd=root, env=os.environ | {"PYTHONPATH": source_path(root)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="session")
def copied_tree(repository, tmp_path_factory) -> Path:
    """A copy of what the package is built from."""
    root = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ROOTS:
        shutil.copytree(repository / folder, root / folder, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, root / name)
    return root


# -- who imports whom ---------------------------------------------------------------------


def test_import_contracts_hold(repository):
    done = lint_imports(repository)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("importer", "statement", "contract"),
    [
        ("app/mira_app/planted.py", "import mira_engine.config", "interface only"),
        ("app/mira_app/planted.py", "import mira_kernels", "interface only"),
        ("app/mira_app/planted.py", "def late():\n    import torch", "Torch stays out"),
        ("app/mira_app/planted.py", "import textual.app", "Only the terminal interface"),
        ("engine/mira_engine/types.py", "import textual", "Only the terminal interface"),
        ("engine/mira_engine/types.py", "import mira_app", "never imports the app"),
        ("engine/mira_engine/types.py", "from . import config", "above its own"),
        ("engine/mira_engine/checkpoint/planted.py", "from .. import runtime", "above its own"),
        ("engine/mira_engine/unplaced.py", "", "above its own"),
        ("engine/mira_engine/policy/planted.py", "import torch", "Torch stays out"),
        ("engine/mira_engine/policy/planted.py", "import time", "Policies have no tensors"),
        ("engine/mira_engine/policy/planted.py", "import os.path", "Policies have no tensors"),
        ("engine/mira_engine/policy/planted.py", "from random import Random", "Policies have no"),
        ("engine/mira_engine/policy/planted.py", "from .. import checkpoint", "ground floor"),
        ("engine/mira_engine/policy/planted.py", "from .. import wire", "ground floor"),
        ("engine/mira_engine/simulator/__init__.py", "import torch", "Torch stays out"),
        ("engine/mira_engine/simulator/clock.py", "from ..checkpoint import t", "Torch stays out"),
        ("engine/mira_engine/simulator/__init__.py", "from .. import runtime", "of each other"),
        ("engine/mira_engine/runtime/planted.py", "from .. import simulator", "of each other"),
        ("engine/mira_engine/runtime/planted.py", "from .. import wire", "not know the interface"),
        ("kernels/mira_kernels/planted.py", "import mira_engine.types", "nothing of ours"),
        ("assets/mira_assets/planted.py", "import mira_engine.types", "assets import nothing"),
    ],
)
def test_planted_import_breaks_its_contract(copied_tree, tmp_path, importer, statement, contract):
    tree = tmp_path / "tree"
    shutil.copytree(copied_tree, tree)
    simulator = tree / "engine/mira_engine/simulator"
    simulator.mkdir(exist_ok=True)
    (simulator / "__init__.py").touch()
    (tree / "engine/mira_engine/checkpoint/t.py").write_text("import torch\n")
    with (tree / importer).open("a") as file:
        file.write(f"\n{statement}\n")
    done = lint_imports(tree)
    assert done.returncode == 1, done.stdout + done.stderr
    broken = [line for line in done.stdout.splitlines() if " BROKEN" in line]
    assert any(contract in line for line in broken), done.stdout


def test_policies_and_kernels_import_only_what_they_may():
    graph = grimp.build_graph(*ROOTS.values(), include_external_packages=True, cache_dir=None)

    def outside(package: str) -> set[str]:
        modules = {package} | graph.find_descendants(package)
        imported = set().union(*map(graph.find_modules_directly_imported_by, modules))
        return {name for name in imported - modules if not name.startswith(package)}

    standard = set(sys.stdlib_module_names)
    grounds = {f"mira_engine.{name}" for name in ("types", "config", "events", "errors")}
    assert outside("mira_engine.policy") <= (standard - EFFECTS) | grounds
    assert outside("mira_kernels") <= standard | {"torch", "triton"}


# -- names on the import path -------------------------------------------------------------


def test_each_source_root_holds_one_uniquely_named_package(repository):
    for folder, package in ROOTS.items():
        inside = [
            path.name
            for path in (repository / folder).iterdir()
            if path.name != "__pycache__" and not path.name.endswith(".egg-info")
        ]
        assert inside == [package]
        assert (repository / folder / package / "__init__.py").is_file()
        assert not (repository / folder / "__init__.py").exists()


def test_nothing_of_ours_is_imported_as_kernels(repository, tmp_path):
    code = "import importlib.util as u; print(getattr(u.find_spec('kernels'), 'origin', None))"
    origin = run_python(code, cwd=tmp_path, path=source_path(repository))
    assert not origin.startswith(str(repository))


ASK_TRANSFORMERS = "from transformers.utils import is_kernels_available as f; print(f())"


@pytest.mark.skipif(
    any(importlib.metadata.distributions(name="kernels")),
    reason="Hugging Face's kernels is really installed",
)
def test_transformers_does_not_take_our_folder_for_kernels(repository, copied_tree, tmp_path):
    """Also in the worst place to start from: the folder that holds one called kernels."""
    path = os.pathsep.join([str(repository), source_path(repository)])
    assert run_python(ASK_TRANSFORMERS, cwd=repository, path=path) == "False"

    tree = tmp_path / "tree"
    shutil.copytree(copied_tree, tree)
    (tree / "kernels/__init__.py").write_text("__version__ = '0.18.5'")
    assert run_python(ASK_TRANSFORMERS, cwd=tree, path=str(tree)) == "True"


# -- cold start ---------------------------------------------------------------------------

HEAVY = {
    "torch", "transformers", "triton", "accelerate", "numpy", "safetensors", "openai", "httpx2",
    "starlette", "uvicorn",
}  # fmt: skip


def heavy_modules_loaded_by(module: str, *, cwd: Path, path: str) -> set[str]:
    code = f"import {module}, sys, json; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(run_python(code, cwd=cwd, path=path)))
    assert module in loaded
    return loaded & HEAVY


@pytest.mark.parametrize("module", ["mira_app.cli", "mira_app.tui.app", "mira_engine.api"])
def test_start_of_app_loads_no_torch(module, repository):
    path = source_path(repository)
    assert not heavy_modules_loaded_by(module, cwd=repository, path=path)


def test_start_that_loads_torch_on_a_detour_is_seen(tmp_path):
    (tmp_path / "start.py").write_text("import detour")
    (tmp_path / "detour.py").write_text("import torch")
    assert "torch" in heavy_modules_loaded_by("start", cwd=tmp_path, path=str(tmp_path))


# -- what is shipped ----------------------------------------------------------------------


def test_wheel_holds_packages_and_their_files(copied_tree, tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(copied_tree, tree)
    planted = tree / "app/mira_app/tui/planted/deep/planted.tcss"
    planted.parent.mkdir(parents=True)
    planted.touch()
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--no-index", "--wheel-dir", tmp_path, tree],
        check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("mira_chat-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = [
        path.relative_to(tree / folder).as_posix()
        for folder in ROOTS
        for path in (tree / folder).rglob("*")
        if path.suffix in {".py", ".tcss", ".sql", ".safetensors"} and "build" not in path.parts
    ]
    assert "mira_assets/builtin_recipe.safetensors" in shipped
    assert set(shipped) <= names
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == set(ROOTS.values())
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.skipif(
    not any(importlib.metadata.distributions(name="mira-chat")), reason="mira-chat is not installed"
)
def test_installed_program_says_the_version_of_the_source_tree(repository):
    declared = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["version"]
    program = Path(sys.executable).with_name("mira-chat")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["mira-chat", declared]

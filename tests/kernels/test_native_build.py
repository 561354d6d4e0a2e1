"""Building, keeping and loading the C++ kernels, and everything that can go wrong there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from mira_kernels import native, native_proof, reference

KERNELS = Path(native.__file__).parent.parent


def in_child(code, *arguments):
    """Runs code in a fresh process, where nothing is loaded yet; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(KERNELS)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LOAD = (
    "import sys; from pathlib import Path; from mira_kernels import native\n"
    "status = native.load(Path(sys.argv[1])); print(status.is_available, status.reason)"
)


def test_build_without_compiler_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("PATH", "")
    status = native.build(tmp_path)
    assert not status.is_available
    assert "/nonexistent" in status.reason
    monkeypatch.delenv("CXX")
    status = native.build(tmp_path)
    assert status == native.NativeStatus(
        False, "Native kernels are off: no C++ compiler was found."
    )
    assert not native.is_built(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_build_on_windows_says_that_there_is_none_and_what_has_one(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "is_supported", lambda: False)
    assert native.compiler() is None
    why, remedy = native.compiler_problem()
    assert native.build(tmp_path) == native.NativeStatus(False, f"Native kernels are off: {why}.")
    assert "Windows" in why
    assert "WSL 2" in remedy


def test_build_with_failing_compiler_says_why(tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    status = native.build(tmp_path / "cache")
    assert not status.is_available
    assert "no such luck" in status.reason
    assert list((tmp_path / "cache").iterdir()) == []


def test_load_without_library_says_so(tmp_path):
    status = native.load(tmp_path)
    assert status == native.NativeStatus(False, "Native kernels are off: they are not built.")
    assert not native.is_loaded()


def test_library_path_depends_on_what_matters(tmp_path, monkeypatch):
    path = native.library_path(tmp_path)
    assert path == native.library_path(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(native, "_processor", lambda: "another")
        assert native.library_path(tmp_path) != path
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "0.0")
        assert native.library_path(tmp_path) != path


def test_load_is_idempotent_and_proves(native_kernels, native_cache):
    assert native.is_loaded()
    assert native.load(native_cache).is_available
    assert in_child(LOAD, native_cache) == "True"


def test_broken_library_is_reported_removed_and_built_anew(native_cache, tmp_path):
    broken = native.library_path(tmp_path)
    broken.write_bytes(b"no library")
    assert not native.is_built(tmp_path)
    native._digest_path(broken).write_text(native._digest_of(broken))
    assert native.is_built(tmp_path)
    assert in_child(LOAD, tmp_path).startswith("False Native kernels are off:")
    assert not native.is_built(tmp_path)
    whole = native.library_path(native_cache)
    shutil.copy(whole, broken)
    shutil.copy(native._digest_path(whole), native._digest_path(broken))
    assert in_child(LOAD, tmp_path) == "True"


def test_truncated_library_is_never_loaded(native_cache, tmp_path):
    """The process that loads one dies of it."""
    whole, short = native.library_path(native_cache), native.library_path(tmp_path)
    shutil.copy(native._digest_path(whole), native._digest_path(short))
    short.write_bytes(whole.read_bytes()[:100_000])
    assert not native.is_built(tmp_path)
    assert in_child(LOAD, tmp_path) == "False Native kernels are off: they are not built."


def test_library_is_found_without_a_compiler(native_cache, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    assert native.compiler() is None
    assert native.is_built(native_cache)


def test_build_ends_when_asked_to(tmp_path):
    status = native.build(tmp_path, is_cancelled=lambda: True)
    assert not status.is_available
    assert "stopped" in status.reason
    assert not list(tmp_path.iterdir())


def test_wrong_results_are_found(native_kernels, monkeypatch):
    assert native_proof.find_wrong() is None
    right = reference.linear
    monkeypatch.setattr(reference, "linear", lambda *arguments: right(*arguments) + 1)
    assert native_proof.find_wrong() == "their INT4 product is wrong"


def test_two_builds_at_once_leave_one_library(native_cache, tmp_path):
    old = tmp_path / "mira_cpu-0123.so"
    old.write_bytes(b"")
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(native.build(tmp_path))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [native.NativeStatus(True)] * 2
    library = native.library_path(tmp_path)
    assert {*tmp_path.iterdir()} == {library, native._digest_path(library)}
    assert in_child(LOAD, tmp_path) == "True"


def test_library_brings_no_threads_of_its_own(native_cache):
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf here")
    path = native.library_path(native_cache)
    needed = subprocess.run(
        [readelf, "-d", str(path)], capture_output=True, text=True, check=True
    ).stdout
    assert "omp" not in needed
    count = (
        "import os, torch\n" + LOAD + "\n"
        "x = torch.ones(1, 576, dtype=torch.bfloat16)\n"
        "w = torch.ones(4096, 576, dtype=torch.bfloat16)\n"
        "for n in (1, 2, 3):\n"
        "    torch.set_num_threads(n)\n"
        "    torch.ops.mira.dense_linear(x, w, None)\n"
        "    print(len(os.listdir('/proc/self/task')))\n"
    )
    lines = in_child(count, native_cache).splitlines()
    counts = [int(line) for line in lines[1:]]
    assert [n - counts[0] for n in counts] == [0, 1, 2]


def test_portable_loops_agree_and_keep_bits(native_cache, tmp_path):
    """What processors without AVX-512 run, built without its instructions."""
    library = tmp_path / "portable.so"
    flags = ("-DMIRA_PORTABLE",)
    assert native._compile(native.compiler(), library, flags).is_available
    code = (
        "import sys, torch; from pathlib import Path; from mira_kernels import native\n"
        "print(native._load_file(Path(sys.argv[1])))\n"
        "g = torch.Generator().manual_seed(0)\n"
        "r = lambda *s: torch.randn(*s, generator=g).bfloat16()\n"
        "x, w = r(48, 90), r(70, 90)\n"
        "c = (w * 20).clamp(-127, 127).to(torch.int8)\n"
        "p = torch.randint(0, 256, (64, 32), dtype=torch.uint8, generator=g)\n"
        "s = r(2, 64, 2)\n"
        "ops = torch.ops.mira\n"
        "f = (lambda x: ops.dense_linear(x, w, None),\n"
        "     lambda x: ops.int8_linear(x, c, torch.ones(70), None),\n"
        "     lambda x: ops.int4_linear(x[:, :64], p, s, 32, 64),\n"
        "     lambda x: ops.nested_linear(x[:, :64], p, s, p, 32, 32))\n"
        "print(all(torch.equal(f(x[n:]), f(x)[n:]) for f in f for n in range(48)))\n"
    )
    lines = in_child(code, library).splitlines()
    assert lines == ["NativeStatus(is_available=True, reason='')", "True"]

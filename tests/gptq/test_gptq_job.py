"""A model's GPTQ draft as a job: made beside the one in use, kept, gone on with, given up."""

import shutil
from dataclasses import replace

import psutil
import pytest
import tiny_models
from mira_engine.checkpoint import gptq_process, gptq_store
from mira_engine.checkpoint.files import MANIFEST_FILE
from mira_engine.checkpoint.gptq_child import do_job
from mira_engine.checkpoint.store import ExpertStore, StoreManifest
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.errors import CancelledError, PrepareError, StoreError
from mira_engine.events import ChatMessage
from mira_engine.library import ModelLibrary
from mira_engine.prepare import locked, prepare
from mira_engine.types import ComputeDtype, Plane, Precision, Rounding

NUM_LAYERS, NUM_EXPERTS = 4, 4
"""Of the tiny gpt_oss."""


def manifest(home, precision=Precision.NESTED):
    return StoreManifest.from_file(home.store_dir(precision) / MANIFEST_FILE)


def record(home, plane=Plane.HI, precision=Precision.NESTED):
    return ExpertStore.open(home.store_dir(precision)).read_record(1, plane, 2).tolist()


def again(home, precision=Precision.NESTED, **options):
    prepare(home, precision, on_progress=lambda *args: None, **options)


def test_draft_takes_the_place_of_the_one_rounded_to_nearest(here, home_of, make):
    home = home_of()
    before, revision = record(home), manifest(home).revision
    seen = []
    make(home, on_progress=lambda *args: seen.append(args))
    assert record(home) != before
    found = manifest(home)
    assert (found.rounding, found.revision) == (Rounding.GPTQ, revision)
    ExpertStore.open(home.store_dir(Precision.NESTED)).verify()
    assert {path.name for path in (home.root / "stores").iterdir()} == {"nested.gptq"}
    assert not home.draft_dir.exists()
    assert {args[0] for args in seen} == {"draft"}
    assert [args[1:3] for args in seen if args[3] == "experts"] == [
        (done, NUM_LAYERS * NUM_EXPERTS) for done in range(NUM_LAYERS * NUM_EXPERTS)
    ]
    assert any(args[3] == "tokens" for args in seen)


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
def test_draft_beside_a_target_is_made_anew_and_the_target_stays(here, home_of, make, precision):
    home = home_of(precision=precision)
    before = record(home, Plane.WHOLE, Precision.INT4)
    target = home.store_dir(precision).stat().st_ino
    assert "gptq-target" not in {notice.code for notice in make(home, precision)}
    assert record(home, Plane.WHOLE, Precision.INT4) != before
    assert manifest(home, Precision.INT4).rounding is Rounding.GPTQ
    if precision is not Precision.INT4:
        assert home.store_dir(precision).stat().st_ino == target
        assert manifest(home, precision).rounding is Rounding.NEAREST
    assert home.is_ready(precision)


def test_memory_is_told_before_and_what_nothing_reached_after(here, home_of, make):
    home = home_of()
    told = make(home)
    assert [notice.code for notice in told[:2]] == ["gptq-memory", "gptq-target"]
    assert "at most" in told[0].text
    fallbacks = gptq_store.read_fallbacks(home.store_dir(Precision.NESTED))
    num = sum(map(len, fallbacks.values()))
    texts = [notice.text for notice in told if notice.code == "gptq-fallbacks"]
    if num:
        assert texts == [
            f"GPTQ chose the codes of {16 - num} of 16 experts; {num} that calibration did not "
            "reach are rounded to nearest."
        ]
    else:
        assert texts == []


def test_experts_that_gptq_fails_at_are_counted(here, home_of, make, monkeypatch):
    home = home_of()
    monkeypatch.setenv("FAKE_GPTQ", "nan")
    monkeypatch.setenv("FAKE_GPTQ_COLUMNS", "64")
    nearest = record(home)
    (text,) = (notice.text for notice in make(home) if notice.code == "gptq-fallbacks")
    assert text.startswith("GPTQ chose the codes of 0 of 16 experts; 16 ")
    assert record(home) == nearest


def test_too_little_memory_is_told_before_the_model_is_loaded(here, home_of, make, monkeypatch):
    home = home_of()
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=1000))
    with pytest.raises(PrepareError, match="GPTQ needs .* 1000 B is free"):
        make(home)
    assert not home.draft_dir.exists()


def test_draft_that_is_there_is_kept_whatever_it_was_made_from(here, home_of, make):
    home = home_of()
    make(home)
    stamp = (home.store_dir(Precision.NESTED) / MANIFEST_FILE).stat().st_mtime_ns
    seen = []
    assert make(home, prompts=None, on_progress=lambda *args: seen.append(args)) == []
    assert make(home) == []
    assert seen == []
    assert (home.store_dir(Precision.NESTED) / MANIFEST_FILE).stat().st_mtime_ns == stamp
    assert len(here) == 1


def test_other_prompts_make_another_draft(here, home_of, make):
    home = home_of()
    make(home)
    first = manifest(home).calibration
    make(home, prompts=("one other prompt", "and a second"))
    assert manifest(home).calibration != first
    assert len(here) == 2
    assert {path.name for path in (home.root / "stores").iterdir()} == {"nested.gptq"}


def test_two_runs_give_the_same_bytes(here, tiny_checkpoint, tmp_path, make):
    hashes = []
    for name in ("one", "two"):
        home = ModelLibrary(tmp_path / name).resolve(
            str(tiny_checkpoint("gpt_oss", tokenizer=True))
        )
        again(home)
        make(home)
        hashes.append({name: file.sha256 for name, file in manifest(home).files.items()})
    assert hashes[0] == hashes[1]


# -- stopped, and prepared again ---------------------------------------------------------


@pytest.mark.parametrize("stop_at", ["recording, batch 2", "GPTQ, layer 3"])
def test_cancelled_draft_leaves_the_model_ready_and_goes_on(here, home_of, make, stop_at):
    home = home_of()
    nearest, seen = record(home), []
    with pytest.raises(CancelledError):
        make(
            home,
            on_progress=lambda *args: seen.append(args),
            is_cancelled=lambda: bool(seen) and seen[-1][4].startswith(stop_at),
        )
    assert record(home) == nearest
    again(home)  # Preparing the model anew neither needs nor loses what is finished.
    seen.clear()
    make(home, on_progress=lambda *args: seen.append(args))
    details = [args[4] for args in seen]
    assert not any(detail.startswith("recording, batch 1") for detail in details)
    is_late = stop_at.startswith("GPTQ")
    assert any(detail.startswith("GPTQ, layer 1") for detail in details) is not is_late
    assert any(detail.startswith("recording") for detail in details) is not is_late
    assert manifest(home).rounding is Rounding.GPTQ


def test_draft_stopped_and_begun_with_other_prompts_begins_anew(here, home_of, make):
    home = home_of()
    seen = []
    with pytest.raises(CancelledError):
        make(
            home,
            on_progress=lambda *args: seen.append(args),
            is_cancelled=lambda: bool(seen) and seen[-1][4].startswith("GPTQ, layer 3"),
        )
    seen.clear()
    make(home, prompts=("other", "prompts"), on_progress=lambda *args: seen.append(args))
    details = [args[4] for args in seen]
    assert any(detail.startswith("recording, batch 1") for detail in details)
    assert any(detail.startswith("GPTQ, layer 1") for detail in details)


def test_draft_killed_before_it_was_put_in_place_is_put_there(here, home_of, make, monkeypatch):
    home = home_of()
    nearest = record(home)
    with monkeypatch.context() as patch:
        patch.setattr(gptq_store, "put_in_place", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make(home)
    assert record(home) == nearest
    make(home)
    assert len(here) == 1
    assert manifest(home).rounding is Rounding.GPTQ
    assert not home.draft_dir.exists()


def test_prepare_keeps_the_draft_and_clears_what_a_kill_left(here, home_of, make):
    home = home_of()
    shutil.copytree(home.store_dir(Precision.NESTED), home.root / "kept")
    make(home)
    shutil.copytree(home.root / "kept", home.nearest_store_dir(Precision.NESTED))
    chosen = record(home)
    again(home)
    assert record(home) == chosen
    assert not home.nearest_store_dir(Precision.NESTED).exists()


def test_prepare_with_nearest_gives_the_draft_up(here, home_of, make):
    home = home_of()
    nearest = record(home)
    make(home)
    again(home, draft=Rounding.NEAREST)
    assert record(home) == nearest
    assert {path.name for path in (home.root / "stores").iterdir()} == {"nested"}


def test_draft_that_is_given_up_is_used_until_the_other_store_is_whole(here, home_of, make):
    home = home_of()
    make(home)
    chosen, seen = record(home), []
    with pytest.raises(CancelledError):
        prepare(
            home,
            Precision.NESTED,
            draft=Rounding.NEAREST,
            on_progress=lambda step, *args: seen.append(step),
            is_cancelled=lambda: seen.count("convert") > NUM_EXPERTS,
        )
    assert home.nearest_store_dir(Precision.NESTED).exists()
    assert home.is_ready(Precision.NESTED)
    assert (manifest(home).rounding, record(home)) == (Rounding.GPTQ, chosen)
    again(home, draft=Rounding.NEAREST)
    assert manifest(home).rounding is Rounding.NEAREST
    assert {path.name for path in (home.root / "stores").iterdir()} == {"nested"}


def test_other_weights_take_the_draft_with_them(here, tmp_path, make):
    folder = tiny_models.save_tiny("gpt_oss", tmp_path / "model", seed=0)
    tiny_models.tiny_tokenizer(folder)
    home = ModelLibrary(tmp_path / "data").resolve(str(folder))
    again(home)
    make(home)
    tiny_models.save_tiny("gpt_oss", folder, seed=1)
    again(home)
    assert manifest(home).rounding is Rounding.NEAREST
    assert {path.name for path in (home.root / "stores").iterdir()} == {"nested"}
    make(home)
    assert manifest(home).rounding is Rounding.GPTQ


# -- refused ------------------------------------------------------------------------------


def test_without_the_library_it_says_what_to_install(home_of, make, monkeypatch):
    home = home_of()
    monkeypatch.setattr(gptq_process, "PACKAGE", "no_such_package_here")
    with pytest.raises(PrepareError, match="no_such_package_here, which is not") as refused:
        make(home)
    assert refused.value.hint == "Run: pip install 'mira-chat[gptq]'"
    assert not home.draft_dir.exists()


def test_model_that_is_not_prepared_is_refused(here, tiny_checkpoint, tmp_path, make):
    home = ModelLibrary(tmp_path).resolve(str(tiny_checkpoint("gpt_oss", tokenizer=True)))
    with pytest.raises(StoreError, match="not prepared"):
        make(home)


def test_model_whose_checkpoint_is_gone_is_refused(here, home_of, make, tmp_path):
    home = replace(home_of(), checkpoint_dir=tmp_path / "gone")
    with pytest.raises(PrepareError, match="which is gone"):
        make(home)


def test_two_processes_do_not_work_on_one_model(here, home_of, make):
    home = home_of()
    with locked(home), pytest.raises(PrepareError, match="another process"):
        make(home)


# -- used ---------------------------------------------------------------------------------


def test_draft_changes_no_text_of_its_target(here, home_of, make):
    home = home_of()
    make(home)

    def text(k):
        config = EngineConfig(
            precision=Precision.NESTED,
            dtype=ComputeDtype.FLOAT32,
            budget=MemoryAmount(share=2.0),
            num_draft_tokens=k,
            num_threads=1,
        )
        engine = Engine.load(home, config)
        try:
            prompt = engine.render([ChatMessage(role="user", content="Hello.")])
            sampling = SamplingConfig(max_new_tokens=24)
            return [token for token in engine.reply(prompt, sampling) if isinstance(token, int)]
        finally:
            engine.close()

    assert text(4) == text(0)


def test_job_in_this_process_is_the_childs(here, home_of, make):
    """What the other tests run is what the process runs."""
    make(home_of())
    (job,) = here
    assert gptq_process.GptqJob.from_line(job.to_line()) == job
    assert do_job.__module__ == "mira_engine.checkpoint.gptq_child"

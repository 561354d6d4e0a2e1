"""Compiled steps: the same answers, visibly absent where they cannot be, kept across starts."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import Notice
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.model.steps import StepSpec
from mira_engine.prepare import prepare
from mira_engine.runtime import capture
from mira_engine.types import (
    CompileMode,
    ComputeDtype,
    DraftDense,
    DraftExperts,
    ExpertId,
    Phase,
    Precision,
)
from transformers import AutoModelForCausalLM

COMPILED = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "phimoe",
    "olmoe",
    "glm4_moe",
    "granitemoe",
    "ernie4_5_moe",
)
"""Families whose steps compile, here without sliding windows."""

NOT_COMPILED = {
    "gpt_oss": "sliding windows",
    "jamba": "running states",
    "deepseek_v3": "does not take its keys from the cache",
}
"""Families that run module by module, and a part of the line that says why."""

PROMPT_TOKENS, NEW_TOKENS, K = 21, 24, 3

CONFIG = EngineConfig(
    precision=Precision.FLOAT32,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=8.0),
    num_draft_tokens=0,
    context_length=96,
    num_threads=1,
    compile_mode=CompileMode.WAIT,
)


def _prompt() -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, 250, (PROMPT_TOKENS,), generator=generator).tolist()


@pytest.fixture(scope="module")
def prepared(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> Callable[..., ModelHome]:
    """Prepares a family's tiny checkpoint once a precision."""
    library = ModelLibrary(tmp_path_factory.mktemp("compiled"))

    def make(family: str, precision: Precision = Precision.FLOAT32, **fields: object) -> ModelHome:
        home = library.resolve(str(tiny_checkpoint(family, **fields)))
        prepare(home, precision, on_progress=lambda *_: None, is_cancelled=lambda: False)
        return home

    return make


class Loaded:
    """Loads engines that end no text early, and closes them when the test ends."""

    def __init__(self, cache_dir: Path) -> None:
        self.cache_dir = cache_dir
        self.engines: list[Engine] = []
        self.notices: list[Notice] = []

    def __call__(self, home: ModelHome, **changes: object) -> Engine:
        engine = Engine.load(
            home,
            replace(CONFIG, **changes),
            cache_dir=self.cache_dir,
            on_notice=self.notices.append,
        )
        engine._end_ids = frozenset()
        self.engines.append(engine)
        return engine

    def told(self, code: str) -> list[str]:
        """Texts of the notices with this code."""
        return [notice.text for notice in self.notices if notice.code == code]


@pytest.fixture
def load(native_cache: Path) -> Iterator[Loaded]:
    loaded = Loaded(native_cache)
    yield loaded
    for engine in loaded.engines:
        engine.close()


@pytest.fixture(scope="module")
def begin(native_cache: Path) -> Iterator[Callable[[str, ModelHome], tuple[Engine, Loaded]]]:
    """Loads a family's speculating engine, its steps compiled beside what is tested.

    Compiling takes most of these tests' time, on one core: so the next family's is begun
    before a family is tested.
    """
    begun: dict[str, tuple[Engine, Loaded]] = {}

    def load(family: str, home: ModelHome) -> tuple[Engine, Loaded]:
        if family not in begun:
            loaded = Loaded(native_cache)
            engine = loaded(home, num_draft_tokens=K, compile_mode=CompileMode.AUTO)
            begun[family] = (engine, loaded)
        return begun[family]

    yield load
    for engine, _ in begun.values():
        engine.close()


def _greedy(engine: Engine, prompt: list[int], num_tokens: int = NEW_TOKENS) -> list[int]:
    steps = engine.reply(prompt, SamplingConfig(max_new_tokens=num_tokens))
    return [step for step in steps if isinstance(step, int)]


@torch.inference_mode()
@pytest.mark.parametrize("family", COMPILED)
def test_compiled_steps_equal_transformers_whatever_is_resident(
    family: str,
    prepared: Callable[..., ModelHome],
    begin: Callable[[str, ModelHome], tuple[Engine, Loaded]],
    load: Loaded,
    request: pytest.FixtureRequest,
) -> None:
    prompt = _prompt()
    home = prepared(family, has_windows=False)
    speculating, told_by_speculating = begin(family, home)
    for other in _families_after(request.node)[:1]:
        begin(other, prepared(other, has_windows=False))
    model = AutoModelForCausalLM.from_pretrained(
        home.checkpoint_dir, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    text = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    speculating.native_path.capture.wait(lambda: False)
    assert _greedy(speculating, prompt) == text
    stats = speculating.stats()
    assert stats.num_drafted > 0
    assert stats.num_eager_passes == 1, "only the prompt"
    # One token of the prompt's, one drafted and its check: a round shorter than K + 1.
    speculating.state.reset()
    assert _greedy(speculating, prompt, num_tokens=3) == text[:3]
    assert (speculating.stats().num_drafted, speculating.stats().num_eager_passes) == (1, 1)
    plain = load(home)
    assert plain.native_path.capture.num_compiled == 0, "the step of one token was compiled before"
    assert _greedy(plain, prompt) == text
    assert plain.stats().num_eager_passes == 1, "only the prompt"
    tight = load(home, budget=MemoryAmount(num_bytes=plain._top_k * plain.plan.slot_bytes))
    tight.take_compiled()
    assert tight.plan.num_slots < plain.plan.num_slots
    whole = model(input_ids=torch.tensor([[*prompt, 5]])).logits[0, -1]
    logits = []
    for engine in (plain, tight):
        engine.state.reset()
        engine.passes.forward(prompt, Phase.PREFILL)
        engine.state.rollback(0)
        num_compiled = engine.stats().num_compiled_passes
        logits.append(engine.passes.forward([5], Phase.DECODE)[0].clone())
        assert engine.stats().num_compiled_passes == num_compiled + 1
    error = (logits[0] - whole).abs().max() / whole.abs().max()
    assert error <= 1e-5
    assert torch.equal(*logits)
    assert not load.told("uncompiled")
    assert not told_by_speculating.told("uncompiled")


def _families_after(item: pytest.Item) -> list[str]:
    """Families that this run tests after `item`, in order."""
    tested = [other for other in item.session.items if other.originalname == item.originalname]
    return [other.callspec.params["family"] for other in tested[tested.index(item) + 1 :]]


def test_draft_in_slots_computes_with_what_is_there_and_nothing_else(
    prepared: Callable[..., ModelHome], load: Loaded
) -> None:
    home = prepared("olmoe", Precision.NESTED, has_windows=False)
    engine = load(
        home,
        precision=Precision.NESTED,
        dtype=ComputeDtype.BFLOAT16,
        budget=MemoryAmount(share=0.6),
        num_draft_tokens=K,
        draft_experts=DraftExperts.CACHED,
    )
    setup, residency = engine.cache_setup, engine.executor.driver.residency
    assert engine.plan.num_slots < setup.num_layers * setup.num_experts
    tables = engine.executor._fused._draft_tables
    for _ in engine.reply(_prompt(), SamplingConfig(max_new_tokens=NEW_TOKENS)):
        engine.executor.collect(engine.executor.transfer.poll())
        for layer, table in enumerate(tables):
            for expert, addresses in enumerate(table.tolist()):
                is_ready = residency.is_ready(ExpertId(layer, expert))
                assert all(addresses) == any(addresses) == is_ready
                if is_ready:
                    slot = residency.slot_of(ExpertId(layer, expert))
                    assert tuple(addresses) == engine.executor._fused._of_draft[slot]
    stats = engine.stats()
    assert stats.num_misses
    assert stats.num_drafted


@pytest.mark.parametrize("family", NOT_COMPILED)
def test_family_that_does_not_compile_says_so_and_answers(
    family: str, prepared: Callable[..., ModelHome], load: Loaded
) -> None:
    prompt = _prompt()
    home = prepared(family)
    engine = load(home)
    assert any(NOT_COMPILED[family] in text for text in load.told("uncompiled"))
    text = _greedy(engine, prompt)
    assert engine.stats().num_compiled_passes == 0
    assert text == _greedy(load(home, compile_mode=CompileMode.OFF), prompt)


def test_second_start_compiles_nothing(
    prepared: Callable[..., ModelHome], load: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = prepared("olmoe", has_windows=False)
    load(home, num_draft_tokens=K)

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    again = load(home, num_draft_tokens=K)
    assert (again.native_path.capture.num_compiled, again.native_path.capture.num_reused) == (0, 2)
    assert again.native_path.capture.is_done


@pytest.fixture
def only_kernels(native_cache: Path, tmp_path: Path) -> Path:
    """A cache folder with the kernels and no steps."""
    folder = tmp_path / "cache"
    folder.mkdir()
    for path in native_cache.glob("mira_cpu-*"):
        (folder / path.name).hardlink_to(path)
    return folder


def test_load_and_first_token_do_not_wait_for_compiling(
    prepared: Callable[..., ModelHome], only_kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = _prompt()
    home = prepared("olmoe", has_windows=False)
    may_compile = threading.Event()
    compile_now = capture.StepCapture._run

    def run_later(self: capture.StepCapture) -> None:
        may_compile.wait()
        compile_now(self)

    monkeypatch.setattr(capture.StepCapture, "_run", run_later)
    loaded = Loaded(only_kernels)
    engine = loaded(home, compile_mode=CompileMode.AUTO)
    text = _greedy(engine, prompt)
    assert engine.stats().num_compiled_passes == 0
    may_compile.set()
    engine.native_path.capture.wait(lambda: False)
    engine.state.reset()
    assert _greedy(engine, prompt) == text
    assert engine.stats().num_eager_passes == 1, "only the prompt"
    # What is kept is there from the next start's first reply on, unasked.
    again = loaded(home, compile_mode=CompileMode.AUTO)
    assert _greedy(again, prompt) == text
    assert again.stats().num_eager_passes == 1
    for each in (engine, again):
        each.close()


def test_no_compiler_is_one_line_and_the_reply_comes(
    prepared: Callable[..., ModelHome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    loaded = Loaded(tmp_path / "cache")
    engine = loaded(prepared("olmoe", has_windows=False))
    assert len(loaded.told("no-native-kernels")) == 1
    assert "compiler" in loaded.told("no-native-kernels")[0]
    assert len(_greedy(engine, _prompt())) == NEW_TOKENS
    engine.close()


def test_damaged_step_is_compiled_again(prepared: Callable[..., ModelHome], load: Loaded) -> None:
    home = prepared("olmoe", has_windows=False)
    engine = load(home)
    (spec,) = engine.native_path.capture._wanted
    path = engine.native_path.capture._path(spec)
    path.write_bytes(path.read_bytes()[:1000])
    again = load(home)
    assert (again.native_path.capture.num_compiled, again.native_path.capture.num_reused) == (1, 0)
    assert _greedy(again, _prompt()) == _greedy(engine, _prompt())


def test_closing_ends_the_compiling_process(
    prepared: Callable[..., ModelHome], only_kernels: Path
) -> None:
    loaded = Loaded(only_kernels)
    engine = loaded(prepared("granitemoe", has_windows=False), compile_mode=CompileMode.AUTO)
    while not (children := _compilers()) and not engine.native_path.capture.is_done:
        pass
    assert children
    engine.close()
    psutil.wait_procs(children, timeout=60)
    assert not any(child.is_running() for child in children)
    assert not list((only_kernels / "steps").glob("job-*"))


def _compilers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        try:
            if "mira_engine.runtime.step_compiler" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def test_compiling_process_ends_when_its_engine_is_killed(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    job.write_text('{"is_native": false, "steps": []}')
    process = subprocess.Popen(
        [sys.executable, "-m", "mira_engine.runtime.step_compiler", str(job)],
        stdin=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(300) in (0, 1)


def test_many_steps_are_bounded(prepared: Callable[..., ModelHome], native_cache: Path) -> None:
    home = prepared("olmoe", has_windows=False)
    engine = Loaded(native_cache)(home, compile_mode=CompileMode.OFF)
    steps = capture.StepCapture(engine.model, home.backbone_dir, native_cache, lambda *_: None)
    spec = StepSpec(
        dtype=ComputeDtype.FLOAT32,
        is_native=False,
        draft_dense=DraftDense.TARGET,
        draft_words=None,
        is_draft=False,
        num_tokens=1,
    )
    steps._closed.set()
    steps.start([replace(spec, num_tokens=n) for n in range(1, 40)], torch.float32, {})
    steps.close()
    assert len(steps._wanted) == capture.MAX_STEPS
    engine.close()

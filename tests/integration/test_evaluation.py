"""Precisions of tiny models compared with their own experts; the oracle is transformers."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mira_engine import wire
from mira_engine.checkpoint.experts import CheckpointExperts
from mira_engine.config import EngineConfig, MemoryAmount
from mira_engine.errors import CancelledError, ConfigError, GenerationError, StoreError
from mira_engine.evaluation import NUM_GREEDY_TOKENS, evaluate_model
from mira_engine.events import (
    EvaluateModel,
    EvaluationDone,
    EvaluationProgress,
    EvaluationReport,
    PrecisionFidelity,
    RequestFailed,
)
from mira_engine.fidelity.reference import choose_reference, open_checkpoint
from mira_engine.fidelity.texts import Text, make_evaluated, read_text
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.model.chat import load_tokenizer
from mira_engine.prepare import prepare
from mira_engine.types import ComputeDtype, Precision
from mira_engine.worker import EventWriter, Worker
from transformers import AutoModelForCausalLM

CONFIG = EngineConfig(
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=8.0),
    context_length=96,
    num_threads=1,
)
MAX_TOKENS = 140
FAMILIES = ("olmoe", "gpt_oss", "granitemoe", "nemotron_h")
"""Among them biases, interleaved and transposed experts, none with a gate, scaled logits,
windows, recurrent layers."""


@pytest.fixture(scope="module")
def prepared(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> Callable[..., ModelHome]:
    """Prepares a family's bfloat16 checkpoint in some precisions, once for each choice."""
    made: dict[tuple[object, ...], ModelHome] = {}

    def make(family: str, *precisions: Precision) -> ModelHome:
        key = (family, *precisions)
        if key not in made:
            checkpoint = tiny_checkpoint(family, dtype=torch.bfloat16, tokenizer=True)
            library = ModelLibrary(tmp_path_factory.mktemp("evaluation"))
            home = library.resolve(str(checkpoint))
            for precision in precisions:
                prepare(home, precision, on_progress=lambda *_: None)
            made[key] = home
        return made[key]

    return make


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.txt"
    path.write_text("A tiny model knows no words, but it has to say something. " * 9)
    return path


def evaluate(home: ModelHome, file: Path, **wishes: object) -> EvaluationReport:
    given = {"config": CONFIG, "files": [file], "max_tokens": MAX_TOKENS} | wishes
    config = given.pop("config")
    return evaluate_model(
        home, config, **{"on_progress": lambda *_: None, "on_notice": lambda _: None} | given
    )  # fmt: skip


def results(report: EvaluationReport) -> dict[Precision, PrecisionFidelity]:
    return {result.precision: result for result in report.results}


def windows_of(home: ModelHome, file: Path, window_tokens: int = 96) -> Sequence[tuple[int, ...]]:
    tokenizer = load_tokenizer(home.checkpoint_dir)
    texts = [read_text(file, MAX_TOKENS)]
    evaluated = make_evaluated(tokenizer, texts, max_tokens=MAX_TOKENS, window_tokens=window_tokens)
    return [window.tokens for window in evaluated.windows]


def oracle(home: ModelHome) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        home.checkpoint_dir, dtype=torch.float32, experts_implementation="eager"
    ).eval()


@torch.inference_mode()
def oracle_perplexity(model: torch.nn.Module, windows: Sequence[tuple[int, ...]]) -> float:
    nll, num_tokens = 0.0, 0
    for tokens in windows:
        logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1].double()
        chosen = torch.tensor(tokens[1:])
        nll -= logits.log_softmax(-1).gather(1, chosen[:, None]).sum().item()
        num_tokens += len(chosen)
    return math.exp(nll / num_tokens)


# -- against transformers -----------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_perplexities_equal_transformers_own(prepared, file: Path, family: str) -> None:
    home = prepared(family, Precision.FLOAT32)
    windows = windows_of(home, file)
    assert len({len(tokens) for tokens in windows}) == 2, "nothing is padded"
    report = evaluate(home, file, precisions=[Precision.FLOAT32])
    expected = oracle_perplexity(oracle(home), windows)
    assert [r.precision for r in report.results] == [Precision.BF16, Precision.FLOAT32]
    assert report.reference == "bf16 experts, read from the checkpoint"
    for result in report.results:
        assert result.perplexity == pytest.approx(expected, rel=1e-5)
        assert result.kl < 1e-6
        assert result.top1_agreement > 0.99
        assert result.greedy_tokens == NUM_GREEDY_TOKENS
    assert report.num_tokens == sum(len(tokens) - 1 for tokens in windows)


def test_fewer_bits_are_farther_from_the_reference(prepared, file: Path) -> None:
    home = prepared("olmoe", Precision.NESTED, Precision.INT8, Precision.FLOAT32)
    report = evaluate(home, file)
    found = results(report)
    order = [Precision.BF16, Precision.FLOAT32, Precision.NESTED, Precision.INT8, Precision.INT4]
    assert [result.precision for result in report.results] == order
    kls = [found[precision].kl for precision in order[1:]]
    assert kls[0] < 1e-6 < kls[1] < kls[2] < kls[3]
    greedy = [found[precision].greedy_tokens for precision in order]
    assert greedy[0] == greedy[1] == NUM_GREEDY_TOKENS > greedy[4]
    assert [result.is_reference for result in report.results] == [True, *[False] * 4]
    assert found[Precision.INT4].expert_bytes < found[Precision.FLOAT32].expert_bytes
    assert not report.notes


@torch.inference_mode()
def test_greedy_agreement_is_that_of_two_generations(prepared, file: Path) -> None:
    home = prepared("olmoe", Precision.INT4)
    report = evaluate(home, file)
    model = oracle(home)
    prompts = make_evaluated(
        load_tokenizer(home.checkpoint_dir), [read_text(file, MAX_TOKENS)],
        max_tokens=MAX_TOKENS, window_tokens=96,
    ).prompts  # fmt: skip
    own = [_greedy(model, prompt) for prompt in prompts]
    with torch.no_grad():
        _replace_experts(model, home)
    other = [_greedy(model, prompt) for prompt in prompts]
    agreeing = [
        next((n for n, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), NUM_GREEDY_TOKENS)
        for x, y in zip(own, other, strict=True)
    ]
    assert report.num_continuations == len(prompts)
    assert 0 < sum(agreeing) < NUM_GREEDY_TOKENS * len(prompts), "the formats would not differ"
    assert results(report)[Precision.INT4].greedy_tokens == sum(agreeing) / len(agreeing)


def _greedy(model: torch.nn.Module, prompt: tuple[int, ...]) -> list[int]:
    text = model.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_GREEDY_TOKENS, min_new_tokens=NUM_GREEDY_TOKENS,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return text[0, len(prompt) :].tolist()


def _replace_experts(model: torch.nn.Module, home: ModelHome) -> None:
    """Puts the int4 store's experts into transformers' model."""
    from mira_engine.checkpoint.experts import expert_modules_of
    from mira_engine.checkpoint.store import ExpertStore

    store = ExpertStore.open(home.store_dir(Precision.INT4))
    (plane,) = store.format.planes
    for layer, (_, module) in enumerate(expert_modules_of(model)):
        for expert in range(store.manifest.num_experts):
            record = store.read_record(layer, plane, expert)
            tensors = store.format.decode(store.format.bind({plane: record}))
            module.gate_up_proj[expert] = tensors.up
            module.down_proj[expert] = tensors.down


# -- what it is compared with -------------------------------------------------------------------


def test_bf16_store_and_checkpoint_are_the_same_reference(prepared, file: Path) -> None:
    read = evaluate(prepared("gpt_oss", Precision.INT8), file)
    stored = evaluate(prepared("gpt_oss", Precision.INT8, Precision.BF16), file)
    assert stored.reference == "bf16 experts of the prepared store"
    for precision in (Precision.BF16, Precision.INT8, Precision.INT4):
        one, other = results(read)[precision], results(stored)[precision]
        assert one.perplexity == pytest.approx(other.perplexity, rel=1e-5)
        assert one.kl == pytest.approx(other.kl, rel=1e-3, abs=1e-7)
        assert one.greedy_tokens == other.greedy_tokens
        assert one.expert_bytes == other.expert_bytes


@pytest.mark.parametrize("fault", ["gone", "changed"])
def test_without_its_checkpoint_the_nearest_precision_is_the_reference(
    tiny_checkpoint, tmp_path: Path, file: Path, fault: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("olmoe", tokenizer=True), folder)
    home = ModelLibrary(tmp_path / "data").resolve(str(folder))
    for precision in (Precision.NESTED, Precision.INT8):
        prepare(home, precision, on_progress=lambda *_: None)
    if fault == "gone":
        shutil.rmtree(folder)
    else:
        other = tiny_checkpoint("olmoe", seed=5)
        shutil.copyfile(other / "model.safetensors", folder / "model.safetensors")
    report = evaluate(home, file)
    said = "The checkpoint is gone" if fault == "gone" else "other weights than what was prepared"
    assert said in report.notes[0]
    assert "compared with nested" in report.notes[0]
    reference, *rest = report.results
    assert (reference.precision, reference.kl, reference.is_reference) == (
        Precision.NESTED, 0.0, True,
    )  # fmt: skip
    assert [result.precision for result in rest] == [Precision.INT8, Precision.INT4]
    assert all(result.kl > 1e-5 for result in rest)


def test_checkpoint_that_cannot_be_read_is_told_with_its_fault(prepared, tmp_path: Path) -> None:
    home = prepared("qwen3_moe", Precision.NESTED)
    shutil.copyfile(home.checkpoint_dir / "config.json", tmp_path / "config.json")
    damaged = choose_reference(replace(home, checkpoint_dir=tmp_path))
    assert damaged.note == (
        f"{tmp_path} holds neither model.safetensors nor model.safetensors.index.json, "
        "nor any other safetensors file: "
        "compared with nested, the nearest precision that is prepared."
    )
    gone = choose_reference(replace(home, checkpoint_dir=tmp_path / "none"))
    assert gone.note.startswith("The checkpoint is gone: ")
    assert (gone.precision, gone.checkpoint) == (Precision.NESTED, None)
    assert choose_reference(home).note == ""


def test_pass_over_padded_windows_equals_each_window_alone(prepared, file: Path) -> None:
    home = prepared("qwen3_moe", Precision.NESTED)
    checkpoint = CheckpointExperts(home.checkpoint_dir)
    scorer = open_checkpoint(home, checkpoint, ComputeDtype.FLOAT32)
    windows = [windows_of(home, file)[0][:length] for length in (9, 40, 40, 23)]
    together = {number: logits for number, _, logits in scorer.score(windows)}
    for number, tokens in enumerate(windows):
        ((_, start, alone),) = scorer.score([tokens])
        assert (start, alone.shape[0]) == (0, len(tokens) - 1)
        assert torch.allclose(together[number], alone, rtol=0, atol=2e-5)


# -- what is asked ------------------------------------------------------------------------------


def test_only_the_precisions_that_were_asked_for_are_compared(prepared, file: Path) -> None:
    home = prepared("olmoe", Precision.NESTED, Precision.INT8, Precision.FLOAT32)
    report = evaluate(home, file, precisions=[Precision.INT4, Precision.NESTED])
    found = [result.precision for result in report.results]
    assert found == [Precision.BF16, Precision.NESTED, Precision.INT4]


def test_precision_that_is_not_prepared_is_named_with_its_command(prepared, file: Path) -> None:
    home = prepared("qwen3_moe", Precision.NESTED)
    with pytest.raises(StoreError, match="not prepared in int8") as caught:
        evaluate(home, file, precisions=[Precision.NESTED, Precision.INT8])
    assert caught.value.hint == f"Run: mira-chat prepare {home.name} --precision int8"
    notes = evaluate(home, file).notes
    assert notes == tuple(
        f"{name} is not prepared: mira-chat prepare {home.name} --precision {name}"
        for name in ("int8", "int4")
    )


def test_model_that_is_not_prepared_at_all_is_refused(tiny_checkpoint, tmp_path, file) -> None:
    home = ModelLibrary(tmp_path).resolve(str(tiny_checkpoint("olmoe", tokenizer=True)))
    with pytest.raises(StoreError, match="not prepared in nested"):
        evaluate(home, file)


def test_file_that_is_too_short_is_refused_before_anything_is_loaded(prepared, tmp_path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("Hello.")
    with pytest.raises(ConfigError, match=r"short\.txt"):
        evaluate(prepared("qwen3_moe", Precision.NESTED), path, on_progress=None)


def test_model_without_tokenizer_says_so(tiny_checkpoint, tmp_path: Path, file: Path) -> None:
    home = ModelLibrary(tmp_path).resolve(str(tiny_checkpoint("olmoe")))
    prepare(home, Precision.NESTED, on_progress=lambda *_: None)
    with pytest.raises(GenerationError, match="no tokenizer"):
        evaluate(home, file)


def test_shipped_texts_are_read_without_files_and_told_by_kind(prepared) -> None:
    report = evaluate(prepared("qwen3_moe", Precision.NESTED), None, files=[], max_tokens=330)
    assert report.num_texts == 5
    assert report.notes[0] == (
        "5 of 10 texts were left out for lack of tokens; --tokens gives more."
    )
    kinds = [each.kind for each in report.results[1].kinds]
    assert kinds == ["encyclopaedia", "story", "dialogue", "code", "maths"]
    assert sum(each.num_tokens for each in report.results[1].kinds) == report.num_tokens == 325


def test_progress_never_goes_back_and_ends_at_its_total(prepared, file: Path) -> None:
    told: list[tuple[int, int, str]] = []
    home = prepared("qwen3_moe", Precision.NESTED)
    evaluate(home, file, on_progress=lambda *report: told.append(report))
    assert len({total for _, total, _ in told}) == 1
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1][0] == told[-1][1]
    assert list(dict.fromkeys(detail for _, _, detail in told)) == [
        "loading the reference", "the reference reads", "nested, loading", "nested reads",
        "nested continues", "the reference judges",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "at",
    ["the reference reads", "nested, loading", "nested reads", "nested continues",
     "the reference judges"],
)  # fmt: skip
def test_cancel_ends_any_step_and_leaves_nothing_behind(prepared, file: Path, at: str) -> None:
    home = prepared("qwen3_moe", Precision.NESTED)
    before = sorted(home.root.rglob("*"))
    seen: list[str] = []
    with pytest.raises(CancelledError):
        evaluate(
            home, file, on_progress=lambda done, total, detail: seen.append(detail),
            is_cancelled=lambda: at in seen,
        )  # fmt: skip
    assert seen[-1] == at
    assert sorted(home.root.rglob("*")) == before


def test_bfloat16_arithmetic_and_a_tight_budget_work_too(prepared, file: Path) -> None:
    home = prepared("qwen3_moe", Precision.NESTED)
    config = replace(CONFIG, dtype=ComputeDtype.BFLOAT16, budget=MemoryAmount(share=0.6))
    report = evaluate(home, file, config=config)
    assert report.dtype is ComputeDtype.BFLOAT16
    expected = oracle_perplexity(oracle(home), windows_of(home, file))
    for result in report.results:
        assert result.perplexity == pytest.approx(expected, rel=0.1)


# -- over the wire ------------------------------------------------------------------------------


def test_worker_answers_with_progress_and_the_report(prepared, file: Path) -> None:
    home = prepared("qwen3_moe", Precision.NESTED)
    stream = io.StringIO()
    worker = Worker(ModelLibrary(home.root.parent.parent), EventWriter(stream))
    ask = EvaluateModel(
        request_id="r", model=home.name, config=CONFIG, precisions=(Precision.NESTED,),
        files=(str(file),), max_tokens=MAX_TOKENS,
    )  # fmt: skip
    worker._run_job(ask)
    worker._run_job(replace(ask, precisions=(Precision.INT8,)))
    events = [wire.decode(line) for line in stream.getvalue().splitlines()]
    *progress, done, failed = [e for e in events if not hasattr(e, "text")]
    assert all(isinstance(event, EvaluationProgress) for event in progress)
    assert isinstance(done, EvaluationDone)
    assert [r.precision for r in done.report.results] == [Precision.BF16, Precision.NESTED]
    assert progress[-1].done == progress[-1].total
    assert isinstance(failed, RequestFailed)
    assert failed.code == "StoreError"


def test_text_of_the_fixture_is_what_the_windows_hold(prepared, file: Path) -> None:
    windows = windows_of(prepared("qwen3_moe", Precision.NESTED), file)
    whole = [token for tokens in windows for token in tokens]
    assert bytes(whole) == Text("x", file.read_text()).text.encode()[: len(whole)]

"""Makes a prepared model's predictors: record routing, train heads, keep what wins.

One resumable job per model: recorded batches and trained layers are files in a work
folder that goes when the bank is written. A model chats without predictors too. Runs in
the engine process, in the thread that asked, with no other engine loaded.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from mira_assets.calibration import calibration_prompts
from safetensors.torch import load_file

from .checkpoint.progress import OnProgress, Progress
from .checkpoint.store import ExpertStore
from .checkpoint.writing import disk_errors, require_space, write_json
from .config import EngineConfig, MemoryAmount
from .engine import Engine
from .errors import BudgetError, ConfigError, GenerationError, StoreError
from .events import ChatMessage
from .library import ModelHome
from .load_plan import OnNotice
from .model.chat import end_token_ids, has_tokenizer, load_tokenizer
from .model.facts import experts_per_token
from .model.routers import find_routers
from .predictor.bank import (
    BANK_VERSION,
    BankFacts,
    PredictorBank,
    load_choice,
    load_far_head,
    save_choice,
    save_far_head,
    write_tensors,
)
from .predictor.baselines import RouterWeights
from .predictor.far import FarHead, FarSamples, far_layers, train_far_head
from .predictor.traces import TraceFolder
from .predictor.train import (
    OFFSET,
    TrainingSettings,
    layer_samples,
    train_layer,
    validation_prompts,
)
from .prepare import locked
from .runtime.recording import (
    BatchRecording,
    RecordingSettings,
    plan_batches,
    shared_prefix_lengths,
)
from .types import CompileMode, Precision

STEP = "predictors"
"""Name of the job's step in progress reports."""

_ROUTERS_FILE = "routers.safetensors"
_RECIPE_FILE = "recipe.json"
_RECORDED_FILE = "recorded.json"
_BUDGET_SHARES = (1.0, 0.75, 0.5, 0.25, 0.1)
"""Budgets to try: all experts if they fit, else what does."""


def read_prompts(path: Path) -> tuple[str, ...]:
    """Reads calibration prompts from a text file: paragraphs, blank lines between them.

    Raises:
        ConfigError: The file cannot be read, is no UTF-8 text, or has fewer than two prompts.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError.for_field("calibration", str(path), "Give a UTF-8 text file.") from None
    except OSError as error:
        raise ConfigError.for_field(
            "calibration", str(path), f"It cannot be read: {error.strerror or error}."
        ) from error
    paragraphs: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip():
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    prompts = tuple("\n".join(lines) for lines in paragraphs if lines)
    if len(prompts) < 2:
        raise ConfigError.for_field(
            "calibration",
            str(path),
            f"It has {len(prompts)} prompts, at least 2 are needed: put a blank line between them.",
        )
    return prompts


def calibrate(
    home: ModelHome,
    precision: Precision,
    *,
    prompts: Sequence[str] | None = None,
    recording: RecordingSettings | None = None,
    training: TrainingSettings | None = None,
    on_progress: OnProgress,
    on_notice: OnNotice | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> PredictorBank:
    """Makes the predictors of a prepared model, or returns those it has.

    Without `prompts`, predictors of these weights are kept whatever they were made from;
    with them, they are made anew unless they come from the same prompts and settings.

    Args:
        home: A model that is ready in `precision`.
        precision: Format that the recording runs in; the predictors serve every one.
        prompts: What to record, `None` for the prompts that ship with the program.
        recording: Bounds of the recording.
        training: Seed, epochs, rates.
        on_progress: Called with step, done, total, unit, detail.
        on_notice: Told what falls back while the model is loaded for it.
        is_cancelled: Asked between layers, passes and epochs.

    Raises:
        StoreError: The model is not prepared in that precision.
        DiskSpaceError: There is no room for the recording.
        BudgetError: The machine has no memory for it now.
        GenerationError: The model has no tokenizer.
        PrepareError: Another process works on this model, or a file cannot be written.
        CancelledError: Somebody asked to stop; what is finished is kept.
    """
    recording, training = recording or RecordingSettings(), training or TrainingSettings()
    if not home.is_ready(precision):
        raise StoreError(
            f"{home.title} is not prepared in {precision}.",
            hint=f"Run: mira-chat prepare {home.name} --precision {precision}",
        )
    revision = ExpertStore.open(home.store_dir(precision)).manifest.revision
    texts = [p.text for p in calibration_prompts()] if prompts is None else list(prompts)
    recipe = _recipe(revision, texts, recording, training)
    with locked(home):
        bank = PredictorBank.load(home.predictors_dir, revision)
        if bank is not None and (prompts is None or bank.facts.recipe == recipe):
            return bank
        progress = Progress(on_progress=on_progress, is_cancelled=is_cancelled)
        work = home.predictors_dir / "work"
        recorded = RoutingRecording(home, precision, work, progress)
        recorded.open(recipe)
        if not recorded.is_finished:
            recorded.record(texts, recording, on_notice)
        facts = BankFacts(revision=revision, recipe=recipe, offset=OFFSET, **recorded.shape())
        bank = _train(recorded, work, facts, training, progress)
        bank.save(home.predictors_dir)
        recorded.clear()
    return bank


def _recipe(
    revision: str, texts: Sequence[str], recording: RecordingSettings, training: TrainingSettings
) -> str:
    made_from = [BANK_VERSION, revision, list(texts), asdict(recording), asdict(training)]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


class RoutingRecording:
    """The recorded routing of one model on some prompts, in a folder.

    Args:
        home: A model that is ready in `precision`.
        precision: Format that the recording runs in.
        folder: Where everything goes.
        progress: Told recorded tokens; asked between passes.
        step: Name of the job's step in progress reports.
    """

    def __init__(
        self,
        home: ModelHome,
        precision: Precision,
        folder: Path,
        progress: Progress,
        *,
        step: str = STEP,
    ) -> None:
        self._home = home
        self._precision = precision
        self._progress = progress
        self._step = step
        self._folder = folder
        self.traces = TraceFolder(folder)

    def open(self, recipe: str) -> None:
        """Goes on with a folder of the same recipe, or begins an empty one."""
        marker = self._folder / _RECIPE_FILE
        try:
            is_same = json.loads(marker.read_text(encoding="utf-8")) == recipe
        except (OSError, ValueError):
            is_same = False
        if not is_same:
            self.clear()
            write_json(marker, recipe)

    def clear(self) -> None:
        """Removes the folder."""
        with disk_errors(self._folder):
            if self._folder.exists():
                shutil.rmtree(self._folder)

    @property
    def is_finished(self) -> bool:
        """Whether all batches and the routers are there."""
        return (self._folder / _RECORDED_FILE).exists()

    def record(
        self, texts: Sequence[str], settings: RecordingSettings, on_notice: OnNotice | None
    ) -> None:
        """Reads the prompts through the model, batch by batch."""
        self._progress.report(self._step, 0, 0, "tokens", "loading the model")
        engine = self._load(settings, on_notice)
        try:
            prompts = [
                engine.render([ChatMessage(role="user", content=text)])[
                    : settings.max_prompt_tokens
                ]
                for text in texts
            ]
            self._save_routers(find_routers(engine.model))
            self._record_batches(engine, prompts, settings)
        finally:
            engine.close()
        manifest = ExpertStore.open(self._home.store_dir(self._precision)).manifest
        write_json(
            self._folder / _RECORDED_FILE,
            {
                "num_layers": manifest.num_layers,
                "num_experts": manifest.num_experts,
                "top_k": experts_per_token(engine.model.config),
            },
        )

    def _load(self, settings: RecordingSettings, on_notice: OnNotice | None) -> Engine:
        """Loads the model for passes over batches: no draft, no compiled steps."""
        folder = self._home.backbone_dir
        if not has_tokenizer(folder):
            raise GenerationError("The model has no tokenizer.", hint="Download it whole.")

        for share in _BUDGET_SHARES:
            config = EngineConfig(
                precision=self._precision,
                budget=MemoryAmount(share=share),
                num_draft_tokens=0,
                prefill_chunk_tokens=settings.max_batch_tokens,
                compile_mode=CompileMode.OFF,
            )
            try:
                return Engine.load(
                    self._home,
                    config,
                    on_notice=on_notice,
                    is_cancelled=self._progress.is_cancelled,
                )
            except BudgetError:
                if share == _BUDGET_SHARES[-1]:
                    raise
        raise AssertionError("unreachable: the last budget loads or raises")

    def _record_batches(
        self, engine: Engine, prompts: Sequence[Sequence[int]], settings: RecordingSettings
    ) -> None:
        model, executor = engine.model, engine.executor
        executor.is_cancelled = self._progress.is_cancelled
        folder = self._home.backbone_dir
        ends = end_token_ids(folder, model.config, load_tokenizer(folder))
        manifest = ExpertStore.open(self._home.store_dir(self._precision)).manifest
        token_bytes = manifest.num_layers * (
            2 * manifest.shape.hidden_size + 4 * experts_per_token(model.config)
        )
        batches = plan_batches([len(prompt) for prompt in prompts], token_bytes, settings)
        taken = sorted(prompt for batch in batches for prompt in batch)
        skipped = dict(
            zip(taken, shared_prefix_lengths([prompts[one] for one in taken]), strict=True)
        )
        total = sum(len(prompts[one]) - skipped[one] + settings.max_reply_tokens for one in taken)
        require_space(self._folder, total * token_bytes, f"Recording routing for the {self._step}")
        reader = BatchRecording(model, executor, ends, settings)
        before = 0
        for part, batch in enumerate(batches):
            room = sum(
                len(prompts[one]) - skipped[one] + settings.max_reply_tokens for one in batch
            )
            if not self.traces.has_part(part):
                detail = f"recording, batch {part + 1} of {len(batches)}"

                def tell(done: int, before: int = before, detail: str = detail) -> None:
                    self._progress.report(self._step, before + done, total, "tokens", detail)

                reader.write(
                    self.traces,
                    part,
                    [prompts[one] for one in batch],
                    batch,
                    [skipped[one] for one in batch],
                    on_pass=tell,
                )
            before += room

    def _save_routers(self, routers: Sequence[RouterWeights | None]) -> None:
        tensors = {}
        for layer, router in enumerate(routers):
            if router is None:
                continue
            tensors[f"{layer:04d}.weight"] = router.weight
            tensors[f"{layer:04d}.bias"] = router.bias
            if router.input_gain is not None:
                tensors[f"{layer:04d}.input_gain"] = router.input_gain
        write_tensors(self._folder / _ROUTERS_FILE, tensors, {})

    def shape(self) -> dict[str, int]:
        """Returns `num_layers`, `num_experts` and `top_k` of the recorded model."""
        return json.loads((self._folder / _RECORDED_FILE).read_text(encoding="utf-8"))

    def routers(self) -> tuple[RouterWeights | None, ...]:
        """Returns every layer's router, `None` where it is not known."""
        tensors = load_file(self._folder / _ROUTERS_FILE)
        return tuple(
            RouterWeights(
                weight=tensors[f"{layer:04d}.weight"],
                bias=tensors[f"{layer:04d}.bias"],
                input_gain=tensors.get(f"{layer:04d}.input_gain"),
            )
            if f"{layer:04d}.weight" in tensors
            else None
            for layer in range(self.shape()["num_layers"])
        )


def _train(
    recorded: RoutingRecording,
    folder: Path,
    facts: BankFacts,
    settings: TrainingSettings,
    progress: Progress,
) -> PredictorBank:
    """Trains every layer that has one `OFFSET` behind it, or takes what is trained."""
    routers, trace = recorded.routers(), recorded.traces.routing()
    num_predicting = max(0, facts.num_layers - OFFSET)
    choices = {}
    for layer in range(num_predicting):
        detail = f"training, layer {layer + 1} of {num_predicting}"
        progress.report(STEP, layer, num_predicting, "layers", detail)
        path = folder / f"layer-{layer:04d}.safetensors"
        if not path.exists():
            samples = layer_samples(
                trace,
                recorded.traces.hidden(layer),
                layer,
                num_experts=facts.num_experts,
                routers=routers,
                settings=settings,
            )
            save_choice(path, train_layer(samples, settings, check_cancelled=progress.check))
        choices[layer] = load_choice(path)
    far_heads = _train_far_heads(recorded, folder, facts, settings, progress)
    progress.report(STEP, num_predicting, num_predicting, "layers")
    return PredictorBank(facts, choices, far_heads)


def _train_far_heads(
    recorded: RoutingRecording,
    folder: Path,
    facts: BankFacts,
    settings: TrainingSettings,
    progress: Progress,
) -> dict[int, FarHead]:
    """Trains the far heads, or takes what is trained."""
    trace = recorded.traces.routing()
    is_validation = validation_prompts(trace.sequence, settings)
    layers, heads = far_layers(facts.num_layers), {}
    for number, layer in enumerate(layers):
        progress.report(STEP, number, len(layers), "heads", "training far heads")
        path = folder / f"far-{layer:04d}.safetensors"
        if not path.exists():
            samples = FarSamples.of_layer(
                trace,
                recorded.traces.hidden(layer),
                layer,
                num_experts=facts.num_experts,
                is_validation=is_validation,
            )
            head = train_far_head(samples, seed=settings.seed, check_cancelled=progress.check)
            save_far_head(path, head)
        head = load_far_head(path, facts.top_k)
        if head is not None:
            heads[layer] = head
    return heads

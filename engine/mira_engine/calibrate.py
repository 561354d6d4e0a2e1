"""Makes a prepared model's predictors: record routing, train heads, keep what wins.

One resumable job per model: recorded batches and trained layers are files in a work
folder that goes when the bank is written. Where memory runs out, recording and training
each go on once with less. A model chats without predictors too. Runs in the engine process,
in the thread that asked, with no other engine loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from mira_assets.calibration import calibration_prompts

from .checkpoint.progress import OnProgress, Progress
from .checkpoint.store import ExpertStore
from .errors import ConfigError, MemoryShortageError, StoreError
from .events import Notice
from .library import ModelHome
from .load_plan import OnNotice
from .memory_retry import SHRUNK, once_more
from .predictor.bank import (
    BANK_VERSION,
    BankFacts,
    PredictorBank,
    load_choice,
    load_far_head,
    save_choice,
    save_far_head,
)
from .predictor.far import FarHead, FarSamples, far_layers, train_far_head
from .predictor.train import (
    OFFSET,
    LayerChoice,
    TrainingSettings,
    layer_samples,
    train_layer,
    validation_prompts,
)
from .prepare import locked
from .routing_recording import RoutingRecording
from .runtime.recording import RecordingSettings
from .types import Precision

STEP = "predictors"
"""Name of the job's step in progress reports."""

_WHAT = "while predictors were trained"
_HINT = "Close other programs and prepare again: what is recorded and trained is kept."


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
        on_notice: Told what falls back while the model is loaded for it, and what is given up
            where memory runs out.
        is_cancelled: Asked between layers, passes and epochs.

    Raises:
        StoreError: The model is not prepared in that precision.
        DiskSpaceError: There is no room for the recording.
        BudgetError: The machine has no memory for it now; what is finished is kept.
        GenerationError: The model has no tokenizer.
        PrepareError: Another process works on this model, or a file cannot be written.
        CancelledError: Somebody asked to stop; what is finished is kept.
    """
    recording, training = recording or RecordingSettings(), training or TrainingSettings()
    tell = on_notice or (lambda notice: None)
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
        recorded = RoutingRecording(home, precision, work, progress, step=STEP)
        recorded.open(recipe)
        if not recorded.is_finished:
            recorded.record(texts, recording, tell)
        facts = BankFacts(revision=revision, recipe=recipe, offset=OFFSET, **recorded.shape())
        trainer = _Training(recorded, work, facts, training, progress, tell)
        make = partial(trainer.make, home.predictors_dir)
        bank = once_more(make, trainer.take_less, what=_WHAT, hint=_HINT)
        recorded.clear()
    return bank


def _recipe(
    revision: str, texts: Sequence[str], recording: RecordingSettings, training: TrainingSettings
) -> str:
    made_from = [BANK_VERSION, revision, list(texts), asdict(recording), asdict(training)]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


class _Training:
    """The training of one model's predictors, layer by layer; what is trained is a file.

    Args:
        recorded: What they are trained on.
        folder: Takes every layer's.
        facts: Of the bank.
        settings: Seed, epochs, rates.
        progress: Told layers; asked between epochs.
        tell: Told what is given up.
    """

    def __init__(
        self,
        recorded: RoutingRecording,
        folder: Path,
        facts: BankFacts,
        settings: TrainingSettings,
        progress: Progress,
        tell: OnNotice,
    ) -> None:
        self._recorded, self._folder, self._facts = recorded, folder, facts
        self._settings, self._progress, self._tell = settings, progress, tell
        self._rows_at_once: int | None = None

    def make(self, bank_dir: Path) -> PredictorBank:
        """Trains what is not trained yet, and writes the bank."""
        bank = PredictorBank(self._facts, self._near_heads(), self._far_heads())
        num_predicting = max(0, self._facts.num_layers - OFFSET)
        self._progress.report(STEP, num_predicting, num_predicting, "layers")
        bank.save(bank_dir)
        return bank

    def take_less(self, shortage: MemoryShortageError) -> str:
        """Computes fewer tokens at once from now on; a step still takes all of its batch.

        Returns:
            How many, in words.
        """
        self._rows_at_once = max(1, self._settings.batch_size // 4)
        less = f"{self._rows_at_once} tokens at once"
        cause = shortage.message.removesuffix(".")
        text = f"{cause}: from now on it takes {less}. What is trained stays."
        self._tell(Notice(code=SHRUNK, text=text))
        return less

    def _near_heads(self) -> dict[int, LayerChoice]:
        """Trains every layer that has one `OFFSET` behind it, or takes what is trained."""
        facts, settings, progress = self._facts, self._settings, self._progress
        routers, trace = self._recorded.routers(), self._recorded.traces.routing()
        num_predicting = max(0, facts.num_layers - OFFSET)
        choices = {}
        for layer in range(num_predicting):
            detail = f"training, layer {layer + 1} of {num_predicting}"
            progress.report(STEP, layer, num_predicting, "layers", detail)
            path = self._folder / f"layer-{layer:04d}.safetensors"
            if not path.exists():
                samples = layer_samples(
                    trace,
                    self._recorded.traces.hidden(layer),
                    layer,
                    num_experts=facts.num_experts,
                    routers=routers,
                    settings=settings,
                )
                choice = train_layer(
                    samples,
                    settings,
                    rows_at_once=self._rows_at_once,
                    check_cancelled=progress.check,
                )
                save_choice(path, choice)
            choices[layer] = load_choice(path)
        return choices

    def _far_heads(self) -> dict[int, FarHead]:
        """Trains the far heads, or takes what is trained."""
        facts, settings, progress = self._facts, self._settings, self._progress
        trace = self._recorded.traces.routing()
        is_validation = validation_prompts(trace.sequence, settings)
        layers, heads = far_layers(facts.num_layers), {}
        for number, layer in enumerate(layers):
            progress.report(STEP, number, len(layers), "heads", "training far heads")
            path = self._folder / f"far-{layer:04d}.safetensors"
            if not path.exists():
                samples = FarSamples.of_layer(
                    trace,
                    self._recorded.traces.hidden(layer),
                    layer,
                    num_experts=facts.num_experts,
                    is_validation=is_validation,
                )
                head = train_far_head(
                    samples,
                    seed=settings.seed,
                    rows_at_once=self._rows_at_once,
                    check_cancelled=progress.check,
                )
                save_far_head(path, head)
            head = load_far_head(path, facts.top_k)
            if head is not None:
                heads[layer] = head
        return heads

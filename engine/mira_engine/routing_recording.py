"""The recorded routing of one model on some prompts, in a folder.

What predictors are trained on, and what a GPTQ draft is calibrated with. A job that can be
stopped: finished batches are files, and the next try goes on behind them. Where memory runs
out it goes on once with less. Runs in the thread that asked, with no other engine loaded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from safetensors.torch import load_file

from .checkpoint.progress import Progress
from .checkpoint.store import ExpertStore, StoreManifest
from .checkpoint.writing import disk_errors, require_space, write_json
from .config import EngineConfig, MemoryAmount, format_bytes
from .engine import Engine
from .errors import BudgetError, GenerationError, MemoryShortageError
from .events import ChatMessage, Notice
from .library import ModelHome
from .load_plan import OnNotice
from .memory_retry import SHRUNK, less_for_experts, once_more
from .model.chat import end_token_ids, has_tokenizer, load_tokenizer
from .model.facts import experts_per_token
from .model.routers import find_routers
from .predictor.bank import write_tensors
from .predictor.baselines import RouterWeights
from .predictor.traces import TraceFolder
from .runtime.recording import (
    BatchRecording,
    RecordingSettings,
    plan_batches,
    shared_prefix_lengths,
)
from .runtime.shortage import give_memory_back, is_long_pass, shortage_of, smaller_chunk
from .types import CompileMode, Precision

_ROUTERS_FILE = "routers.safetensors"
_RECIPE_FILE = "recipe.json"
_RECORDED_FILE = "recorded.json"

_BUDGET_SHARES = (1.0, 0.75, 0.5, 0.25, 0.1)
"""Budgets to try: all experts if they fit, else what does."""

_WHAT = "while routing was recorded"
_HINT = "Close other programs and prepare again: what was recorded is kept."


class RoutingRecording:
    """One model's routing, recorded or to be recorded.

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
        step: str,
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
        """Reads the prompts through the model, batch by batch; no memory is held afterwards.

        Where memory runs out, once more with less. Batches that are recorded stay: what a
        model routes depends neither on how much is read at once nor on the budget.

        Raises:
            MemoryShortageError: Memory ran out twice; finished batches are kept.
            BudgetError: The machine has no memory for it now.
        """
        self._progress.report(self._step, 0, 0, "tokens", "loading the model")
        memory = _RecordingMemory(self._config(settings), on_notice or (lambda notice: None))
        work = partial(self._record, memory, texts, settings)
        once_more(work, memory.take_less, what=_WHAT, hint=_HINT)
        give_memory_back()

    def _config(self, settings: RecordingSettings) -> EngineConfig:
        """What is loaded for passes over batches: no draft, no compiled steps."""
        return EngineConfig(
            precision=self._precision,
            num_draft_tokens=0,
            prefill_chunk_tokens=settings.max_batch_tokens,
            compile_mode=CompileMode.OFF,
        )

    def _record(
        self, memory: _RecordingMemory, texts: Sequence[str], settings: RecordingSettings
    ) -> None:
        engine = self._load(memory)
        memory.num_reading, shortage = 0, None
        try:
            prompts = [
                engine.render([ChatMessage(role="user", content=text)])[
                    : settings.max_prompt_tokens
                ]
                for text in texts
            ]
            self._save_routers(find_routers(engine.model))
            self._record_batches(engine, prompts, settings, memory)
            top_k = experts_per_token(engine.model.config)
        except Exception as error:
            shortage = shortage_of(error, _WHAT, engine.plan)
            if shortage is None:
                raise
        finally:
            engine.close()
        if shortage is not None:
            shortage.num_prompt_tokens = memory.num_reading
            raise shortage
        manifest = self._manifest()
        write_json(
            self._folder / _RECORDED_FILE,
            {
                "num_layers": manifest.num_layers,
                "num_experts": manifest.num_experts,
                "top_k": top_k,
            },
        )

    def _load(self, memory: _RecordingMemory) -> Engine:
        """Loads the model with the first budget that fits."""
        if not has_tokenizer(self._home.backbone_dir):
            raise GenerationError("The model has no tokenizer.", hint="Download it whole.")
        for budget in memory.budgets:
            memory.config = replace(memory.config, budget=budget)
            try:
                return Engine.load(
                    self._home,
                    memory.config,
                    on_notice=memory.tell,
                    is_cancelled=self._progress.is_cancelled,
                )
            except MemoryShortageError:
                raise
            except BudgetError:
                if budget == memory.budgets[-1]:
                    raise
        raise AssertionError("unreachable: the last budget loads or raises")

    def _record_batches(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        settings: RecordingSettings,
        memory: _RecordingMemory,
    ) -> None:
        model, executor = engine.model, engine.executor
        executor.is_cancelled = self._progress.is_cancelled
        folder = self._home.backbone_dir
        ends = end_token_ids(folder, model.config, load_tokenizer(folder))
        manifest = self._manifest()
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
        reader = BatchRecording(
            model, executor, ends, settings, most_pass_tokens=memory.most_pass_tokens
        )
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
                    on_prompts=memory.note_reading,
                )
            before += room

    def _manifest(self) -> StoreManifest:
        return ExpertStore.open(self._home.store_dir(self._precision)).manifest

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


class _RecordingMemory:
    """What one recording takes of the memory, and what it goes on with after a shortage.

    Attributes:
        config: What is loaded, or was last; its budget is among `budgets`.
        budgets: To try, one after the other.
        most_pass_tokens: Prompt tokens read at once, padding included.
        num_reading: Those of the pass under way, 0 in any other.
        tell: Told every notice.
    """

    def __init__(self, config: EngineConfig, tell: OnNotice) -> None:
        self.config, self.tell = config, tell
        self.budgets = tuple(MemoryAmount(share=share) for share in _BUDGET_SHARES)
        self.most_pass_tokens = config.prefill_chunk_tokens
        self.num_reading = 0

    def note_reading(self, num_tokens: int) -> None:
        """A pass over so many prompt tokens begins that could be divided; 0 ends it."""
        self.num_reading = num_tokens

    def take_less(self, shortage: MemoryShortageError) -> str:
        """Reads less at once where a long pass failed, else holds fewer experts.

        Returns:
            What is taken now, in words.

        Raises:
            MemoryShortageError: The given one, where nothing was planned yet.
        """
        if is_long_pass(shortage.num_prompt_tokens, self.most_pass_tokens):
            self.most_pass_tokens = smaller_chunk(shortage.num_prompt_tokens)
            change = f"from now on at most {self.most_pass_tokens} prompt tokens are read at once"
            less = f"prompts read {self.most_pass_tokens} tokens at once"
        else:
            num_bytes, change = less_for_experts(self.config, shortage)
            self.budgets = (MemoryAmount(num_bytes=num_bytes),)
            less = f"{format_bytes(num_bytes)} for experts"
        cause = shortage.message.removesuffix(".")
        self.tell(Notice(code=SHRUNK, text=f"{cause}: {change}. What was recorded stays."))
        return less

"""How near a model's prepared precisions come to its experts in bfloat16.

The reference reads the texts first and its predictions are kept; then each precision is
loaded, reads the same texts, and continues their beginnings; at last the reference judges the
continuations. One model is in memory at a time. The reference's experts come from the `bf16`
store where there is one, else from the checkpoint, one at a time. Nothing is drafted, so that
the same passes are made in every precision. Runs in the engine process, in the thread that
asked.

Source: Mira, Table I (perplexity by bit width); divergence and greedy agreement are ours.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mira_assets.evaluation import evaluation_texts
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from .checkpoint.architecture import load_config
from .config import EngineConfig, SamplingConfig
from .engine import Engine
from .errors import GenerationError, StoreError, check_cancelled
from .evaluation_events import (
    DEFAULT_EVALUATION_TOKENS,
    EvaluationReport,
    KindFidelity,
    PrecisionFidelity,
)
from .events import Notice
from .fidelity.comparing import Tokens, judge, read_texts
from .fidelity.kept_logits import KeptLogits
from .fidelity.measures import FidelitySums
from .fidelity.reference import (
    NEAREST_FIRST,
    Reference,
    choose_reference,
    expert_bytes,
    open_checkpoint,
)
from .fidelity.scoring import OnTokens, PassScorer, Scorer, logit_rows
from .fidelity.texts import (
    WINDOW_TOKENS,
    Evaluated,
    Text,
    make_evaluated,
    read_text,
)
from .library import ModelHome
from .load_plan import OnNotice
from .memory_retry import load_with_retry
from .model.chat import has_tokenizer, load_tokenizer
from .model.facts import longest_context
from .runtime.gpu_device import settle_dtype
from .runtime.requests import MAX_REQUESTS, BatchToken
from .types import CompileMode, ComputeDtype, Precision

NUM_GREEDY_TOKENS = 32
"""Tokens of each continuation."""

OnProgress = Callable[[int, int, str], None]
"""Called with tokens done, tokens in all, and what they are read or made for."""

_OFFERED = (Precision.NESTED, Precision.INT8, Precision.INT4)
"""Precisions whose preparation is offered where they are missing."""


def evaluate_model(
    home: ModelHome,
    config: EngineConfig,
    *,
    precisions: Sequence[Precision] = (),
    files: Sequence[Path] = (),
    max_tokens: int = DEFAULT_EVALUATION_TOKENS,
    on_progress: OnProgress,
    on_notice: OnNotice,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> EvaluationReport:
    """Compares precisions of a prepared model.

    Args:
        home: The model.
        config: How each precision is loaded; its precision, K and prediction are left aside.
        precisions: Which; empty for every one that is prepared.
        files: Text files to read instead of the shipped texts.
        max_tokens: Most tokens of text.
        on_progress: Called after every pass, in this thread.
        on_notice: Told every fallback of a load once.
        is_cancelled: Asked in every layer.

    Raises:
        ConfigError: A file cannot be used, or a number.
        StoreError: A precision is not prepared; names the command.
        GenerationError: The model has no tokenizer.
        BudgetError: There is no memory for it.
        DiskSpaceError: There is no room for the reference's predictions.
        CancelledError: `is_cancelled` said so.
    """
    config = settle_dtype(config)
    wanted = _wanted_precisions(home, precisions)
    texts = [Text(*each) for each in evaluation_texts()]
    if files:
        texts = [read_text(path, max_tokens) for path in files]
    evaluated = make_evaluated(
        _tokenizer(home), texts, max_tokens=max_tokens, window_tokens=_window_tokens(home, config)
    )
    reference = choose_reference(home)
    notes = [reference.note] if reference.note else []
    if evaluated.num_left_out:
        notes.append(
            f"{evaluated.num_left_out} of {evaluated.num_texts + evaluated.num_left_out} texts "
            "were left out for lack of tokens; --tokens gives more."
        )
    missing = [one for one in _OFFERED if not precisions and not home.is_ready(one)]
    for precision in missing:
        notes.append(
            f"{precision} is not prepared: mira-chat prepare {home.name} --precision {precision}"
        )
    told: set[str] = set()

    def tell(notice: Notice) -> None:
        if notice.code not in told:
            told.add(notice.code)
            on_notice(notice)

    work = _Evaluation(home, config, evaluated, reference, on_progress, tell, is_cancelled)
    results = work.run(wanted)
    return EvaluationReport(
        model=home.name,
        title=home.title,
        reference=reference.label,
        dtype=config.arithmetic,
        num_texts=evaluated.num_texts,
        num_tokens=evaluated.num_predicted,
        num_continuations=len(evaluated.prompts),
        num_greedy_tokens=NUM_GREEDY_TOKENS,
        results=tuple(results),
        notes=tuple(notes),
    )


def open_scorer(engine: Engine, window_tokens: int) -> PassScorer:
    """Returns what predicts texts with a loaded engine, in its planned memory."""
    text_config = engine.model.config.get_text_config()
    most = logit_rows(
        engine.plan,
        num_words=text_config.vocab_size,
        itemsize=engine.model.dtype.itemsize,
        context_length=engine.context_length,
        window_tokens=window_tokens,
    )
    return PassScorer(engine.passes, engine.executor, max_tokens=most)


def continue_greedily(
    engine: Engine,
    prompts: Sequence[Tokens],
    num_tokens: int,
    *,
    on_tokens: OnTokens = lambda done: None,
) -> list[Tokens]:
    """Continues beginnings of texts, as many at once as the context has room for.

    Args:
        engine: Nothing is drafted where its plan has no draft.
        prompts: The beginnings.
        num_tokens: Most tokens of each continuation; an end of text ends it earlier.
        on_tokens: Told the tokens made so far.

    Returns:
        The continuations, without the rest where `Engine.cancel` was called.
    """
    longest = max(map(len, prompts)) + num_tokens
    at_once = max(1, min(MAX_REQUESTS, engine.context_length // longest))
    sampling = SamplingConfig(max_new_tokens=num_tokens)
    made: dict[int, Tokens] = {}
    num_made = 0
    for start in range(0, len(prompts), at_once):
        for event in engine.generate(prompts[start : start + at_once], sampling):
            if isinstance(event, BatchToken):
                num_made += 1
                on_tokens(num_made)
            else:
                made[start + event.request] = event.tokens
    return [made[number] for number in sorted(made)]


def _wanted_precisions(home: ModelHome, precisions: Sequence[Precision]) -> list[Precision]:
    for precision in precisions:
        if not home.is_ready(precision):
            raise _unprepared(home, precision)
    ready = home.ready_precisions
    if not ready:
        raise _unprepared(home, Precision.NESTED)
    chosen = set(precisions or ready)
    return [precision for precision in NEAREST_FIRST if precision in chosen]


def _unprepared(home: ModelHome, precision: Precision) -> StoreError:
    return StoreError(
        f"{home.title} is not prepared in {precision}.",
        hint=f"Run: mira-chat prepare {home.name} --precision {precision}",
    )


def _tokenizer(home: ModelHome) -> PreTrainedTokenizerBase:
    if not has_tokenizer(home.backbone_dir):
        raise GenerationError("The model has no tokenizer.", hint="Download it whole.")
    return load_tokenizer(home.backbone_dir)


def _window_tokens(home: ModelHome, config: EngineConfig) -> int:
    own = longest_context(load_config(home.backbone_dir))
    return min(WINDOW_TOKENS, own, config.context_length or own)


class _Evaluation:
    """The work of one evaluation, and how far it is."""

    def __init__(
        self,
        home: ModelHome,
        config: EngineConfig,
        evaluated: Evaluated,
        reference: Reference,
        on_progress: OnProgress,
        on_notice: OnNotice,
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._home = home
        self._config = config
        self._evaluated = evaluated
        self._reference = reference
        self._on_progress = on_progress
        self._notify = on_notice
        self._is_cancelled = is_cancelled
        self._num_done = self._num_total = 0

    def run(self, wanted: Sequence[Precision]) -> list[PrecisionFidelity]:
        """Evaluates; the reference first."""
        reference, evaluated = self._reference, self._evaluated
        others = [precision for precision in wanted if precision is not reference.precision]
        num_made = len(evaluated.prompts) * NUM_GREEDY_TOKENS
        num_judged = sum(map(len, evaluated.prompts)) + num_made
        self._num_total = evaluated.num_predicted * (1 + len(others))
        self._num_total += (num_made + num_judged) * len(others)
        sums: dict[Precision, dict[str, FidelitySums]] = {}
        made: dict[Precision, list[Tokens]] = {}
        lengths = [window.num_predicted for window in evaluated.windows]
        with KeptLogits(self._home.root, lengths) as kept:
            sums[reference.precision] = self._read_reference(kept)
            for precision in others:
                gc.collect()  # A model's parts know each other; the next needs the memory.
                sums[precision], made[precision] = self._try(precision, kept)
        gc.collect()
        greedy = self._judge(made) if others else {}
        return [
            self._result(precision, sums[precision], greedy.get(precision))
            for precision in (reference.precision, *others)
        ]

    def _advance(self, num_tokens: int, detail: str) -> None:
        self._on_progress(
            min(self._num_done + num_tokens, self._num_total), self._num_total, detail
        )

    def _finish(self, num_tokens: int, detail: str) -> None:
        self._advance(num_tokens, detail)
        self._num_done += num_tokens

    @property
    def _reference_arithmetic(self) -> ComputeDtype:
        """The same, but for float16: a checkpoint's experts are computed by the processor."""
        own = self._config.arithmetic
        return ComputeDtype.FLOAT32 if own is ComputeDtype.FLOAT16 else own

    # -- who predicts ----------------------------------------------------------------------

    @contextlib.contextmanager
    def _engine(self, precision: Precision) -> Iterator[Engine]:
        self._advance(0, f"{precision}, loading")
        config = replace(
            self._config,
            precision=precision,
            num_draft_tokens=0,
            compile_mode=CompileMode.OFF,
            is_predicting=False,
            prefill_chunk_tokens=WINDOW_TOKENS,
            trace_path=None,
        )
        engine = load_with_retry(
            self._home, config, on_notice=self._notify, is_cancelled=self._is_cancelled
        )
        engine.executor.is_cancelled = self._is_cancelled
        try:
            yield engine
        finally:
            engine.close()

    @contextlib.contextmanager
    def _scorer_of_reference(self) -> Iterator[Scorer]:
        checkpoint = self._reference.checkpoint
        if checkpoint is None:
            with self._engine(self._reference.precision) as engine:
                yield open_scorer(engine, WINDOW_TOKENS)
            return
        self._advance(0, "loading the reference")
        yield open_checkpoint(
            self._home, checkpoint, self._reference_arithmetic, is_cancelled=self._is_cancelled
        )

    # -- steps -----------------------------------------------------------------------------

    def _read_reference(self, kept: KeptLogits) -> dict[str, FidelitySums]:
        with self._scorer_of_reference() as scorer:
            return self._read(scorer, kept, "the reference reads", is_reference=True)

    def _try(
        self, precision: Precision, kept: KeptLogits
    ) -> tuple[dict[str, FidelitySums], list[Tokens]]:
        with self._engine(precision) as engine:
            scorer = open_scorer(engine, WINDOW_TOKENS)
            sums = self._read(scorer, kept, f"{precision} reads", is_reference=False)
            return sums, self._continue(engine, f"{precision} continues")

    def _read(
        self, scorer: Scorer, kept: KeptLogits, detail: str, *, is_reference: bool
    ) -> dict[str, FidelitySums]:
        sums = read_texts(
            scorer,
            self._evaluated.windows,
            kept,
            is_reference=is_reference,
            on_tokens=lambda done: self._advance(done, detail),
        )
        self._finish(self._evaluated.num_predicted, detail)
        return sums

    def _continue(self, engine: Engine, detail: str) -> list[Tokens]:
        prompts = self._evaluated.prompts
        made = continue_greedily(
            engine,
            prompts,
            NUM_GREEDY_TOKENS,
            on_tokens=lambda done: self._advance(done, detail),
        )
        check_cancelled(self._is_cancelled)
        self._finish(len(prompts) * NUM_GREEDY_TOKENS, detail)
        return made

    def _judge(self, made: Mapping[Precision, Sequence[Tokens]]) -> dict[Precision, float]:
        detail = "the reference judges"
        with self._scorer_of_reference() as scorer:
            greedy = judge(
                scorer,
                self._evaluated.prompts,
                made,
                limit=NUM_GREEDY_TOKENS,
                on_tokens=lambda done: self._advance(done, detail),
            )
        self._finish(self._num_total - self._num_done, detail)
        return greedy

    def _result(
        self, precision: Precision, sums: Mapping[str, FidelitySums], greedy: float | None
    ) -> PrecisionFidelity:
        whole = sum(sums.values(), FidelitySums())
        return PrecisionFidelity(
            precision=precision,
            perplexity=whole.perplexity,
            kl=whole.mean_kl,
            top1_agreement=whole.top1_agreement,
            greedy_tokens=float(NUM_GREEDY_TOKENS) if greedy is None else greedy,
            expert_bytes=expert_bytes(self._home, precision, self._reference),
            is_reference=greedy is None,
            kinds=tuple(
                KindFidelity(
                    kind=kind,
                    num_tokens=each.num_tokens,
                    perplexity=each.perplexity,
                    kl=each.mean_kl,
                    top1_agreement=each.top1_agreement,
                )
                for kind, each in sums.items()
            ),
        )

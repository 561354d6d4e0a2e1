"""What the app asks of the engine process, and what the engine tells it.

Frozen, plain values: strings, numbers, enums, tuples, and dataclasses of those, so
that `mira_engine.wire` can send each as one line of JSON. `PROTOCOL_VERSION` changes
when a field's meaning does; both ends compare it before anything else is said.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .config import EngineConfig, MachineRates, SamplingConfig
from .evaluation_events import DEFAULT_EVALUATION_TOKENS as DEFAULT_EVALUATION_TOKENS
from .evaluation_events import EvaluateModel as EvaluateModel
from .evaluation_events import EvaluationDone as EvaluationDone
from .evaluation_events import EvaluationProgress as EvaluationProgress
from .evaluation_events import EvaluationReport as EvaluationReport
from .evaluation_events import KindFidelity as KindFidelity
from .evaluation_events import PrecisionFidelity as PrecisionFidelity
from .types import (
    CacheMode,
    DraftDense,
    DraftExperts,
    ExpertShape,
    FactMark,
    FinishReason,
    Precision,
    ReplyPart,
    Rounding,
    Strategy,
)

PROTOCOL_VERSION = 1

# -- values inside requests and events ---------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a chat; `role` is `system`, `user` or `assistant`.

    Attributes:
        thinking: What an assistant thought before it answered, for templates that want it back.
    """

    role: str
    content: str
    thinking: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Planned device memory in bytes, and the slots that follow from it.

    Attributes:
        non_expert_bytes: Attention, norms, routers, shared experts, embeddings.
        kv_bytes: KV cache at the full context.
        workspace_bytes: The largest prefill chunk's temporaries.
        budget_bytes: What experts may hold: `draft_bytes`, `draft_dense_bytes` and the slots.
        draft_experts: Which routed experts the draft computes with.
        draft_bytes: The resident INT4 draft, 0 without one.
        draft_dense: What the draft multiplies with outside of the routed experts.
        draft_dense_bytes: Its copies of dense layers, 0 without.
        slot_bytes: One slot.
        num_slots: Slots for target records.
        reference_bytes: All routed experts in INT8, which percentages refer to.
        num_experts: Routed experts of the model, over all layers.
        num_draft_tokens: K in force.
        mode: How much of the experts the slots hold.
        num_hot_slots: Slots of the HOT region.
        num_stage_slots: Slots of the STAGE region. What HOT and STAGE leave is transient:
            kept for misses that find no room in STAGE.
    """

    non_expert_bytes: int
    kv_bytes: int
    workspace_bytes: int
    budget_bytes: int
    draft_experts: DraftExperts = DraftExperts.ALL
    draft_bytes: int
    draft_dense: DraftDense = DraftDense.TARGET
    draft_dense_bytes: int = 0
    slot_bytes: int
    num_slots: int
    reference_bytes: int
    num_experts: int
    num_draft_tokens: int
    mode: CacheMode = CacheMode.LARGE
    num_hot_slots: int = 0
    num_stage_slots: int = 0

    @property
    def num_transient_slots(self) -> int:
        """Slots of neither region."""
        return self.num_slots - self.num_hot_slots - self.num_stage_slots

    @property
    def fixed_bytes(self) -> int:
        """What the engine holds beside the experts."""
        return self.non_expert_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def total_bytes(self) -> int:
        """Everything the engine may hold on the device."""
        return self.fixed_bytes + self.budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAlternative:
    """One way to use the memory, with what is expected of it.

    Attributes:
        strategy: Draft, prediction, demand, or INT4 experts.
        precision: Expert format of its target.
        num_draft_tokens: K.
        plan: Where the bytes go; `None` where they do not suffice.
        missing_bytes: What is missing then, else 0.
        hit_rate: Expected share of routed tokens served by a resident expert.
        tpot_s: Predicted seconds of one new token; `None` without machine rates or plan.
        ttft_s: Predicted seconds from a prompt to its first token, as above.
        is_chosen: Whether the engine would run this one. At most one of a list is.
        reason: Why it is chosen, or why not; one sentence.
    """

    strategy: Strategy
    precision: Precision
    num_draft_tokens: int
    plan: MemoryPlan | None = None
    missing_bytes: int = 0
    hit_rate: float | None = None
    tpot_s: float | None = None
    ttft_s: float | None = None
    is_chosen: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyStats:
    """Figures of one reply, so far or at its end. Every panel and `--json` reads these.

    Attributes:
        num_prompt_tokens: Tokens of the rendered chat.
        num_cached_tokens: Of those, taken from the KV cache.
        num_new_tokens: Tokens generated.
        elapsed_s: Seconds from the request to these figures.
        ttft_s: Seconds from the request to the first token.
        decode_s: Seconds from the first token to the last.
        num_hits: Routed tokens (token x expert) after prefill served by a resident expert.
        num_misses: Routed tokens after prefill whose expert had to be fetched.
        num_stage_hits: Of the hits, by an expert labelled STAGE.
        num_prefetch_hits: Of the hits, by an expert that a prefetch brought.
        num_records_loaded: Records moved to the device after prefill.
        num_records_prefetched: Of those, submitted before they were needed.
        num_prefetch_used: Of the prefetched, used by the pass they were moved for.
        num_prefetch_skipped: Experts expected ahead that were there, or had no room.
        bytes_moved: Bytes of those records.
        prefill_bytes_moved: Bytes of records moved during prefill.
        stall_s: Seconds after prefill in which compute waited for a record.
        prefetch_stall_s: Of those, for records that were on their way before they were needed.
        sample_s: Seconds of judging the draft and choosing the next token from a target pass.
        draft_s: Seconds spent drafting.
        verify_s: Seconds spent in target passes after prefill, `stall_s` and `sample_s`
            included.
        num_drafted: Draft tokens proposed.
        num_accepted: Draft tokens accepted.
        num_rounds: Draft and verify rounds.
        num_draft_tokens: K in force, which the governor may change from round to round.
        governor_reason: Why it is that K, in one sentence for people.
        num_compiled_passes: Forward passes that ran as a compiled step, prefill included.
        num_eager_passes: Forward passes that ran module by module.
        expert_peak_bytes: Most device bytes held for experts.
        peak_memory_bytes: Most memory of the process above what it held before loading.
        planned_memory_bytes: What the plan allows for that.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_new_tokens: int = 0
    elapsed_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    num_hits: int = 0
    num_misses: int = 0
    num_stage_hits: int = 0
    num_prefetch_hits: int = 0
    num_records_loaded: int = 0
    num_records_prefetched: int = 0
    num_prefetch_used: int = 0
    num_prefetch_skipped: int = 0
    bytes_moved: int = 0
    prefill_bytes_moved: int = 0
    stall_s: float = 0.0
    prefetch_stall_s: float = 0.0
    sample_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    governor_reason: str = ""
    num_compiled_passes: int = 0
    num_eager_passes: int = 0
    expert_peak_bytes: int = 0
    peak_memory_bytes: int = 0
    planned_memory_bytes: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Decode rate, the first token left out; 0 before the second token."""
        if self.num_new_tokens < 2 or self.decode_s <= 0:
            return 0.0
        return (self.num_new_tokens - 1) / self.decode_s

    @property
    def hit_rate(self) -> float:
        """Share of routed tokens served by a resident expert."""
        total = self.num_hits + self.num_misses
        return self.num_hits / total if total else 0.0

    @property
    def stall_ms_per_token(self) -> float:
        """Milliseconds of waiting for records per generated token."""
        return 1e3 * self.stall_s / self.num_new_tokens if self.num_new_tokens else 0.0

    @property
    def accepted_per_round(self) -> float:
        """Mean accepted draft tokens per round, the bonus token not counted."""
        return self.num_accepted / self.num_rounds if self.num_rounds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthResult:
    """What one K was worth in a profile.

    Attributes:
        num_draft_tokens: K.
        tpot_s: Mean seconds per output token over the replies, the first token left out.
        num_replies: Replies measured.
    """

    num_draft_tokens: int
    tpot_s: float
    num_replies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KProfile:
    """What `profile` found for one model, machine, budget and precision.

    Source: Specter, selection of K.

    Attributes:
        best: The K with the lowest mean TPOT; the smallest of equals.
        acceptance: Share of judged draft tokens that were accepted, over all K above 0.
        results: Every K that was measured, smallest first.
    """

    best: int
    acceptance: float
    results: tuple[DepthResult, ...]

    @property
    def expected_accepted(self) -> float:
        """E[A] = a / (1 - a): draft tokens accepted in a row before one is rejected."""
        a = self.acceptance
        return a / (1 - a) if a < 1 else float("inf")

    @property
    def rates(self) -> dict[int, float]:
        """Tokens per second by K."""
        return {r.num_draft_tokens: 1 / r.tpot_s for r in self.results if r.tpot_s > 0}


# -- requests: app -> engine --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareModel:
    """Make a model ready to load: fetch, check, convert. Resumes what was begun.

    Attributes:
        is_predicting: Whether predictors are made too; a model chats without them.
        calibration: Text file with the prompts to make them and a GPTQ draft from, `None` for
            those that ship with the program.
        is_download_deleted: Whether each file downloaded from the hub is deleted as soon as it
            is converted; `None` where the disk has no room to keep them all.
        draft: How the draft's INT4 codes are chosen, `None` to leave them as they are.
        draft_from: Folder of a GPTQ checkpoint of the same model, whose codes the draft takes.
    """

    request_id: str
    model: str
    precision: Precision = Precision.NESTED
    is_predicting: bool = False
    calibration: str | None = None
    is_download_deleted: bool | None = None
    draft: Rounding | None = None
    draft_from: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel:
    """Load a prepared model, in place of the one loaded before."""

    request_id: str
    model: str
    config: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileModel:
    """Measure which K is fastest for a prepared model; the model loaded before is given up."""

    request_id: str
    model: str
    config: EngineConfig = field(default_factory=EngineConfig)
    is_quick: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Answer a chat with the loaded model.

    Attributes:
        is_residency_wanted: Whether `ResidencySample` is to be sent meanwhile.
    """

    request_id: str
    messages: tuple[ChatMessage, ...]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    is_residency_wanted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfigure:
    """Use another configuration from the next reply on; ends with `ModelLoaded`.

    The loaded model and what its cache holds stay where the change allows it.
    """

    request_id: str
    config: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Stop the request with this id; it ends with `GenerationDone` or `RequestFailed`."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Finish and exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanModel:
    """Work out where the memory would go and how fast it would be; loads no weight.

    Attributes:
        model: As for `PrepareModel`; need not be prepared, `config.json` suffices.
        config: Memory, budget, K and the rest, as for `LoadModel`.
        machine: Plan for this machine instead of the engine's own, which is measured.
        is_compact_allowed: Whether INT4 experts as the target may be chosen.
    """

    request_id: str
    model: str
    config: EngineConfig = field(default_factory=EngineConfig)
    machine: MachineRates | None = None
    is_compact_allowed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeModel:
    """Say what a model is and how much room it takes, before any of its weights is fetched.

    Attributes:
        model: As in `PrepareModel`: `builtin`, a folder, `owner/name` or `owner/name@revision`.
    """

    request_id: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeMachine:
    """Say what this machine has and can, and how a model stands on it; loads no weight.

    Attributes:
        model: As for `LoadModel`; need not be prepared.
        config: What it would be loaded with.
    """

    request_id: str
    model: str
    config: EngineConfig = field(default_factory=EngineConfig)


Request = (
    PrepareModel
    | LoadModel
    | ProfileModel
    | Generate
    | Reconfigure
    | Cancel
    | Shutdown
    | PlanModel
    | DescribeModel
    | DescribeMachine
    | EvaluateModel
)

# -- events: engine -> app ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """First event of a new engine process."""

    protocol_version: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Sent every second by a thread of its own, also while the engine computes."""

    uptime_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A fallback or a fact that the user must be able to see.

    `code` is stable and short, for example `no-direct-io`, `speculation-off`.
    """

    code: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareProgress:
    """Progress of one step of preparation.

    Attributes:
        step: `download`, `check`, `convert`, `write`, ... for people.
        done: Units finished of `total`; `total` 0 means unknown.
        unit: `bytes`, `layers`, `files`.
    """

    request_id: str
    step: str
    done: int
    total: int
    unit: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareDone:
    """The model can be loaded in that precision."""

    request_id: str
    model: str
    precision: Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileProgress:
    """Replies measured of a profile's `total`; `detail` says which K runs."""

    request_id: str
    done: int
    total: int
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileDone:
    """The profile is saved and used from the next load on."""

    request_id: str
    model: str
    profile: KProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoaded:
    """The model answers from now on; also the answer to `Reconfigure`.

    Attributes:
        context_length: Tokens of prompt and reply together, 0 where unknown.
        plan: Where the memory goes, `None` where the model runs in no engine of ours.
        is_cache_kept: Whether the experts on the device stayed, after `Reconfigure`.
        link_bytes_per_s: Rate of the expert link as measured or emulated, 0 where unknown.
    """

    request_id: str
    model: str
    title: str
    context_length: int
    plan: MemoryPlan | None
    load_s: float
    is_cache_kept: bool = False
    link_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMade:
    """The answer to `PlanModel`.

    Attributes:
        model: As in the request.
        title: Its name for people.
        machine: What was planned for.
        memory_bytes: Most that the engine may hold there.
        context_length: Tokens of KV cache counted.
        num_prompt_tokens: Prompt length that `ttft_s` refers to.
        alternatives: All that were compared, the order of `Strategy`.
        notes: What was assumed or changed, a sentence each.
        refusal: Why none could be chosen, with the missing bytes; empty where one was.
        hint: What to do about it.
        measured: What a profile measured here for just such a load, with the K that would be
            used; `None` without a profile.
    """

    request_id: str
    model: str
    title: str
    machine: MachineRates
    memory_bytes: int
    context_length: int
    num_prompt_tokens: int
    alternatives: tuple[PlanAlternative, ...]
    notes: tuple[str, ...] = ()
    refusal: str = ""
    hint: str = ""
    measured: DepthResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProgress:
    """Prompt tokens read so far."""

    request_id: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """New text of a reply. Whitespace counts; never half a character.

    Attributes:
        part: Whether the text is the answer or what the model thinks before it.
    """

    request_id: str
    text: str
    num_tokens: int
    part: ReplyPart = ReplyPart.ANSWER


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextTrimmed:
    """The chat did not fit: whole turns, the oldest, were left out; the system prompt stayed.

    Attributes:
        num_turns: Messages that were left out.
        num_tokens: Tokens of the prompt that was read in the end.
        limit: Tokens of the context.
    """

    request_id: str
    num_turns: int
    num_tokens: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencySample:
    """Where every expert is now, and how much it is used.

    At most twice a second while a reply is made, and once at its end.

    Attributes:
        regions: For each MoE layer one character an expert: `H` for HOT, `S` for STAGE, `s`
            on its way there, `.` not on the device. Without regions all residents are `S`.
        heat: For each MoE layer one digit an expert: `9` for the busiest of the model by
            tokens routed lately, `0` for those without any.
    """

    request_id: str
    regions: tuple[str, ...]
    heat: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsSample:
    """Figures of the running reply, at most four times a second."""

    request_id: str
    stats: ReplyStats


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDone:
    """The reply ended; `text` is all of the answer, `thinking` what came before it."""

    request_id: str
    text: str
    reason: FinishReason
    stats: ReplyStats
    thinking: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """A request ended with an error of `mira_engine.errors`."""

    request_id: str
    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSize:
    """What running a model in one precision takes on the disk, in bytes.

    Attributes:
        precision: Of the target.
        prepared_bytes: Backbone and every store that is needed.
        draft_bytes: The draft experts among them.
        peak_bytes: The most that download and preparation hold, all files kept.
        peak_deleting_bytes: The most if weight files come one after another and each goes as
            soon as it is converted; `None` where it is not known which file holds what, and
            for a folder, whose files are never deleted.
    """

    precision: Precision
    prepared_bytes: int
    draft_bytes: int
    peak_bytes: int
    peak_deleting_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescribed:
    """What a model is, from its configuration and the names of its tensors.

    Attributes:
        family: transformers' `model_type`, empty where it is not known.
        revision: Commit of a hub model, else an empty string.
        license: As the hub tells it, or an empty string.
        num_parameters: All of them; 0 where the model cannot be described.
        num_active_parameters: Those that one token uses.
        num_layers: MoE layers.
        num_experts: Routed experts in each.
        top_k: Experts that a token uses in each.
        expert_shape: Dimensions of every expert, `None` where they are not known.
        download_bytes: Of the weights and all other files that are needed.
        cached_bytes: What of them is here already.
        sizes: For each precision that can hold the experts.
        notes: What else a person should know.
        refusal: Why the engine cannot run it, empty where it can.
        hint: What to do about that.
    """

    request_id: str
    model: str
    title: str
    family: str = ""
    revision: str = ""
    license: str = ""
    num_parameters: int = 0
    num_active_parameters: int = 0
    num_layers: int = 0
    num_experts: int = 0
    top_k: int = 0
    expert_shape: ExpertShape | None = None
    download_bytes: int = 0
    cached_bytes: int = 0
    sizes: tuple[PreparedSize, ...] = ()
    notes: tuple[str, ...] = ()
    refusal: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFact:
    """One thing to know about a machine, an installation or a model on it.

    Attributes:
        code: Stable and short, for example `native-kernels`.
        text: One sentence or value for people.
        mark: Whether it is as it should be.
        hint: What to do where it is not.
        value: The measured or counted figure behind it, in the unit its code names.
    """

    code: str
    text: str
    mark: FactMark = FactMark.OK
    hint: str = ""
    value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineDescribed:
    """The answer to `DescribeMachine`, in the order of a report."""

    request_id: str
    facts: tuple[MachineFact, ...]


Event = (
    EngineReady
    | Heartbeat
    | Notice
    | PrepareProgress
    | PrepareDone
    | ProfileProgress
    | ProfileDone
    | ModelLoaded
    | PromptProgress
    | TokenDelta
    | ContextTrimmed
    | ResidencySample
    | StatsSample
    | GenerationDone
    | RequestFailed
    | PlanMade
    | ModelDescribed
    | MachineDescribed
    | EvaluationProgress
    | EvaluationDone
)

"""What the app asks of the engine process, and what the engine tells it.

Frozen, plain values: strings, numbers, enums, tuples, and dataclasses of those, so
that `mira_engine.wire` can send each as one line of JSON. `PROTOCOL_VERSION` changes
when a field's meaning does; both ends compare it before anything else is said. What is
asked is in `mira_engine.requests`, what both are made of in `mira_engine.values`; all of it
can be had from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import MachineRates
from .evaluation_events import DEFAULT_EVALUATION_TOKENS as DEFAULT_EVALUATION_TOKENS
from .evaluation_events import EvaluateModel as EvaluateModel
from .evaluation_events import EvaluationDone as EvaluationDone
from .evaluation_events import EvaluationProgress as EvaluationProgress
from .evaluation_events import EvaluationReport as EvaluationReport
from .evaluation_events import KindFidelity as KindFidelity
from .evaluation_events import PrecisionFidelity as PrecisionFidelity
from .requests import Cancel as Cancel
from .requests import DescribeMachine as DescribeMachine
from .requests import DescribeModel as DescribeModel
from .requests import Generate as Generate
from .requests import LoadModel as LoadModel
from .requests import PlanModel as PlanModel
from .requests import PrepareModel as PrepareModel
from .requests import ProfileModel as ProfileModel
from .requests import Reconfigure as Reconfigure
from .requests import Request as Request
from .requests import Shutdown as Shutdown
from .types import ComputeDtype, ExpertShape, FactMark, FinishReason, Precision, ReplyPart
from .values import ChatMessage as ChatMessage
from .values import DepthResult as DepthResult
from .values import KProfile as KProfile
from .values import MemoryPlan as MemoryPlan
from .values import PlanAlternative as PlanAlternative
from .values import PlannedSteps as PlannedSteps
from .values import ReplyStats as ReplyStats

PROTOCOL_VERSION = 1


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
        dtype: Arithmetic in force, `None` where the model runs in no engine of ours.
    """

    request_id: str
    model: str
    title: str
    context_length: int
    plan: MemoryPlan | None
    load_s: float
    is_cache_kept: bool = False
    link_bytes_per_s: float = 0.0
    dtype: ComputeDtype | None = None


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
        steps: What single steps should take; `None` where nothing fits.
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
    steps: PlannedSteps | None = None


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

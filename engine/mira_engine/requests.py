"""What the app asks of the engine process. Frozen, plain values, as `mira_engine.events` says."""

from __future__ import annotations

from dataclasses import dataclass, field

from .config import EngineConfig, MachineRates, SamplingConfig
from .evaluation_events import EvaluateModel
from .types import Precision, Rounding
from .values import ChatMessage


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

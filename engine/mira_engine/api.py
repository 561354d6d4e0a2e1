"""The engine as the app sees it: requests, events, errors and how to start it.

The only module of the engine that the app imports. Torch-free, so that importing it
costs milliseconds; everything that computes runs in the process which
`default_engine_command` starts.
"""

from __future__ import annotations

import sys
import typing
from pathlib import Path

from .config import (
    LIVE_FIELDS,
    MAX_DRAFT_TOKENS,
    EngineConfig,
    LinkConfig,
    MachineRates,
    MemoryAmount,
    SamplingConfig,
    format_bytes,
)
from .errors import (
    BudgetError,
    CancelledError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    DiskSpaceError,
    EngineProcessError,
    FormatError,
    GenerationError,
    HubAccessError,
    HubBusyError,
    HubError,
    HubUnreachableError,
    IndexUnreachableError,
    MiraError,
    ModelBusyError,
    ModelError,
    NonFiniteError,
    PrepareError,
    StoreError,
    TraceError,
    UnknownModelError,
    UnsupportedModelError,
    error_from_fields,
)
from .events import (
    DEFAULT_EVALUATION_TOKENS,
    PROTOCOL_VERSION,
    Cancel,
    ChatMessage,
    ContextTrimmed,
    DescribeMachine,
    DescribeModel,
    EngineReady,
    EvaluateModel,
    EvaluationDone,
    EvaluationProgress,
    EvaluationReport,
    Event,
    Generate,
    GenerationDone,
    Heartbeat,
    KindFidelity,
    KProfile,
    LoadModel,
    MachineDescribed,
    MachineFact,
    MemoryPlan,
    ModelDescribed,
    ModelLoaded,
    Notice,
    PlanAlternative,
    PlanMade,
    PlanModel,
    PrecisionFidelity,
    PrepareDone,
    PreparedSize,
    PrepareModel,
    PrepareProgress,
    ProfileDone,
    ProfileModel,
    ProfileProgress,
    PromptProgress,
    Reconfigure,
    ReplyStats,
    Request,
    RequestFailed,
    ResidencySample,
    Shutdown,
    StatsSample,
    TokenDelta,
)
from .system_memory import SystemMemory, system_memory
from .types import (
    CacheMode,
    CompileMode,
    ComputeDtype,
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
from .wire import decode, encode, to_plain

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from .library import ModelHome, ModelLibrary
    from .model.reply_parts import THINK_TAGS, ThinkTags
    from .simulator.cases import SimulationCase
    from .simulator.report import SimulationReport, SimulationRow
    from .simulator.sweep import SimulationRequest

__all__ = [
    "DEFAULT_EVALUATION_TOKENS",
    "LIVE_FIELDS",
    "MAX_DRAFT_TOKENS",
    "PROTOCOL_VERSION",
    "THINK_TAGS",
    "BudgetError",
    "CacheMode",
    "Cancel",
    "CancelledError",
    "ChatMessage",
    "CheckpointError",
    "CompileMode",
    "ComputeDtype",
    "ConfigError",
    "ContextLengthError",
    "ContextTrimmed",
    "DescribeMachine",
    "DescribeModel",
    "DiskSpaceError",
    "DraftDense",
    "DraftExperts",
    "EngineConfig",
    "EngineProcessError",
    "EngineReady",
    "EvaluateModel",
    "EvaluationDone",
    "EvaluationProgress",
    "EvaluationReport",
    "Event",
    "ExpertShape",
    "FactMark",
    "FinishReason",
    "FormatError",
    "Generate",
    "GenerationDone",
    "GenerationError",
    "Heartbeat",
    "HubAccessError",
    "HubBusyError",
    "HubError",
    "HubUnreachableError",
    "IndexUnreachableError",
    "KProfile",
    "KindFidelity",
    "LinkConfig",
    "LoadModel",
    "MachineDescribed",
    "MachineFact",
    "MachineRates",
    "MemoryAmount",
    "MemoryPlan",
    "MiraError",
    "ModelBusyError",
    "ModelDescribed",
    "ModelError",
    "ModelHome",
    "ModelLibrary",
    "ModelLoaded",
    "NonFiniteError",
    "Notice",
    "PlanAlternative",
    "PlanMade",
    "PlanModel",
    "Precision",
    "PrecisionFidelity",
    "PrepareDone",
    "PrepareError",
    "PrepareModel",
    "PrepareProgress",
    "PreparedSize",
    "ProfileDone",
    "ProfileModel",
    "ProfileProgress",
    "PromptProgress",
    "Reconfigure",
    "ReplyPart",
    "ReplyStats",
    "Request",
    "RequestFailed",
    "ResidencySample",
    "Rounding",
    "SamplingConfig",
    "Shutdown",
    "SimulationCase",
    "SimulationReport",
    "SimulationRequest",
    "SimulationRow",
    "StatsSample",
    "StoreError",
    "Strategy",
    "SystemMemory",
    "ThinkTags",
    "TokenDelta",
    "TraceError",
    "UnknownModelError",
    "UnsupportedModelError",
    "decode",
    "default_engine_command",
    "encode",
    "error_from_fields",
    "format_bytes",
    "planned_case",
    "simulate",
    "system_memory",
    "to_plain",
]


def __getattr__(name: str) -> object:
    """Loads the library, the simulator or the reply's parts when they are first asked for."""
    if name in ("ModelHome", "ModelLibrary"):
        from . import library

        return getattr(library, name)
    if name in ("SimulationReport", "SimulationRow"):
        from .simulator import report

        return getattr(report, name)
    if name == "SimulationRequest":
        from .simulator import sweep

        return sweep.SimulationRequest
    if name == "SimulationCase":
        from .simulator import cases

        return cases.SimulationCase
    if name in ("THINK_TAGS", "ThinkTags"):
        from .model import reply_parts

        return getattr(reply_parts, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def default_engine_command(data_dir: Path, cache_dir: Path | None = None) -> list[str]:
    """Returns the command line of the engine process.

    The process reads requests from standard input and writes events to standard output,
    one line of JSON each; the end of standard input is a shutdown.

    Args:
        data_dir: Models and expert stores.
        cache_dir: Native kernels and compiled steps; without it there are none.
    """
    command = [sys.executable, "-m", "mira_engine.worker", "--data-dir", str(data_dir)]
    if cache_dir is not None:
        command += ["--cache-dir", str(cache_dir)]
    return command


def planned_case(made: PlanMade, *, model: str, memory: str) -> SimulationCase | None:
    """Takes what a simulation needs of a machine and its memory out of a plan for them.

    Args:
        made: The plan.
        model: Its title.
        memory: What was asked for, for people.

    Returns:
        The case, `None` where no whole expert of the target fits.
    """
    from .simulator import cases

    return cases.planned_case(made, model=model, memory=memory)


def simulate(
    request: SimulationRequest, on_row: Callable[[SimulationRow], None] = lambda row: None
) -> SimulationReport:
    """Compares caching and prefetching systems on a virtual clock, in this process.

    Args:
        request: What to compare.
        on_row: Told each row as it is done.

    Raises:
        ConfigError: No such policy, or a number that cannot be used.
        TraceError: A trace cannot be read.
    """
    from .simulator.sweep import compare

    return compare(request, on_row)

"""Plans a model without loading it: for `mira-chat plan`, and before anything is downloaded.

Needs the model's `config.json` only. Runs in the engine process, because transformers is
asked for sizes and the machine is measured there; the policy it asks measures nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from .checkpoint.architecture import load_config
from .checkpoint.builtin import builtin_config
from .checkpoint.hub import is_complete
from .checkpoint.shards import INDEX_FILE
from .checkpoint.store import ExpertStore
from .checkpoint.writing import disk_errors
from .config import EngineConfig, MachineRates, MemoryAmount, format_bytes
from .errors import MiraError
from .events import DepthResult, PlanMade, PlanModel
from .host_assumptions import host_work
from .library import ModelHome
from .model.facts import context_length, facts_of
from .policy.alternatives import (
    DEFAULT_PROMPT_TOKENS,
    PlanWishes,
    compare_plans,
    refusal,
    usable_memory,
    usual_budget,
    with_link,
)
from .policy.budget import ModelFacts, room_for_experts
from .policy.cost_model import usual_expectations
from .policy.planned_steps import planned_steps
from .predictor.bank import predictors_bytes
from .profiles import ProfileKey, load_profile
from .runtime.probe import (
    PROFILE_FILE,
    MachineProfile,
    default_num_threads,
    machine_name,
    measure_rates,
)
from .system_memory import system_memory

_CARD_LAYOUT = "rows"
"""INT4 layout on graphics cards; the packed ones are those of processors."""


def plan_model(
    home: ModelHome, request: PlanModel, *, data_dir: Path, cache_dir: Path | None
) -> PlanMade:
    """Compares the uses of the memory for a model.

    Args:
        home: The model; need not be prepared.
        request: What is asked for, and the machine if it is another one.
        data_dir: Where expert stores are: the link is measured there.
        cache_dir: Where measured rates are kept, `None` to measure each time.

    Raises:
        UnknownModelError: There is no `config.json`.
        UnsupportedModelError: The engine does not run the model.
        FormatError: The precision cannot hold its experts.
        ConfigError: The context is longer than the model's.
        PrepareError: The disk of the expert stores cannot be written to, to measure it.
    """
    config, model_config = request.config, _model_config(home)
    rates = request.machine or with_link(
        own_rates(config, data_dir, cache_dir),
        bytes_per_s=config.link.bytes_per_s,
        latency_s=config.link.latency_s,
    )
    facts = facts_of(model_config, config, layout=_CARD_LAYOUT if rates.is_gpu else None)
    if rates.is_gpu:
        facts = replace(facts, draft_copy_bytes=0)  # Split layers are the processor's.
    memory_bytes, notes = _memory(config, rates)
    notes = [*_notes_on_weights(home), *notes]
    budget = config.budget
    if budget is None and config.memory_bytes is None and request.machine is None:
        budget, note = usual_budget(facts, memory_bytes)
        notes.append(note)
    notes += _notes_on_host(facts, rates)
    host, note = host_work(config, rates, _kept_rates(config, cache_dir))
    if note:
        notes.append(note)
    context = context_length(model_config, config.context_length)
    wishes = PlanWishes(
        budget=budget,
        memory_bytes=memory_bytes,
        num_draft_tokens=config.num_draft_tokens,
        draft_dense=config.draft_dense,
        draft_experts=config.draft_experts,
        precision=config.precision,
        is_compact_allowed=request.is_compact_allowed,
        has_heads=predictors_bytes(home.predictors_dir) > 0,
        num_prompt_tokens=min(DEFAULT_PROMPT_TOKENS, context),
    )
    alternatives = compare_plans(
        facts, wishes, rates, usual_expectations(is_builtin=home.is_builtin), host
    )
    error = None
    if not any(each.is_chosen for each in alternatives):
        error = refusal(facts, wishes, alternatives)
    return PlanMade(
        request_id=request.request_id,
        model=request.model,
        title=home.title,
        machine=rates,
        memory_bytes=memory_bytes,
        context_length=context,
        num_prompt_tokens=wishes.num_prompt_tokens,
        alternatives=alternatives,
        notes=tuple(notes),
        refusal=error.message if error else "",
        hint=error.hint if error else "",
        measured=None if request.machine else _measured(home, config, facts, budget, notes),
        steps=planned_steps(facts, rates, alternatives, num_cached_tokens=wishes.num_prompt_tokens),
    )


def _measured(
    home: ModelHome,
    config: EngineConfig,
    facts: ModelFacts,
    budget: MemoryAmount | None,
    notes: list[str],
) -> DepthResult | None:
    """Returns what a profile of such a load measured on this machine; `None` without one."""
    try:
        revision = ExpertStore.open(home.store_dir(config.precision)).manifest.revision
    except MiraError:
        return None  # not prepared, so never measured
    room = budget or MemoryAmount(
        num_bytes=max(1, room_for_experts(facts, config.memory_bytes or 0))
    )
    with _threads_of(config):
        key = ProfileKey.of_engine(
            config,
            machine=machine_name(),
            model_revision=revision,
            budget_bytes=room.resolve(facts.reference_bytes),
        )
    profile = load_profile(home.root, key, lambda code, text: notes.append(text))
    if profile is None:
        return None
    k = profile.best if config.num_draft_tokens is None else config.num_draft_tokens
    return next((each for each in profile.results if each.num_draft_tokens == k), None)


@contextlib.contextmanager
def _threads_of(config: EngineConfig) -> Iterator[None]:
    """Gives torch the threads that a load would, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(config.num_threads or default_num_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def own_rates(config: EngineConfig, data_dir: Path, cache_dir: Path | None) -> MachineRates:
    """Returns this machine's rates: those kept from before, else measured and kept now."""
    kept = _kept_rates(config, cache_dir)
    if kept is not None:
        return kept
    num_threads = config.num_threads or default_num_threads()
    memory_bytes = system_memory().available_bytes
    profile = MachineProfile(cache_dir / PROFILE_FILE) if cache_dir is not None else None
    with _threads_of(config), disk_errors(data_dir):
        data_dir.mkdir(parents=True, exist_ok=True)
        rates = measure_rates(
            data_dir,
            num_threads=num_threads,
            num_reader_threads=config.num_reader_threads,
            device_memory_bytes=memory_bytes,
        )
    if profile is not None and cache_dir is not None:
        with contextlib.suppress(OSError):  # Then it is measured again the next time.
            cache_dir.mkdir(parents=True, exist_ok=True)
        profile.keep_rates(rates, num_threads)
    return rates


def _kept_rates(config: EngineConfig, cache_dir: Path | None) -> MachineRates | None:
    """Returns this machine's rates where they were measured before; measures nothing."""
    if cache_dir is None:
        return None
    num_threads = config.num_threads or default_num_threads()
    profile = MachineProfile(cache_dir / PROFILE_FILE)
    return profile.rates(num_threads, system_memory().available_bytes)


def _model_config(home: ModelHome) -> PreTrainedConfig:
    for folder in (home.checkpoint_dir, home.backbone_dir):
        if (folder / "config.json").is_file():
            return load_config(folder)
    return builtin_config() if home.is_builtin else load_config(home.checkpoint_dir)


def _memory(config: EngineConfig, rates: MachineRates) -> tuple[int, list[str]]:
    """Returns the most that the engine may hold, and what to say about it."""
    usable = usable_memory(rates.device_memory_bytes)
    if config.memory_bytes is None:
        margin = rates.device_memory_bytes - usable
        return usable, [
            f"{format_bytes(margin)} of {format_bytes(rates.device_memory_bytes)} are left to "
            "others; --memory changes it."
        ]
    if config.memory_bytes > rates.device_memory_bytes:
        return rates.device_memory_bytes, [
            f"--memory is more than there is: {format_bytes(rates.device_memory_bytes)}."
        ]
    return config.memory_bytes, []


def _notes_on_weights(home: ModelHome) -> list[str]:
    """Says so where nothing but a configuration stands behind the figures."""
    folder = home.checkpoint_dir
    if home.is_builtin or home.ready_precisions or is_complete(folder):
        return []
    is_indexed = (folder / INDEX_FILE).is_file()
    if not is_indexed and any(folder.glob("*.safetensors")):
        return []  # Weights without an index are read as they lie there.
    what = "No weights of this model are"
    if is_indexed:
        what = "Some weights of this model are not"
    return [
        f"{what} here: sizes and speeds follow from its config.json alone; whether the weights "
        "can be read is not known."
    ]


def _notes_on_host(facts: ModelFacts, rates: MachineRates) -> list[str]:
    if not rates.is_gpu:
        return []
    needed = facts.num_experts * facts.whole_record_bytes
    if rates.host_memory_bytes is None:
        return [f"Host memory is taken to hold all experts: {format_bytes(needed)}."]
    if rates.host_memory_bytes >= needed:
        return []
    return [
        f"Host memory holds {rates.host_memory_bytes / needed:.0%} of the experts; the rest "
        f"comes from the disk at {format_bytes(rates.disk_bytes_per_s)}/s."
    ]

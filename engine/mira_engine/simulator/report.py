"""What a comparison found. Times in seconds of the virtual clock, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRow:
    """One system on one machine with one memory and one link.

    Attributes:
        policy: The system.
        is_bound: Whether it knows the future, so that nobody can run it.
        machine: The card, empty where only numbers were given.
        memory: What the machine was given, for people.
        slots_per_layer: Whole experts that its slots hold for each layer, in experts of what
            was decoded.
        memory_share: Bytes of slots and draft, of the bytes of all experts.
        link_bytes_per_s: The link.
        num_draft_tokens: K, 0 for a system without a draft.
        hit_rate: Of routed tokens.
        prefetched_share: Of routed tokens, those served first by a prefetch.
        bytes_per_token: Moved.
        stall_s: A token's waiting.
        tpot_s: A token's time.
        tokens_per_round: New tokens of a target pass.
    """

    policy: str
    is_bound: bool = False
    machine: str = ""
    memory: str = ""
    slots_per_layer: float
    memory_share: float
    link_bytes_per_s: float
    num_draft_tokens: int = 0
    hit_rate: float
    prefetched_share: float
    bytes_per_token: float
    stall_s: float
    tpot_s: float
    tokens_per_round: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """What came of a request.

    Attributes:
        title: What was decoded.
        model: What was planned for, empty where only numbers were given.
        num_layers: MoE layers.
        num_experts: Routed experts of a layer.
        top_k: Experts of a token in a layer.
        acceptance: Of a whole draft.
        fidelity: That was simulated.
        rows: Machine by machine, memory by memory, link by link.
        notes: What was mapped, assumed or left out, a sentence each.
    """

    title: str
    model: str = ""
    num_layers: int
    num_experts: int
    top_k: int
    acceptance: float
    fidelity: float
    rows: tuple[SimulationRow, ...]
    notes: tuple[str, ...] = ()

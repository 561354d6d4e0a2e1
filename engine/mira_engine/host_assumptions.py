"""What a plan takes the processor beside a card to compute of its misses, and from where.

When a model is loaded on a card the processor is measured on real records. A plan loads
nothing: it takes what the machine file says, else what follows from this machine's own rates,
else what one other machine reached. Says which, and where the engine would not ask it at all.
"""

from __future__ import annotations

from .config import EngineConfig, MachineRates, format_bytes
from .policy.host_plan import PACKED, HostWork
from .types import ComputeDtype

READING_SHARE = 0.25
"""Of the rate at which a processor reads memory, what its products with one row reach. Measured
2026-11-29 on one Zen 4 thread: 6 to 8 GB/s in bfloat16 where reading runs at 28."""

USUAL_BYTES_PER_S = 7e9
"""What that thread reached: taken where nothing is known of the processor."""


def host_work(
    config: EngineConfig, rates: MachineRates, own: MachineRates | None
) -> tuple[HostWork | None, str]:
    """Returns what the processor may compute, and a sentence on it for people.

    The same conditions as where a model is loaded on a card: not with `--deterministic`, not
    in float16. That a resident draft takes half of nested experts is said plan by plan.

    Args:
        config: Precision, arithmetic, determinism.
        rates: The machine that is planned for.
        own: This machine's rates where they were measured before.

    Returns:
        `None` where it computes nothing, with the reason; no reason where there is no card.
    """
    if not rates.is_gpu:
        return None, ""
    if config.is_deterministic:
        return None, "Misses are all copied to the card: --deterministic leaves them to it."
    dtype = config.dtype or (ComputeDtype.BFLOAT16 if rates.has_bfloat16 else ComputeDtype.FLOAT16)
    if dtype is ComputeDtype.FLOAT16:
        return None, "Misses are all copied to the card: the processor computes no float16."
    plain: float | None
    (plain, source), packed = _plain_rate(rates, own), rates.host_packed_bytes_per_s
    what = f"{config.precision} experts"
    if dtype is ComputeDtype.FLOAT32:  # Records of any kind are unpacked to it.
        plain, what = packed, "experts in float32"
    if dtype is ComputeDtype.FLOAT32 or config.precision in PACKED:
        source = "host_packed_bytes_per_s of the machine file"
    work = HostWork(plain_bytes_per_s=plain, packed_bytes_per_s=packed)
    rate = work.bytes_per_s(config.precision)
    if rate is None:
        return work, (
            f"Misses are all copied to the card: for {what} the processor unpacks every record, "
            "and how fast is not known (host_packed_bytes_per_s of a machine file)."
        )
    return work, (
        f"The processor beside the card may compute misses, {format_bytes(rate)}/s of {what}: "
        f"{source}. Prompts are the card's."
    )


def _plain_rate(rates: MachineRates, own: MachineRates | None) -> tuple[float, str]:
    """Returns the rate for experts that are not unpacked, and where it is from."""
    if rates.host_bytes_per_s is not None:
        return rates.host_bytes_per_s, "host_bytes_per_s of the machine file"
    if own is not None:
        return READING_SHARE * own.device_bytes_per_s, (
            f"taken from {own.name}, which reads {format_bytes(own.device_bytes_per_s)}/s; "
            "host_bytes_per_s of a machine file says better"
        )
    return USUAL_BYTES_PER_S, (
        "assumed, as one thread of another machine does; host_bytes_per_s of a machine file "
        "says better"
    )

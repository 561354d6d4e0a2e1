"""`mira-chat simulate`: policies on a virtual clock."""

from __future__ import annotations

import sys
from typing import Annotated

from ..options import Flags, Json, option, takes_settings
from ..reporting import reporting_errors


@takes_settings("k", "seed")
def simulate(
    flags: Flags,
    trace: Annotated[
        str | None,
        option("--trace", metavar="FILE", help="Routing: of `run --trace`, or arrays in .npz."),
    ] = None,
    train: Annotated[
        str | None,
        option("--train", metavar="FILE", help="Learn from this one, not from half of FILE."),
    ] = None,
    policy: Annotated[
        list[str] | None, option("--policy", metavar="P", help="Only this one; repeatable.")
    ] = None,
    slots_per_layer: Annotated[
        list[int] | None,
        option(
            "--slots-per-layer", metavar="N", help="Experts that a layer's slots hold; repeatable."
        ),
    ] = None,
    link_rate: Annotated[
        list[str] | None,
        option("--link-rate", metavar="25GB", help="Link, per second; repeatable."),
    ] = None,
    record: Annotated[
        str | None, option("--record", metavar="8MiB", help="Bytes of one whole expert.")
    ] = None,
    resident_ms: Annotated[
        float | None,
        option("--resident-ms", metavar="MS", help="A token with every expert resident."),
    ] = None,
    draft_ms: Annotated[
        float | None, option("--draft-ms", metavar="MS", help="A draft token.")
    ] = None,
    acceptance: Annotated[
        float | None, option("--acceptance", metavar="A", help="Of draft tokens, 0 to 1.")
    ] = None,
    fidelity: Annotated[
        float | None,
        option("--fidelity", metavar="F", help="Share of experts the draft's routing names."),
    ] = None,
    max_tokens: Annotated[
        int | None, option("--max-tokens", metavar="N", help="Most tokens to decode.")
    ] = None,
    is_json: Json = False,
) -> None:
    """Compares caching and prefetching policies on a virtual clock, without a model."""
    given = {name: value for name, value in locals().items() if name not in ("flags", "is_json")}
    from ..simulation import run_simulation

    with reporting_errors():
        run_simulation({**given, **flags}, is_json=is_json, out=sys.stdout, err=sys.stderr)

"""`mira-chat simulate`: policies on a virtual clock."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..options import Flags, option, takes_settings
from ..reporting import reporting_errors

_JSON_HELP = (
    "Print one JSON object: `model`, `title` (what was decoded), its shape, `notes` and `rows`. "
    "A row has `policy`, `is_bound`, `machine`, `memory`, `slots_per_layer`, `memory_share` (of "
    "all experts), `link_bytes_per_s`, `num_draft_tokens`, `hit_rate`, `prefetched_share`, "
    "`bytes_per_token`, `stall_s` and `tpot_s` (a token), `tokens_per_round`."
)


@takes_settings("precision", "context", "k", "seed")
def simulate(
    flags: Flags,
    card: Annotated[
        list[str] | None,
        option(
            "--card",
            metavar="CARD|FILE",
            help="Plan for this card, as `plan --machine` does; repeatable. Without it, but with "
            "--memory, --budget or --model, for this machine.",
        ),
    ] = None,
    memory: Annotated[
        list[str] | None,
        option("--memory", metavar="8GiB", help="All that the engine may hold there; repeatable."),
    ] = None,
    budget: Annotated[
        list[str] | None,
        option("--budget", metavar="300MiB|40%", help="What experts may hold; repeatable."),
    ] = None,
    model: Annotated[
        str | None,
        option(
            "--model",
            metavar="M",
            help="Plan for this model: a name or title of the catalog, `builtin`, `owner/name` of "
            "the hub, or a folder with at least a config.json.",
        ),
    ] = None,
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
    is_json: Annotated[bool, typer.Option("--json", help=_JSON_HELP)] = False,
) -> None:
    """Compares caching and prefetching policies on a virtual clock, without a model.

    With --card, --memory, --budget or --model, slots, bytes, link and times are those of a plan
    for that card and memory, and every policy has the same memory, unless it is called
    same-cache (-sc). What is given by hand wins. Without --trace, routing is drawn.
    """
    given = {name: value for name, value in locals().items() if name not in ("flags", "is_json")}
    from .. import wiring
    from ..card_cases import CasePlanner
    from ..paths import cache_dir
    from ..simulation import run_simulation

    with reporting_errors():
        run_simulation(
            {**given, **flags},
            is_json=is_json,
            out=sys.stdout,
            err=sys.stderr,
            planner=CasePlanner(
                wiring.read_settings,
                lambda: wiring.make_client(),
                wiring.make_catalog(),
                cache_dir(),
            ),
        )

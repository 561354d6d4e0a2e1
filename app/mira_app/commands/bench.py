"""`mira-chat bench`: whole replies of the chosen model, measured here."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import wiring
from ..options import CHAT_SETTINGS, Flags, Json, ModelArgument, Plain, takes_settings
from ..reporting import reporting_errors

_NOT_MEASURED = ("model", "connect", "temperature", "max_tokens", "seed")


@takes_settings(*(name for name in CHAT_SETTINGS if name not in _NOT_MEASURED))
def bench(
    flags: Flags,
    model: ModelArgument = None,
    is_quick: Annotated[
        bool, typer.Option("--quick", help="3 prompts and 24 tokens each, not 10 and 64.")
    ] = False,
    is_json: Json = False,
    is_plain: Plain = False,
) -> None:
    """Measures replies to shipped prompts here: TTFT, tok/s, hits, stalls, acceptance."""
    with reporting_errors():
        from ..benchmark import measure

        settings = wiring.read_settings({**flags, "model": model})
        with wiring.make_client() as client:
            report = measure(
                wiring.make_answerer(client, settings, is_plain=is_plain),
                settings.sampling,
                is_quick=is_quick,
                system_prompt=settings.system_prompt,
                say=lambda text: typer.echo(text, err=True),
            )
        typer.echo(report.to_json() if is_json else "\n".join(report.lines()))

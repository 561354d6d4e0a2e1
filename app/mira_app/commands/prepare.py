"""`mira-chat pull` and `mira-chat prepare`: make a model ready."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from mira_engine.api import Rounding

from .. import wiring
from ..options import Flags, Plain, takes_settings
from ..reporting import reporting_errors

NoPredictors = Annotated[
    bool,
    typer.Option("--no-predictors", help="Train none; the model chats without them."),
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Train predictors, and calibrate a GPTQ draft, on the prompts of a text file, blank "
        "lines between them.",
        show_default=False,
    ),
]
Draft = Annotated[
    Rounding | None,
    typer.Option(
        "--draft",
        help="How the draft's INT4 codes are chosen: each the nearest, or by GPTQ, which takes "
        "minutes to hours and `pip install 'mira-chat[gptq]'`. They stay as they are without.",
        show_default=False,
    ),
]
DraftFrom = Annotated[
    Path | None,
    typer.Option(
        "--draft-from",
        metavar="FOLDER",
        help="Take the draft's INT4 codes from a GPTQ checkpoint of the same model.",
        show_default=False,
    ),
]


DeleteDownload = Annotated[
    bool | None,
    typer.Option(
        "--delete-download/--keep-download",
        help="Delete each downloaded file as soon as it is converted, or keep them all; without "
        "it they go where the disk has no room for both.",
        show_default=False,
    ),
]


@takes_settings("precision")
def prepare(
    model: Annotated[
        str,
        typer.Argument(help="`builtin`, `owner/name` on the hub, or the folder of a checkpoint."),
    ],
    flags: Flags,
    no_predictors: NoPredictors = False,
    calibration: Calibration = None,
    is_download_deleted: DeleteDownload = None,
    draft: Draft = None,
    draft_from: DraftFrom = None,
    is_plain: Plain = False,
) -> None:
    """Makes a model ready: fetches, checks, converts, trains predictors. Goes on where it was
    interrupted.
    """
    if no_predictors and calibration is not None and draft is not Rounding.GPTQ:
        raise typer.BadParameter("--calibration makes predictors, --no-predictors makes none")
    if draft is not None and draft_from is not None:
        raise typer.BadParameter("--draft-from says how the draft is made, so leave --draft out")
    _make_ready(
        model,
        flags,
        is_predicting=not no_predictors,
        calibration=calibration,
        is_download_deleted=is_download_deleted,
        draft=draft,
        draft_from=draft_from,
        is_plain=is_plain,
        is_forced=False,
    )


@takes_settings("precision")
def pull(
    model: Annotated[
        str, typer.Argument(help="`owner/name` on the hub, also with `@revision`, or a folder.")
    ],
    flags: Flags,
    no_predictors: NoPredictors = False,
    is_download_deleted: DeleteDownload = None,
    is_plain: Plain = False,
) -> None:
    """Downloads a model and makes it ready, with bytes, rate and time left. Goes on where it
    was interrupted.
    """
    _make_ready(
        model,
        flags,
        is_predicting=not no_predictors,
        calibration=None,
        is_download_deleted=is_download_deleted,
        draft=None,
        draft_from=None,
        is_plain=is_plain,
        is_forced=True,
    )


def _make_ready(
    model: str,
    flags: Flags,
    *,
    is_predicting: bool,
    calibration: Path | None,
    is_download_deleted: bool | None,
    draft: Rounding | None,
    draft_from: Path | None,
    is_plain: bool,
    is_forced: bool,
) -> None:
    with reporting_errors():
        settings = wiring.read_settings({**flags, "model": model})
        with wiring.make_client() as client:
            wiring.make_answerer(client, settings, is_plain=is_plain).prepare(
                is_forced=is_forced,
                is_predicting=is_predicting,
                calibration=None if calibration is None else str(calibration.absolute()),
                is_download_deleted=is_download_deleted,
                draft=draft,
                draft_from=None if draft_from is None else str(draft_from.absolute()),
            )
        typer.echo(f"{model} is ready in {settings.engine.precision}.", err=True)

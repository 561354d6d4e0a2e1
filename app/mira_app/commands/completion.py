"""`mira-chat completion`: the script that a shell reads to complete commands and options."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

PROGRAM = "mira-chat"


class Shell(enum.StrEnum):
    """Shells that can complete."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="For example: mira-chat completion bash.")],
) -> None:
    """Prints a shell's completion script; have the shell's start-up file evaluate it."""
    from typer.completion import get_completion_script

    script = get_completion_script(
        prog_name=PROGRAM, complete_var="_MIRA_CHAT_COMPLETE", shell=shell.value
    )
    typer.echo(script)

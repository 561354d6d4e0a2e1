"""The command line: `mira-chat`, and how its commands are found.

Imports only what parses arguments. A command's module is imported when the command runs,
so that the help and the version cost nothing but typer. How commands end is in
`reporting`, which options they share in `options`.
"""

from __future__ import annotations

import importlib
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .commands import COMMANDS
from .options import CHAT_SETTINGS, Flags, Plain, takes_settings
from .reporting import reporting_streams

_CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}


class CommandGroup(TyperGroup):
    """The commands of `COMMANDS`, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names in the order of the help."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any | None:
        """Imports a command; `None` for a name that is none."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            module = importlib.import_module(f"mira_app.commands.{COMMANDS[cmd_name].module}")
            one = typer.Typer(
                add_completion=False,
                pretty_exceptions_enable=False,
                rich_markup_mode=None,
                context_settings=_CONTEXT_SETTINGS,
            )
            one.command(cmd_name)(getattr(module, COMMANDS[cmd_name].function))
            self.commands[cmd_name] = typer.main.get_command(one)
        return self.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the list of commands without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in COMMANDS.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command that the arguments name; an unknown one ends with the nearest."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = get_close_matches(name, COMMANDS, n=2)
            known = f"Did you mean {' or '.join(near)}?" if near else "See mira-chat --help."
            ctx.fail(f"No such command {name!r}. {known}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=_CONTEXT_SETTINGS,
    help="Chat in the terminal with Mixture-of-Experts models that do not fit the memory you "
    "give them.",
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from .commands import program_version

        typer.echo(f"mira-chat {program_version()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
@takes_settings(*CHAT_SETTINGS)
def program(
    typer_context: typer.Context,
    flags: Flags,
    is_plain: Plain = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Opens the chat. Without a terminal: prepares the model and answers one question."""
    del version
    command = typer_context.invoked_subcommand
    if command is not None:
        if is_plain or any(value is not None for value in flags.values()):
            raise typer.BadParameter(f"options come after the command: mira-chat {command} --...")
        return
    from .commands.chat import begin_chat

    begin_chat(flags, is_plain=is_plain)


def main() -> None:
    """Runs the command line."""
    from typer.completion import completion_init

    completion_init()  # For the scripts of `mira-chat completion`, which ask this program.
    with reporting_streams():
        app(prog_name=Path(sys.argv[0]).name if sys.argv[0].endswith("mira-chat") else "mira-chat")


if __name__ == "__main__":
    main()

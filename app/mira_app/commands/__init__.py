"""The commands of `mira-chat`, one module for those that belong together.

The table below is all that the help needs; nothing else is imported for it.
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """Where a command is: module, function, and the line that the help shows."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "chat": Command("chat", "chat", "Opens the chat, or goes on with one."),
    "run": Command("run", "run", "Answers one prompt."),
    "serve": Command("serve", "serve", "Serves a model to other programs, as OpenAI's do."),
    "models": Command("models", "models", "Lists the models one can pick."),
    "pull": Command("prepare", "pull", "Downloads a model and makes it ready."),
    "prepare": Command("prepare", "prepare", "Makes a model ready; goes on where it stopped."),
    "rm": Command("models", "remove", "Removes what was made for a model."),
    "plan": Command("plan", "plan", "Says where the memory would go and how fast it would be."),
    "profile": Command("profile", "profile", "Measures which K is fastest here."),
    "bench": Command("bench", "bench", "Measures replies of the chosen model here."),
    "eval": Command("eval", "evaluate", "Compares precisions with the model's own experts."),
    "simulate": Command("simulate", "simulate", "Compares policies on a virtual clock."),
    "doctor": Command("doctor", "doctor", "Checks the machine and says what could be better."),
    "export": Command("export", "export_chats", "Writes chats as Markdown or JSON lines."),
    "import": Command("export", "import_chats", "Takes in chats that were exported."),
    "config": Command("config", "config", "Shows each setting and where it comes from."),
    "completion": Command("completion", "completion", "Prints a shell's completion script."),
}
"""Every command by name, in the order of the help."""


def program_version() -> str:
    """Returns the installed version; another text where the program was not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("mira-chat")
    except PackageNotFoundError:
        return "(run from its source tree)"

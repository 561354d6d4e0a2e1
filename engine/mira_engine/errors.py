"""Every error the engine raises on purpose, in one tree.

    MiraError                      .hint says what a person can do about it
    ├── ConfigError                a field has a value that cannot be used
    ├── ModelError                 the model itself
    │   ├── UnknownModelError      no such model, folder or repository
    │   ├── UnsupportedModelError  a family or form the engine does not run
    │   ├── CheckpointError        a shard is missing, truncated or no weights file
    │   └── FormatError            an expert format cannot hold this model's experts
    ├── PrepareError               download or conversion stopped
    │   ├── ModelBusyError         another process works on the model
    │   ├── DiskSpaceError         not enough room on the disk
    │   ├── IndexUnreachableError  the package index does not answer
    │   └── HubError               the hub and its files
    │       ├── HubUnreachableError  no network, no hub there, or offline mode
    │       ├── HubAccessError     no token, licence not accepted, or access refused
    │       └── HubBusyError       too many requests, or the hub is out of order: later again
    ├── StoreError                 an expert store is unfinished or damaged
    ├── BudgetError                the memory given is below what is needed
    │   └── MemoryShortageError    there was less memory than was planned with
    ├── GenerationError            a reply could not go on
    │   ├── ContextLengthError     the prompt is longer than the context
    │   └── NonFiniteError         nan or infinity in the logits
    ├── TraceError                 a routing trace is damaged, or of another version
    ├── CancelledError             somebody asked to stop
    └── EngineProcessError         the engine process died or does not answer

Knows nothing of where errors are shown. Each carries plain fields only, so it can
cross the process boundary (`to_fields`, `error_from_fields`).
"""

from __future__ import annotations

from collections.abc import Callable


class MiraError(Exception):
    """Base of all errors of this project.

    Attributes:
        message: What happened, one sentence.
        hint: What a person can do about it, or an empty string.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def code(self) -> str:
        """Stable name for machines: the class name."""
        return type(self).__name__

    def to_fields(self) -> dict[str, str]:
        """Returns what crosses the process boundary."""
        return {"code": self.code, "message": self.message, "hint": self.hint}

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class ConfigError(MiraError):
    """A field has a value that cannot be used."""

    @classmethod
    def for_field(cls, field: str, value: object, hint: str) -> ConfigError:
        """Builds the error from the field's name, its value and what would be valid."""
        return cls(f"{field} cannot be {value!r}.", hint=hint)


class ModelError(MiraError):
    """Something about the model."""


class UnknownModelError(ModelError):
    """No such model, folder or repository."""


class UnsupportedModelError(ModelError):
    """A family or form that the engine does not run."""


class CheckpointError(ModelError):
    """A shard is missing, truncated or no weights file."""


class FormatError(ModelError):
    """An expert format cannot hold this model's experts."""


class PrepareError(MiraError):
    """Download or conversion stopped."""


class ModelBusyError(PrepareError):
    """Another process works on the model."""


class DiskSpaceError(PrepareError):
    """Not enough room on the disk."""


class IndexUnreachableError(PrepareError):
    """The package index does not answer."""


class HubError(PrepareError):
    """The hub and its files."""


class HubUnreachableError(HubError):
    """No network, no hub there, or offline mode."""


class HubAccessError(HubError):
    """No token, a licence that is not accepted, or access refused."""


class HubBusyError(HubError):
    """Too many requests, or the hub is out of order: later again."""


class StoreError(MiraError):
    """An expert store is unfinished or damaged."""


class BudgetError(MiraError):
    """The memory given is below what is needed."""


class MemoryShortageError(BudgetError):
    """There was less memory than was planned with.

    Attributes:
        planned_bytes: What was planned in all, 0 where nothing was yet. Like the next two it
            does not cross the process boundary.
        budget_bytes: Of that, what was for experts.
        num_prompt_tokens: Prompt tokens of the pass that failed, 0 where it was another one.
    """

    planned_bytes = 0
    budget_bytes = 0
    num_prompt_tokens = 0


class GenerationError(MiraError):
    """A reply could not go on."""


class ContextLengthError(GenerationError):
    """The prompt is longer than the context."""


class NonFiniteError(GenerationError):
    """nan or infinity in the logits."""


class TraceError(MiraError):
    """A routing trace is damaged, or of another version."""


class CancelledError(MiraError):
    """Somebody asked to stop."""


class EngineProcessError(MiraError):
    """The engine process died or does not answer."""


def check_cancelled(is_cancelled: Callable[[], bool]) -> None:
    """Raises `CancelledError` where `is_cancelled` says so."""
    if is_cancelled():
        raise CancelledError("Stopped.")


def _all_errors(base: type[MiraError]) -> dict[str, type[MiraError]]:
    found = {base.__name__: base}
    for sub in base.__subclasses__():
        found.update(_all_errors(sub))
    return found


def error_from_fields(fields: dict[str, str]) -> MiraError:
    """Rebuilds an error from `MiraError.to_fields`; unknown codes become `MiraError`."""
    cls = _all_errors(MiraError).get(fields.get("code", ""), MiraError)
    return cls(fields.get("message", "unknown error"), hint=fields.get("hint", ""))

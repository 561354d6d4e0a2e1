"""Style sheets are parsed once for all apps of a run: each test opens one or two of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from textual.css import stylesheet
from textual.css.model import RuleSet


@pytest.fixture(scope="session", autouse=True)
def _sheets_parsed_once() -> Iterator[None]:
    """Gives apps the rules that the same sheet had with the same variables, as one app does.

    What cannot be parsed is parsed each time.
    """
    parse, tokenize = stylesheet.parse, stylesheet.tokenize_values
    parsed: dict[tuple[object, ...], list[RuleSet]] = {}
    tokenized: dict[frozenset[tuple[str, str]], dict] = {}

    def tokenize_once(values: dict[str, str]) -> dict:
        key = frozenset(values.items())
        if key not in tokenized:
            tokenized[key] = tokenize(values)
        return tokenized[key]

    def parse_once(scope: str, css: str, read_from, *, variable_tokens, **others) -> list[RuleSet]:
        # Tokens of the same variables are the same object, which `tokenized` keeps alive.
        key = (scope, css, read_from, id(variable_tokens), *sorted(others.items()))
        if key not in parsed:
            parsed[key] = list(
                parse(scope, css, read_from, variable_tokens=variable_tokens, **others)
            )
        return parsed[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stylesheet, "tokenize_values", tokenize_once)
        patch.setattr(stylesheet, "parse", parse_once)
        yield

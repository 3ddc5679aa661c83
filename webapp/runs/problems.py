"""What is wrong with a spec, as one sentence for each field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

MAX_SHOWN = 60


@dataclass(frozen=True)
class Problem:
    """Something that would make the run fail. `field` is a dotted path in the spec, '' for the spec as a whole."""

    field: str
    message: str


def from_pydantic(error: ValidationError) -> list[Problem]:
    """One problem for each thing that pydantic found, in words for people."""
    return [Problem(".".join(map(str, item["loc"])), _sentence(item)) for item in error.errors()]


def _sentence(item: Any) -> str:
    found, kind, context = item["input"], item["type"], item.get("ctx", {})
    if found in ("", None) and kind != "value_error":
        return "This is empty; a value is needed."
    if kind == "value_error":
        text = str(context["error"])
        return text[0].upper() + text[1:].rstrip(".") + "."
    if kind == "extra_forbidden":
        return "There is no such setting; see the list of settings in the form."
    if kind == "missing":
        return "This is missing."
    allowed = _ALLOWED.get(kind)
    if allowed is None:
        return f"Found {_short(found)}: {item['msg'].rstrip('.')}."
    limits = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in context.items()}
    return f"Found {_short(found)}; {allowed.format(**limits)}."


_ALLOWED = {
    "int_parsing": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "int_type": "a whole number is needed",
    "float_parsing": "a number is needed",
    "float_type": "a number is needed",
    "finite_number": "a finite number is needed",
    "bool_parsing": "true or false is needed",
    "bool_type": "true or false is needed",
    "string_type": "text is needed",
    "list_type": "a list is needed",
    "dict_type": "a mapping of names to values is needed",
    "model_type": "a mapping of settings is needed",
    "greater_than": "a number above {gt} is needed",
    "greater_than_equal": "at least {ge} is needed",
    "less_than": "a number below {lt} is needed",
    "less_than_equal": "at most {le} is allowed",
    "literal_error": "allowed are {expected}",
    "string_too_short": "at least {min_length} characters are needed",
    "string_too_long": "at most {max_length} characters are allowed",
    "string_pattern_mismatch": "a Python name is needed (letters, digits and underscores)",
    "too_short": "at least {min_length} is needed",
}
"""What is allowed, by pydantic's error type; names in braces come from the error's context."""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"

"""An error of the trainer as one sentence for the run's page. Light to import."""

from __future__ import annotations

from pydantic import ValidationError


def sentence(error: BaseException, log: str = "trainer.log") -> str:
    """What happened, for people: the error's first line, with the place to turn where we know it. `log` has the rest."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return (
            "The trainer ran out of memory: lower training.token_budget or per_device_train_batch_size, or turn on gradient "
            "checkpointing."
        )
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the spec"
        return f"{place} is {first['input']!r}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    if isinstance(error, (LookupError, AttributeError, AssertionError, NameError)):
        # A fault of ours, whose text alone says nothing.
        text = f"The trainer met an error of its own ({type(error).__name__}: {text}); {log} has the details"
    return text[:1].upper() + text[1:]

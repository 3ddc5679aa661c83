"""A run's name, tags and notes: they say what it is and steer nothing, so they may change at any time."""

from __future__ import annotations

import re
from collections.abc import Iterable

from django.db import transaction

from trainer_core.spec import RunSpec
from webapp.accounts.models import User
from webapp.runs.lifecycle import Refused, record
from webapp.runs.models import Run

LONGEST_TAG, MOST_TAGS = 60, 50


def describe(
    run: Run, actor: User, *, name: str | None = None, tags: Iterable[str] | None = None, notes: str | None = None
) -> bool:
    """Change what is given, in the list and in the run's settings; an event says what. False when nothing is different.

    Raises Refused with a sentence for too many or too long tags, and pydantic.ValidationError for the rest.
    """
    with transaction.atomic():
        locked = Run.objects.select_for_update().get(pk=run.pk)
        before = {"name": locked.name, "tags": locked.tags, "notes": locked.spec.get("notes", "")}
        given = {"name": name, "tags": None if tags is None else _checked(tags), "notes": notes}
        wanted = RunSpec.model_validate({**before, **{key: value for key, value in given.items() if value is not None}})
        after = {key: getattr(wanted, key) for key in before}
        changed = [key for key in before if before[key] != after[key]]
        if not changed:
            return False
        Run.objects.filter(pk=run.pk).update(name=after["name"], tags=after["tags"], spec={**locked.spec, **after})
        said = {
            "name": f"name “{before['name']}” to “{after['name']}”",
            "tags": f"tags to {', '.join(after['tags']) or 'none'}", "notes": "notes",
        }  # fmt: skip
        text = f"{actor.username} changed {'; '.join(said[key] for key in changed)}."
        record(run, "described", text, actor=actor, before={key: before[key] for key in changed})
    run.refresh_from_db()
    return True


def add_tags(run: Run, actor: User, tags: Iterable[str]) -> None:
    """Raises as `describe` does."""
    describe(run, actor, tags=[*run.tags, *tags])


def tags_in(text: str) -> list[str]:
    """Tags that a person typed, with commas or line ends between them."""
    return re.split(r"[,\n]", text)


def _checked(tags: Iterable[str]) -> list[str]:
    found = list(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))
    for tag in found:
        if len(tag) > LONGEST_TAG or not tag.isprintable():
            raise Refused(f"A tag has 1 to {LONGEST_TAG} printable characters; {tag!r:.80} has {len(tag)}.")
    if len(found) > MOST_TAGS:
        raise Refused(f"There are {len(found)} tags; a run has up to {MOST_TAGS}.")
    return found

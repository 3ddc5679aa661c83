"""Storing secrets, and giving them to runs. Values go in, and come out only into the environment of a run's processes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from django.db import transaction
from django.db.models import Q

from trainer_core.spec import SECRET_NAME, SECRET_NAME_ALLOWED
from webapp.accounts.models import User
from webapp.audit import log
from webapp.secrets import crypto
from webapp.secrets.models import Secret
from webapp.secrets.redaction import Redactor

if TYPE_CHECKING:
    from webapp.runs.models import Run

LEAST, MOST = 8, 8192
"""Characters of a value. A shorter one would be found, and redacted, in texts that have nothing to do with it."""


class Invalid(ValueError):
    """A name or value that can't be stored; the text is a sentence."""


class Missing(Exception):
    """A run names a secret that there is not, or that can't be read; the text is a sentence."""


def store(owner: User, name: str, value: str, *, shared: bool = False) -> Secret:
    """Store a new secret, or another value of an old one. Raises Invalid."""
    if not re.fullmatch(SECRET_NAME, name) or len(name) > 80:
        raise Invalid(f"Found the name {name[:80]!r}; {SECRET_NAME_ALLOWED}.")
    if not LEAST <= len(value) <= MOST:
        raise Invalid(f"The value has {len(value)} characters; {LEAST} to {MOST:,} are allowed.")
    if not value.isprintable() or value != value.strip():
        raise Invalid("The value must be one line of printable characters, without spaces around it.")
    with transaction.atomic():
        secret, made = Secret.objects.update_or_create(
            owner=owner, name=name, defaults={"ciphertext": crypto.encrypt(value), "shared": shared}
        )
        whose = "for everybody's runs" if shared else f"for the runs of {owner.username}"
        log.record(owner, "secret.stored" if made else "secret.changed", f"{name}, {whose}.", secret)
    return secret


def delete(secret: Secret, actor: User) -> None:
    with transaction.atomic():
        log.record(actor, "secret.deleted", f"{secret.name} of {secret.owner.username}.", secret)
        secret.delete()


def visible_to(user: User) -> list[Secret]:
    """Secrets that runs of this account may name: its own, and shared ones."""
    return list(Secret.objects.filter(Q(owner=user) | Q(shared=True)).select_related("owner"))


def values(names: Iterable[str], owner: User) -> dict[str, str]:
    """The values of these secrets for a run of `owner`; their own come before shared ones. Raises Missing."""
    wanted = list(names)
    if not wanted:
        return {}
    found: dict[str, Secret] = {}
    for secret in Secret.objects.filter(Q(owner=owner) | Q(shared=True), name__in=wanted):
        if secret.name not in found or secret.owner_id == owner.pk:
            found[secret.name] = secret
    if missing := [name for name in wanted if name not in found]:
        there = ", ".join(sorted({secret.name for secret in visible_to(owner)})) or "none"
        raise Missing(
            f"There is no secret {', '.join(missing)} for the runs of {owner.username}; there is {there}. Store it under "
            "Secrets, or take it out of the run's settings."
        )
    try:
        return {name: crypto.decrypt(found[name].ciphertext) for name in wanted}
    except crypto.Unreadable as error:
        raise Missing(f"A secret of this run can't be read: {error}; store its value again.") from error


def values_of(run: Run) -> dict[str, str]:
    """The environment that a run's settings ask for. Raises Missing."""
    return values(run.spec.get("secrets", []), run.owner)


def redactor_of(run: Run) -> Redactor:
    """What takes the run's secrets out of its texts; those that are gone are not known any more."""
    names = run.spec.get("secrets", [])
    if not names:
        return Redactor([])
    known = []
    for secret in Secret.objects.filter(Q(owner=run.owner_id) | Q(shared=True), name__in=names):
        try:
            known.append(crypto.decrypt(secret.ciphertext))
        except crypto.Unreadable:
            continue
    return Redactor(known)

"""The audit log, for admins."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Query, Router

from webapp.api.schemas import AuditEntryOut, Detail
from webapp.audit import log

router = Router(tags=["studio"])


@router.get("/audit", response={200: list[AuditEntryOut], 403: Detail, 422: Detail})
def audit(
    request: HttpRequest, actor: str = "", action: str = "", search: str = "", since: date | None = None,
    until: date | None = None, before: Annotated[int, Query(ge=1, le=2**62)] = 2**62,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> Any:  # fmt: skip
    """Entries with an id below `before`, the newest first. For admins. `since` and `until` are days, both included."""
    found = log.find(log.Filter(actor, action, search, since, until)).filter(pk__lt=before)
    return list(found[:limit])

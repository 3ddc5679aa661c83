"""Tells webhooks what happened. Beat asks every few seconds; what could not be told is tried again, later and later."""

from __future__ import annotations

import hashlib
import hmac
import logging
from datetime import timedelta
from typing import Any

import httpx
import orjson
from django.db.models import Max, Q
from django.utils import timezone

from webapp.runs.models import Event
from webapp.webhooks.address import Forbidden, check
from webapp.webhooks.models import Webhook

logger = logging.getLogger(__name__)
TIMEOUT_S = 5.0
GIVE_UP_AFTER = 10
"""Failures in a row after which a webhook is switched off."""
AT_ONCE = 20
"""Events told to one webhook before the next one gets its turn."""
TOLD = Q(name__in=("state:completed", "state:failed", "state:stopped", "state:lost")) | Q(name__startswith="alert:")
"""Events that are told."""


class NotTold(Exception):
    """The message did not arrive; the text is a sentence."""


def send_due() -> None:
    """Tell every active webhook what it does not know yet."""
    now = timezone.now()
    for hook in Webhook.objects.filter(Q(next_try_at=None) | Q(next_try_at__lte=now), active=True):
        send_new(hook)


def send_new(hook: Webhook) -> None:
    """Tell one webhook its new events in order; stops at the first that does not arrive."""
    newest = Event.objects.aggregate(newest=Max("id"))["newest"] or 0
    events = Event.objects.filter(TOLD, pk__gt=hook.cursor, pk__lte=newest).select_related("run").order_by("id")
    for event in events[:AT_ONCE]:
        # Claimed before it is sent: two beats must not tell it twice.
        if not Webhook.objects.filter(pk=hook.pk, cursor=hook.cursor).update(cursor=event.pk):
            return
        before, hook.cursor = hook.cursor, event.pk
        try:
            post(hook, message(event))
        except NotTold as error:
            _failed(hook, before, str(error))
            return
        Webhook.objects.filter(pk=hook.pk).update(
            failures=0, last_error="", next_try_at=None, last_sent_at=timezone.now()
        )


def message(event: Event) -> dict[str, Any]:
    """What is sent: `text` and `content` are what Slack and Discord show, the rest is for programs."""
    run = event.run
    text = f"{run.name}: {event.text}"
    return {
        "text": text, "content": text, "event": event.name, "id": event.pk, "run": str(run.pk), "run_name": run.name,
        "state": run.state, "step": event.step, "at": event.created_at.isoformat(), "data": event.data,
    }  # fmt: skip


def post(hook: Webhook, body: dict[str, Any]) -> None:
    """Send one message. Raises NotTold."""
    content = orjson.dumps(body)
    signature = hmac.new(hook.secret.encode(), content, hashlib.sha256).hexdigest()
    try:
        target = check(hook.url)
        headers = {
            "Host": target.host,
            "Content-Type": "application/json",
            "X-Offbeat-Signature": f"sha256={signature}",
        }
        with httpx.Client(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False) as client:
            request = client.build_request("POST", target.url, content=content, headers=headers)
            request.extensions["sni_hostname"] = target.name
            response = client.send(request, stream=True)
            response.close()  # what it answers is of no use, and may be endless
    except Forbidden as error:
        raise NotTold(str(error)) from error
    except httpx.HTTPError as error:
        raise NotTold(f"It did not answer: {error or type(error).__name__}.") from error
    if not response.is_success:
        raise NotTold(f"It answered {response.status_code}.")


def _failed(hook: Webhook, cursor: int, error: str) -> None:
    failures = hook.failures + 1
    pause = timedelta(seconds=min(15 * 2**failures, 3600))
    Webhook.objects.filter(pk=hook.pk).update(
        cursor=cursor,
        failures=failures,
        last_error=error,
        next_try_at=timezone.now() + pause,
        active=failures < GIVE_UP_AFTER,
    )
    logger.warning("Webhook %s was not told: %s", hook.name, error)

"""Tags and filters used across pages: times, sizes, numbers and states, each shown the same way everywhere."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django import template
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from webapp.accounts.permissions import Action, can

register = template.Library()

NOTHING = "–"


@register.filter
def may(user: Any, action: str) -> bool:
    """Whether an account may do this at all: `user|may:"run"`."""
    return can(user, Action(action))


@register.simple_tag
def ago(moment: datetime | None) -> SafeString | str:
    """A moment; app.js turns it into "3 min ago", the title keeps the exact UTC time."""
    if moment is None:
        return NOTHING
    utc = moment.astimezone(UTC)
    return format_html(
        '<time datetime="{}" title="{} UTC" data-ago>{}</time>',
        utc.isoformat(timespec="seconds"), utc.strftime("%Y-%m-%d %H:%M:%S"), utc.strftime("%Y-%m-%d %H:%M"),
    )  # fmt: skip


@register.simple_tag
def state(value: str, extra: str = "") -> SafeString:
    """A run's state as a coloured word; `extra` is a further class, such as "pill"."""
    return format_html('<span class="state state-{} {}" data-testid="state">{}</span>', value, extra, value)


@register.filter
def duration(value: timedelta | float | None) -> str:
    """Seconds or a timedelta as "12 ms", "42 s", "3 min 12 s", "2 h 05 min" or "3 d 4 h"."""
    if value is None:
        return NOTHING
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if not math.isfinite(seconds) or seconds < 0:
        return NOTHING
    if seconds < 0.95:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


@register.filter
def size(value: int | float | None) -> str:
    """Bytes in binary units: "812 B", "4.2 MiB"."""
    if value is None:
        return NOTHING
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


@register.filter
def mib(value: float | None) -> str:
    """Mebibytes as `size` shows bytes: "4.2 GiB"."""
    return size(None if value is None else value * 2**20)


@register.filter
def number(value: Any) -> str:
    """A number to about three significant places: 0.412, 37.5, 1,240, 12.4k, 3.1M; words such as nan stay words."""
    if value is None or value == "":
        return NOTHING
    try:
        amount = float(value)
    except (TypeError, ValueError):
        return str(value)
    if not math.isfinite(amount):
        return str(amount)
    size_ = abs(amount)
    if size_ >= 1e6:
        return f"{amount / 1e6:.1f}M"
    if size_ >= 1e4:
        return f"{amount / 1e3:.1f}k"
    if size_ >= 100 or (amount == int(amount) and size_ >= 10):
        return f"{amount:,.0f}"
    if size_ >= 10:
        return f"{amount:.1f}"
    if amount == int(amount):
        return f"{amount:.0f}"
    return f"{amount:.3f}" if size_ >= 0.001 else f"{amount:.1e}"


@register.filter
def percent(part: float | None, whole: float | None) -> float:
    """`part` of `whole` in percent, within 0 and 100."""
    if not part or not whole:
        return 0
    return round(max(0.0, min(100.0, 100 * float(part) / float(whole))), 1)


@register.filter
def plural(count: int, word: str) -> str:
    """ "1 run", "2 runs", "1,204 runs"."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


@register.simple_tag
def confirm(to: str, question: str, yes: str, *values: Any) -> SafeString:
    """Attributes of a button that asks first: a dialog where scripts run, else a page of its own (webapp/confirming.py).

    `values` are put where the question has {}.
    """
    asked = question.format(*values)
    page = f"{reverse('confirm')}?{urlencode({'to': to, 'question': asked, 'yes': yes})}"
    return format_html('formaction="{}" data-confirm="{}" data-confirm-yes="{}"', page, asked, yes)

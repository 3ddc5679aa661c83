"""Times, sizes and numbers as people read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from webapp.templatetags import offbeat


@pytest.mark.parametrize("value, text", [
    (0.0123, "12 ms"), (0.96, "1.0 s"), (9.949, "9.9 s"), (42, "42 s"), (59.6, "1 min 00 s"), (192, "3 min 12 s"),
    (7500, "2 h 05 min"), (timedelta(days=3, hours=4, minutes=59), "3 d 4 h"), (None, "–"), (-1, "–"), (float("nan"), "–"),
])  # fmt: skip
def test_duration(value: float | timedelta | None, text: str) -> None:
    assert offbeat.duration(value) == text


@pytest.mark.parametrize("value, text", [
    (0, "0 B"), (812, "812 B"), (1024, "1.0 KiB"), (800_000, "781 KiB"), (4.2 * 2**20, "4.2 MiB"), (3 * 2**40, "3.0 TiB"),
    (None, "–"),
])  # fmt: skip
def test_size(value: float | None, text: str) -> None:
    assert offbeat.size(value) == text


@pytest.mark.parametrize("value, text", [
    (0.41234, "0.412"), (-0.5, "-0.500"), (1, "1"), (1.0, "1"), (37.46, "37.5"), (40, "40"), (257.4, "257"), (1240, "1,240"),
    (12_400, "12.4k"), (3_100_000, "3.1M"), (2e-4, "2.0e-04"), (0, "0"), (float("nan"), "nan"), ("inf", "inf"), (None, "–"),
])  # fmt: skip
def test_number(value: object, text: str) -> None:
    assert offbeat.number(value) == text


@pytest.mark.parametrize("part, whole, percent", [(None, 40, 0), (10, 40, 25), (50, 40, 100), (1, 0, 0), (1, 3, 33.3)])
def test_percent(part: float | None, whole: float, percent: float) -> None:
    assert offbeat.percent(part, whole) == percent


def test_a_moment_keeps_the_exact_utc_time() -> None:
    html = offbeat.ago(datetime(2026, 11, 30, 14, 2, 11, tzinfo=UTC))
    assert 'title="2026-11-30 14:02:11 UTC"' in html
    assert 'datetime="2026-11-30T14:02:11+00:00"' in html
    assert offbeat.ago(None) == "–"


def test_a_state_is_escaped() -> None:
    assert "<b>" not in offbeat.state("<b>")

"""Every page that the studio has, found by its URL patterns, so that a new page is walked without being listed anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from django.urls import URLPattern, URLResolver, get_resolver
from django.urls.resolvers import RoutePattern
from playwright.sync_api import Page

SKIPPED = {"logout"}
"""Pages that end the session of whoever walks."""


def routes(resolver: Any = None, app: str = "", before: str = "") -> Iterator[tuple[str, str]]:
    """Name and route of every address but those of the API, whose description has a test of its own."""
    for item in (resolver or get_resolver()).url_patterns:
        route = before + str(item.pattern)
        if isinstance(item, URLResolver):
            if item.namespace != "api":
                yield from routes(item, item.namespace or app, route)
        elif isinstance(item, URLPattern) and isinstance(item.pattern, RoutePattern):
            yield (f"{app}:{item.name}" if app else str(item.name)), route


def addresses(values: Mapping[str, str]) -> dict[str, str]:
    """Addresses by name of the route, with `values` for its parameters: by route and parameter ("reports:detail report_id"),
    or by parameter alone. Raises AssertionError for a parameter without a value.
    """
    found = {}
    for name, route in routes():

        def value(match: re.Match[str], name: str = name) -> str:
            parameter = match[1]
            chosen = values.get(f"{name} {parameter}", values.get(parameter))
            assert chosen is not None, (
                f"the walk over all pages needs a value for {parameter} of {name}; add it to the seed"
            )
            return str(chosen)

        found[name] = "/" + re.sub(r"<(?:\w+:)?(\w+)>", value, route)
    return found


def pages_at(page: Page, url: str, values: Mapping[str, str]) -> dict[str, str]:
    """Of these addresses those that answer GET with a whole HTML page. What is posted to, fragments and files are none."""
    found = {}
    for name, path in addresses(values).items():
        if name in SKIPPED:
            continue
        answer = page.request.get(url + path, max_redirects=0)
        assert answer.status < 500, f"{name} answers {answer.status}"
        kind, whole = answer.headers.get("content-type", ""), "content-disposition" not in answer.headers
        if (
            answer.status == 200
            and whole
            and kind.startswith("text/html")
            and "<!doctype html>" in answer.text()[:200].lower()
        ):
            found[name] = path
    return found

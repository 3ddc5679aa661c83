"""Asking first, without a script: a button that destroys something posts here, and the page that comes posts on.

With a script the question is a dialog, and the form goes where it leads at once (static/js/app.js). `{% confirm %}` in
webapp/templatetags/offbeat.py writes what a button needs for both.
"""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest
from django.shortcuts import render
from django.urls import Resolver404, resolve
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_POST

MAX_TEXT = 500


@require_POST
def confirm(request: HttpRequest) -> HttpResponse:
    """The question, and a form with everything that was posted, for the page named by `to`. Changes nothing itself."""
    target = request.GET.get("to", "")
    try:
        if not target.startswith("/") or target.startswith("//"):
            raise Resolver404
        resolve(target)
    except Resolver404:
        return HttpResponseBadRequest("There is no such page of this studio to go on to.")
    fields = [
        (name, value)
        for name, values in request.POST.lists() if name != "csrfmiddlewaretoken" for value in values
    ]  # fmt: skip
    context = {
        "to": target, "fields": fields, "question": request.GET.get("question", "")[:MAX_TEXT] or "Go on?",
        "yes": request.GET.get("yes", "")[:60] or "Yes", "back": _back(request),
    }  # fmt: skip
    return render(request, "confirm.html", context)


def _back(request: HttpRequest) -> str:
    """The page that the button was on."""
    page = request.headers.get("Referer", "")
    return page if url_has_allowed_host_and_scheme(page, {request.get_host()}, request.is_secure()) else "/"

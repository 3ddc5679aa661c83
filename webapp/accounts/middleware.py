"""A password that was printed in a terminal is changed before anything else."""

from __future__ import annotations

from collections.abc import Callable

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect

ALLOWED = ("accounts:password", "logout", "login")


class PasswordChangeRequired:
    """Sends a person who must change the password to that page. API tokens carry no session and are not held up."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self.get_response(request)

    def process_view(self, request: HttpRequest, *_: object) -> HttpResponseBase | None:
        held = request.user.is_authenticated and request.user.must_change_password
        if not held or (request.resolver_match and request.resolver_match.view_name in ALLOWED):
            return None
        messages.info(request, "Choose a password of your own first: the printed one may be in somebody's terminal.")
        return redirect("accounts:password")

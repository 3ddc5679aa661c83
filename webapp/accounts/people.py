"""Accounts of other people. For admins."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import wraps
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_POST

from webapp.accounts.forms import PersonForm
from webapp.accounts.models import User


def admins_only(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """A page for admins; everybody else gets 403."""

    @wraps(view)
    def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if not (isinstance(request.user, User) and request.user.is_superuser):
            raise PermissionDenied
        return view(request, *args, **kwargs)

    return guarded


@admins_only
@require_http_methods(["GET", "POST"])
def people(request: HttpRequest) -> HttpResponse:
    """The list, and a form that adds somebody, whose first password is shown once."""
    form = PersonForm(request.POST or None)
    added: dict[str, str] = {}
    if request.method == "POST" and form.is_valid():
        person = form.save(commit=False)
        added = {"name": person.username, "password": _first_password(person)}
        form = PersonForm()
    context = {"form": form, "people": User.objects.order_by("username"), "added": added}
    response = render(request, "accounts/people.html", context, status=400 if form.errors else 200)
    response.headers["Cache-Control"] = "no-store"
    return response


@admins_only
@require_POST
def change(request: HttpRequest, user_id: int) -> HttpResponse:
    """Lock an account, unlock it, or give it a new first password."""
    person = get_object_or_404(User, pk=user_id)
    action = request.POST.get("action")
    if person == request.user:
        messages.error(request, "This is your own account; another admin can change it.")
    elif action == "reset":
        added = {"name": person.username, "password": _first_password(person)}
        context = {"form": PersonForm(), "people": User.objects.order_by("username"), "added": added}
        response = render(request, "accounts/people.html", context)
        response.headers["Cache-Control"] = "no-store"
        return response
    elif action in ("lock", "unlock"):
        person.is_active = action == "unlock"
        person.save(update_fields=["is_active"])
        state = "can sign in again" if person.is_active else "can't sign in any more, and the tokens are dead"
        messages.success(request, f"{person.username} {state}.")
    return redirect("accounts:people")


def _first_password(person: User) -> str:
    """Give an account a random password that is to be changed at the first sign-in; returns it."""
    password = secrets.token_urlsafe(12)
    person.set_password(password)
    person.must_change_password = True
    person.save()
    return password

"""Accounts of other people. For admins, as routes.py says."""

from __future__ import annotations

import secrets

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_POST

from webapp.accounts.forms import PersonForm, RoleForm
from webapp.accounts.models import Role, User
from webapp.audit import log


@require_http_methods(["GET", "POST"])
def people(request: HttpRequest) -> HttpResponse:
    """The list, and a form that adds somebody, whose first password is shown once."""
    form = PersonForm(request.POST or None)
    added: dict[str, str] = {}
    if request.method == "POST" and form.is_valid():
        person = form.save(commit=False)
        person.role = form.cleaned_data["role"]
        with transaction.atomic():
            added = {"name": person.username, "password": _first_password(person)}
            log.record(request.user, "person.added", f"Added as {person.role.label}.", person, name=person.username)
        form = PersonForm()
    return _page(request, form, added)


def _page(request: HttpRequest, form: PersonForm, added: dict[str, str]) -> HttpResponse:
    everybody = User.objects.order_by("username")
    context = {"form": form, "people": everybody, "added": added, "roles": Role.choices}
    response = render(request, "accounts/people.html", context, status=400 if form.errors else 200)
    response.headers["Cache-Control"] = "no-store"
    return response


@require_POST
def change(request: HttpRequest, user_id: int) -> HttpResponse:
    """Lock an account, unlock it, give it another role or a new first password."""
    person = get_object_or_404(User, pk=user_id)
    action = request.POST.get("action")
    if person == request.user:
        messages.error(request, "This is your own account; another admin can change it.")
    elif action == "reset":
        with transaction.atomic():
            added = {"name": person.username, "password": _first_password(person)}
            log.record(request.user, "person.password_reset", "A new first password was made.", person,
                       name=person.username)  # fmt: skip
        return _page(request, PersonForm(), added)
    elif action in ("lock", "unlock"):
        _lock(request, person, locked=action == "lock")
    elif action == "role":
        _set_role(request, person)
    return redirect("accounts:people")


def _lock(request: HttpRequest, person: User, *, locked: bool) -> None:
    state = "can't sign in any more, and the tokens are dead" if locked else "can sign in again"
    with transaction.atomic():
        person.is_active = not locked
        person.save(update_fields=["is_active"])
        log.record(request.user, f"person.{'locked' if locked else 'unlocked'}", f"{person.username} {state}.", person,
                   name=person.username)  # fmt: skip
    messages.success(request, f"{person.username} {state}.")


def _set_role(request: HttpRequest, person: User) -> None:
    form = RoleForm(request.POST)
    if not form.is_valid():
        allowed = ", ".join(Role.values)
        messages.error(request, f"There is no role {request.POST.get('role', '')!r:.40}; there are {allowed}.")
        return
    before, person.role = person.role, Role(form.cleaned_data["role"])
    text = f"{person.username} is {person.role.label} now; before: {before.label}."
    with transaction.atomic():
        person.save(update_fields=["is_superuser", "is_runner", "is_author"])
        log.record(request.user, "person.role_changed", text, person, name=person.username)
    messages.success(request, text)


def _first_password(person: User) -> str:
    """Give an account a random password that is to be changed at the first sign-in; returns it."""
    password = secrets.token_urlsafe(12)
    person.set_password(password)
    person.must_change_password = True
    person.save()
    return password

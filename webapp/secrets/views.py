"""The page of secrets: names, never values."""

from __future__ import annotations

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_POST

from webapp.accounts.permissions import Action, can, require, user_of
from webapp.secrets import services
from webapp.secrets.models import Secret


class SecretForm(forms.Form):
    name = forms.CharField(max_length=80)
    value = forms.CharField(max_length=services.MOST, strip=False)
    shared = forms.BooleanField(required=False)


@require_http_methods(["GET", "POST"])
def secrets(request: HttpRequest) -> HttpResponse:
    """The list, and a form that stores one. A value is never sent back, not even into the form it came from."""
    user, problem = user_of(request), ""
    if request.method == "POST":
        form = SecretForm(request.POST)
        if not form.is_valid():
            problem = f"{next(iter(form.errors))}: {next(iter(form.errors.values()))[0]}"
        else:
            data = form.cleaned_data
            if data["shared"]:
                require(user, Action.ADMIN)
            try:
                secret = services.store(user, data["name"], data["value"], shared=data["shared"])
            except services.Invalid as error:
                problem = str(error)
            else:
                messages.success(request, f"Stored {secret.name}. Runs that name it get it; nobody can read it here.")
                return redirect("secrets:list")
    found = [(secret, can(user, Action.RUN, secret)) for secret in services.visible_to(user)]
    context = {"secrets": found, "problem": problem, "name": request.POST.get("name", "")}
    return render(request, "secrets/list.html", context, status=422 if problem else 200)


@require_POST
def delete(request: HttpRequest, secret_id: int) -> HttpResponse:
    secret = get_object_or_404(Secret.objects.select_related("owner"), pk=secret_id)
    require(user_of(request), Action.RUN, secret)
    services.delete(secret, user_of(request))
    messages.success(request, f"Deleted {secret.name}. Runs that have begun keep it until they end.")
    return redirect("secrets:list")

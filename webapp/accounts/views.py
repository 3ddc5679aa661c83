"""Signing in and out, password, API tokens."""

from __future__ import annotations

from django.contrib import auth, messages
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.forms import AuthenticationForm, PasswordChangeForm
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from webapp.accounts import attempts
from webapp.accounts.forms import TokenForm
from webapp.accounts.models import ApiToken, User
from webapp.audit import log

TOO_MANY = "Too many failed sign-ins with this name from your address; wait five minutes and try again."


def _signed_in(request: HttpRequest) -> User:
    """The account behind a request; the middleware has sent everybody else to the login page."""
    assert isinstance(request.user, User)
    return request.user


def _next_page(request: HttpRequest) -> str:
    target = request.POST.get("next") or request.GET.get("next") or ""
    safe = url_has_allowed_host_and_scheme(target, {request.get_host()}, require_https=request.is_secure())
    return target if safe else "runs:list"


@login_not_required
@require_http_methods(["GET", "POST"])
def login(request: HttpRequest) -> HttpResponse:
    if request.user.is_authenticated:
        return redirect(_next_page(request))
    form, problem = AuthenticationForm(request), ""
    if request.method == "POST":
        username = request.POST.get("username", "")
        form = AuthenticationForm(request, request.POST)
        if attempts.blocked(request, username):
            problem = TOO_MANY
        elif form.is_valid():
            attempts.succeeded(request, username)
            auth.login(request, form.get_user())
            log.record(form.get_user(), "account.signed_in", "Signed in.", form.get_user(), name=username)
            return redirect(_next_page(request))
        else:
            attempts.failed(request, username)
            log.record(None, "account.sign_in_failed", f"A sign-in as {username!r:.160} failed.", name=username)
            problem = "This name and password do not match an account."
    context = {"form": form, "problem": problem, "next": request.POST.get("next") or request.GET.get("next", "")}
    return render(request, "accounts/login.html", context, status=429 if problem == TOO_MANY else 200)


@login_not_required
@require_POST
def logout(request: HttpRequest) -> HttpResponse:
    auth.logout(request)
    return redirect("login")


@require_safe
def account(request: HttpRequest) -> HttpResponse:
    return _account_page(request, TokenForm())


def _account_page(request: HttpRequest, form: TokenForm, *, new_token: str = "", status: int = 200) -> HttpResponse:
    context = {"form": form, "tokens": _signed_in(request).api_tokens.all(), "new_token": new_token}
    return render(request, "accounts/account.html", context, status=status)


@require_http_methods(["GET", "POST"])
def password(request: HttpRequest) -> HttpResponse:
    user = _signed_in(request)
    form = PasswordChangeForm(user, request.POST or None)
    if request.method == "POST" and form.is_valid():
        if form.cleaned_data["new_password1"] == form.cleaned_data["old_password"]:
            form.add_error("new_password1", "This is the password you have; choose a new one.")
        else:
            user.must_change_password = False
            form.save()
            auth.update_session_auth_hash(request, user)
            log.record(user, "account.password_changed", "Chose a new password.", user, name=user.username)
            messages.success(request, "Your password is changed.")
            return redirect("runs:list")
    return render(request, "accounts/password.html", {"form": form})


@require_POST
def create_token(request: HttpRequest) -> HttpResponse:
    form = TokenForm(request.POST)
    if not form.is_valid():
        return _account_page(request, form, status=400)
    user, reads_only = _signed_in(request), form.cleaned_data["scope"] == "read"
    token, text = ApiToken.create(user, form.cleaned_data["name"], form.lifetime, reads_only=reads_only)
    ends = f"{token.expires_at:%Y-%m-%d}" if token.expires_at else "never"
    what = "may only read" if reads_only else f"may do what {user.username} may"
    log.record(user, "token.created", f"{token.prefix}… {what}; it ends {ends}.", token)
    response = _account_page(request, TokenForm(), new_token=text)
    response.headers["Cache-Control"] = "no-store"
    return response


@require_POST
def revoke_token(request: HttpRequest, token_id: int) -> HttpResponse:
    token = get_object_or_404(_signed_in(request).api_tokens, pk=token_id)
    log.record(request.user, "token.revoked", f"{token.prefix}… no longer works.", token)
    token.delete()
    messages.success(request, f"The token {token.name} no longer works.")
    return redirect("accounts:account")

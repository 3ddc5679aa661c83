"""The webhooks of the studio: add one, try it, switch it off, delete it. For admins."""

from __future__ import annotations

from django import forms
from django.contrib import messages
from django.db.models import Max
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST

from webapp.audit import log
from webapp.runs.models import Event
from webapp.webhooks import sending
from webapp.webhooks.address import Forbidden, check
from webapp.webhooks.models import Webhook


class WebhookForm(forms.ModelForm):
    class Meta:
        model = Webhook
        fields = ("name", "url")

    def clean_url(self) -> str:
        url = self.cleaned_data["url"].strip()
        try:
            check(url)
        except Forbidden as error:
            raise forms.ValidationError(str(error)) from error
        return url


@require_http_methods(["GET", "POST"])
def webhooks(request: HttpRequest) -> HttpResponse:
    """The list, and a form that adds one; it is told what happens from now on."""
    form = WebhookForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        hook = form.save(commit=False)
        hook.created_by = request.user
        hook.cursor = Event.objects.aggregate(newest=Max("id"))["newest"] or 0
        hook.save()
        log.record(request.user, "webhook.created", f"{hook.name} is told at {hook.url}.", hook)
        messages.success(request, f"{hook.name} is told from now on when runs end or raise an alert.")
        return redirect("webhooks:list")
    context = {"form": form, "hooks": Webhook.objects.select_related("created_by")}
    return render(request, "webhooks/list.html", context, status=400 if form.errors else 200)


@require_POST
def change(request: HttpRequest, hook_id: int) -> HttpResponse:
    hook = get_object_or_404(Webhook, pk=hook_id)
    action = request.POST.get("action")
    if action == "delete":
        log.record(request.user, "webhook.deleted", f"{hook.name} at {hook.url} is told nothing any more.", hook)
        hook.delete()
        messages.success(request, f"{hook.name} is told nothing any more.")
    elif action == "test":
        text = f"Offbeat can reach this address. Sent by {request.user.get_username()}."
        try:
            sending.post(hook, {"text": text, "content": text, "event": "test", "at": timezone.now().isoformat()})
        except sending.NotTold as error:
            messages.error(request, f"{hook.name}: {error}")
        else:
            messages.success(request, f"{hook.name} has taken the test message.")
    elif action in ("off", "on"):
        on = {"active": True, "failures": 0, "next_try_at": None, "last_error": ""}
        Webhook.objects.filter(pk=hook.pk).update(**(on if action == "on" else {"active": False}))
        log.record(request.user, f"webhook.{action}", f"{hook.name} is switched {action}.", hook)
        messages.success(request, f"{hook.name} is switched {action}.")
    return redirect("webhooks:list")

"""The JSON API under /api/, made of one router for each subject."""

from __future__ import annotations

from typing import Any

import orjson
from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import URLPattern, re_path, reverse
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI
from ninja.openapi.docs import DocsBase
from ninja.renderers import BaseRenderer

from webapp.api import audit, checkpoints, metrics, reports, rewards, runs, studio, sweeps
from webapp.api.auth import AUTH
from webapp.api.errors import add_handlers
from webapp.api.openapi import StudioAPI


class OrjsonRenderer(BaseRenderer):
    media_type = "application/json"

    def render(self, request: HttpRequest, data: Any, *, response_status: int) -> Any:
        return orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS)


class LocalDocs(DocsBase):
    """Swagger UI from the files that django-ninja brings: no CDN and no inline script."""

    def render_page(self, request: HttpRequest, api: NinjaAPI, **kwargs: Any) -> HttpResponse:
        return render(request, "api/docs.html", {"settings": {"url": reverse("api:openapi-json"), "deepLinking": True}})


@csrf_exempt  # it changes nothing, and a program must get JSON rather than the page about cookies
def unknown_address(request: HttpRequest) -> HttpResponse:
    return api.create_response(request, {"detail": f"There is no {request.path}; see /api/docs."}, status=404)


api = StudioAPI(
    title="Offbeat", version="1", urls_namespace="api", auth=AUTH, docs=LocalDocs(), renderer=OrjsonRenderer(),
    description="Runs and their specs, metrics, rollouts, checkpoints, events and logs; rewards, hosts, sweeps, reports, the "
    "audit log. People, secrets, webhooks and share links are for the pages only. Send `Authorization: Bearer <token>`; "
    "tokens are made on the account page.",
)  # fmt: skip
add_handlers(api)
for module in (runs, metrics, checkpoints, rewards, studio, audit, sweeps, reports):
    api.add_router("", module.router)

urlpatterns, app_name, _ = api.urls
urlpatterns = [*urlpatterns, re_path("", unknown_address)]
for pattern in urlpatterns:
    # Tokens come without a session, so the API does its own asking; only its docs are for people who are logged in.
    if isinstance(pattern, URLPattern) and pattern.name != "openapi-view":
        pattern.callback = login_not_required(pattern.callback)

"""Where each subject's pages are."""

from django.urls import URLPattern, URLResolver, include, path
from django.views.generic import RedirectView

from webapp.accounts import views as accounts
from webapp.confirming import confirm

urlpatterns: list[URLPattern | URLResolver] = [
    path("", RedirectView.as_view(pattern_name="runs:list"), name="home"),
    path("login/", accounts.login, name="login"),
    path("logout/", accounts.logout, name="logout"),
    path("confirm/", confirm, name="confirm"),
    path("account/", include("webapp.accounts.urls")),
    path("runs/", include("webapp.runs.urls")),
    path("runs/<uuid:run_id>/rollouts/", include("webapp.rollouts.urls")),
    path("runs/<uuid:run_id>/playground/", include("webapp.playground.urls")),
    path("sweeps/", include("webapp.sweeps.urls")),
    path("rewards/", include("webapp.rewards.urls")),
    path("reports/", include("webapp.reports.urls")),
    path("sharing/", include("webapp.sharing.urls")),
    path("shared/", include("webapp.sharing.public_urls")),
    path("secrets/", include("webapp.secrets.urls")),
    path("audit/", include("webapp.audit.urls")),
    path("hosts/", include("webapp.hosts.urls")),
    path("points/", include("webapp.metrics.urls")),
    path("webhooks/", include("webapp.webhooks.urls")),
    path("api/", include("webapp.api.urls", namespace="api")),
    path("", include("webapp.checkpoints.urls")),
]

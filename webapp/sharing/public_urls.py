"""What a share link opens; no account is needed."""

from django.urls import path

from webapp.sharing import public

app_name = "shared"
urlpatterns = [
    path("<str:token>/", public.show, name="show"),
    path("<str:token>/runs/<uuid:run_id>/chart", public.chart, name="chart"),
    path("<str:token>/runs/<uuid:run_id>/metrics", public.metrics, name="metrics"),
    path("<str:token>/runs/<uuid:run_id>/metrics/export", public.points, name="points"),
]

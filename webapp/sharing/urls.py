"""Share links of runs and reports, for people who are signed in."""

from django.urls import path

from webapp.sharing import views

app_name = "sharing"
urlpatterns = [
    path("runs/<uuid:run_id>/", views.run, name="run"),
    path("reports/<uuid:report_id>/", views.report, name="report"),
    path("links/<int:link_id>/revoke/", views.revoke, name="revoke"),
]

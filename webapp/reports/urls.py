"""Reports: list, read, write."""

from django.urls import path

from webapp.reports import views

app_name = "reports"
urlpatterns = [
    path("", views.report_list, name="list"),
    path("new/", views.new, name="new"),
    path("preview/", views.preview, name="preview"),
    path("<uuid:report_id>/", views.detail, name="detail"),
    path("<uuid:report_id>/edit/", views.edit, name="edit"),
    path("<uuid:report_id>/delete/", views.delete, name="delete"),
]

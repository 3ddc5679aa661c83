"""The audit log; for admins."""

from django.urls import path

from webapp.audit import views

app_name = "audit"
urlpatterns = [path("", views.entries, name="list"), path("export/", views.export, name="export")]

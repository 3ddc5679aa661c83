"""Stored points and what may be dropped of them; everybody sees it, admins change it."""

from django.urls import path

from webapp.metrics import pages

app_name = "metrics"
urlpatterns = [path("", pages.retention_page, name="retention")]

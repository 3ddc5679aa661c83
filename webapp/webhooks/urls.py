"""Webhooks; for admins."""

from django.urls import path

from webapp.webhooks import views

app_name = "webhooks"
urlpatterns = [
    path("", views.webhooks, name="list"),
    path("<int:hook_id>/", views.change, name="change"),
]

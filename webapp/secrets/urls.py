"""Secrets; values are only written."""

from django.urls import path

from webapp.secrets import views

app_name = "secrets"
urlpatterns = [
    path("", views.secrets, name="list"),
    path("<int:secret_id>/delete/", views.delete, name="delete"),
]

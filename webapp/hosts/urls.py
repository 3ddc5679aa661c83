"""Hosts and their devices."""

from django.urls import path

from webapp.hosts import views

app_name = "hosts"
urlpatterns = [
    path("", views.hosts, name="list"),
    path("<int:host_id>/drain/", views.drain, name="drain"),
]

"""Sweeps: list, form, results."""

from django.urls import path

from webapp.sweeps import views

app_name = "sweeps"
urlpatterns = [
    path("", views.sweep_list, name="list"),
    path("new/", views.new, name="new"),
    path("preview/", views.preview, name="preview"),
    path("<uuid:sweep_id>/", views.detail, name="detail"),
    path("<uuid:sweep_id>/stop/", views.stop, name="stop"),
]

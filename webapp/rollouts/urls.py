"""Stored rollouts of a run; mounted under runs/<run_id>/rollouts/."""

from django.urls import path

from webapp.rollouts import views

app_name = "rollouts"
urlpatterns = [
    path("", views.rollouts, name="list"),
    path("prompts/", views.compare, name="compare"),
    path("tokens/", views.tokens, name="tokens"),
    path("<int:rollout_id>/", views.rollout, name="detail"),
]

"""Reward functions: list, write, versions, test."""

from django.urls import path

from webapp.rewards import views

app_name = "rewards"
urlpatterns = [
    path("", views.reward_list, name="list"),
    path("new/", views.new, name="new"),
    path("validate/", views.validate, name="validate"),
    path("test/", views.test, name="test"),
    path("<str:name>/", views.detail, name="detail"),
    path("<str:name>/edit/", views.edit, name="edit"),
    path("<str:name>/archive/", views.archive, name="archive"),
    path("<str:name>/v<int:number>/", views.version, name="version"),
]

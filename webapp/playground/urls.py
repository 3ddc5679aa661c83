"""The playground of a run; mounted under runs/<run_id>/playground/."""

from django.urls import path

from webapp.playground import views

app_name = "playground"
urlpatterns = [path("", views.page, name="page"), path("talk/", views.talk, name="talk")]

"""The playground of a run; mounted under runs/<run_id>/playground/."""

from django.urls import path

from webapp.playground import views

app_name = "playground"
urlpatterns = [
    path("", views.page, name="page"),
    path("talk/", views.talk, name="talk"),
    path("server/", views.status, name="status"),
    path("server/start/", views.start, name="start"),
    path("server/stop/", views.stop, name="stop"),
]

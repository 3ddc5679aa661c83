"""checkpoints:file (checkpoint_id, name) and checkpoints:zip (checkpoint_id, part: model, resume or all)."""

from django.urls import re_path

from webapp.checkpoints import views

app_name = "checkpoints"
urlpatterns = [
    re_path(r"^checkpoints/(?P<checkpoint_id>\d{1,18})/files/(?P<name>.+)$", views.download, name="file"),
    re_path(
        r"^checkpoints/(?P<checkpoint_id>\d{1,18})/(?P<part>model|resume|all)\.zip$", views.download_zip, name="zip"
    ),
]

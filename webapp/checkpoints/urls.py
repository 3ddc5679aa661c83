"""Downloads: of a checkpoint, of merged weights, of a model card; and what a checkpoint is made into."""

from django.urls import path, re_path

from webapp.checkpoints import pages, views

app_name = "checkpoints"
urlpatterns = [
    re_path(r"^checkpoints/(?P<checkpoint_id>\d{1,18})/files/(?P<name>.+)$", views.download, name="file"),
    re_path(
        r"^checkpoints/(?P<checkpoint_id>\d{1,18})/(?P<part>model|resume|all)\.zip$", views.download_zip, name="zip"
    ),
    re_path(r"^checkpoints/(?P<checkpoint_id>\d{1,18})/card/(?P<name>[\w./-]+)$", views.card, name="card"),
    re_path(r"^merged/(?P<export_id>\d{1,18})/files/(?P<name>.+)$", views.download_merged, name="merged_file"),
    re_path(r"^merged/(?P<export_id>\d{1,18})/model\.zip$", views.download_merged_zip, name="merged_zip"),
    path("runs/<uuid:run_id>/checkpoints/<int:checkpoint_id>/exports/", pages.exports, name="exports"),
    path("runs/<uuid:run_id>/checkpoints/<int:checkpoint_id>/merge/", pages.merge, name="merge"),
    path("runs/<uuid:run_id>/checkpoints/<int:checkpoint_id>/push/", pages.push, name="push"),
    path("runs/<uuid:run_id>/exports/<int:export_id>/delete/", pages.delete_export, name="delete_export"),
]

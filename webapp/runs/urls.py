"""Pages of runs: list, form, run pages, logs, checkpoints."""

from django.urls import path

from webapp.checkpoints import pages as checkpoints
from webapp.runs import compare, editing, log_views, views

app_name = "runs"
urlpatterns = [
    path("", views.run_list, name="list"),
    path("bulk/", views.bulk, name="bulk"),
    path("new/", editing.new, name="new"),
    path("compare/", compare.compare, name="compare"),
    path("compare/export/", compare.compare_export, name="compare_export"),
    path("check/", editing.check, name="check"),
    path("<uuid:run_id>/", views.overview, name="detail"),
    path("<uuid:run_id>/live/", views.live, name="live"),
    path("<uuid:run_id>/events/", views.events, name="events"),
    path("<uuid:run_id>/settings/", views.settings_page, name="settings"),
    path("<uuid:run_id>/edit/", editing.edit, name="edit"),
    path("<uuid:run_id>/spec.yaml", views.spec_yaml, name="spec_yaml"),
    path("<uuid:run_id>/launch/", views.launch, name="launch"),
    path("<uuid:run_id>/stop/", views.stop, name="stop"),
    path("<uuid:run_id>/resume/", views.resume, name="resume"),
    path("<uuid:run_id>/describe/", views.describe, name="describe"),
    path("<uuid:run_id>/archive/", views.archive, name="archive"),
    path("<uuid:run_id>/delete/", views.delete, name="delete"),
    path("<uuid:run_id>/logs/", log_views.page, name="logs"),
    path("<uuid:run_id>/logs/data/", log_views.data, name="log_data"),
    path("<uuid:run_id>/logs/file/", log_views.file, name="log_file"),
    path("<uuid:run_id>/checkpoints/", checkpoints.run_checkpoints, name="checkpoints"),
    path("<uuid:run_id>/checkpoints/<int:checkpoint_id>/delete/", checkpoints.delete, name="delete_checkpoint"),
]

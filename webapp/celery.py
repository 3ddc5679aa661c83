"""The Celery app. The web process only sends task names; the tasks themselves live in workers/tasks.py."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
app = Celery("offbeat")
app.config_from_object("django.conf:settings", namespace="CELERY")

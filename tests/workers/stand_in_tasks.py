"""The real Celery tasks, which start supervisors of the stand-in programs: celery -A tests.workers.stand_in_tasks worker"""

from workers.tasks import app, claiming, starting

__all__ = ["app"]
claiming.SUPERVISOR_MODULE = starting.SUPERVISOR_MODULE = "tests.workers.stand_ins"

"""The real Celery tasks, which start supervisors of the stand-in programs: celery -A tests.workers.stand_in_tasks worker"""

from workers.tasks import app, claiming

__all__ = ["app"]
claiming.SUPERVISOR_MODULE = "tests.workers.stand_ins"

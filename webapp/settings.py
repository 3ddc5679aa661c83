"""Settings: defaults for one machine; every host-specific thing is an environment variable.

OFFBEAT_HOME          folder of everything that is not code (default: var/ in the clone)
OFFBEAT_MODELS        folder of the models that ship with Offbeat (default: OFFBEAT_HOME/models)
DATABASE_URL          postgresql://user:password@host/name   (default: SQLite in OFFBEAT_HOME)
CELERY_BROKER_URL     redis://... (default: the Valkey that `make run` starts, on a unix socket in OFFBEAT_HOME)
OFFBEAT_ALLOWED_HOSTS host names, separated by commas (default: this machine only)
OFFBEAT_WEBHOOK_HOSTS host names that webhooks may call though they are inside this network
OFFBEAT_PLAYGROUND_IDLE_MINUTES  a playground server that nobody talks to ends after so long (default: 10)
OFFBEAT_HTTPS         1 when served behind TLS: cookies are then marked secure
OFFBEAT_BIND          address that `make run` listens on (default: 127.0.0.1)
OFFBEAT_PORT          its port (default: 8000)
OFFBEAT_HOST          name and queue of this host (default: the machine's host name)
OFFBEAT_ADDRESS       name or IPv4 address at which other hosts reach this one (default: found by the way to the broker)
OFFBEAT_GPU_SLOTS     runs that may share one GPU of this host (default: 1, and 2 on a host with a single GPU)
OFFBEAT_CPU_SLOTS     runs at once on this host if it has no GPU (default: 1)
OFFBEAT_TOOL_MODULES  Python modules with tools and environments for agents, separated by commas (docs/customising.md)
OFFBEAT_TORCH_THREADS threads of the trainer on a CPU (default: 1, since the server needs the cores)
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

BASE_DIR = Path(__file__).resolve().parent.parent
HOME = Path(os.environ.get("OFFBEAT_HOME", BASE_DIR / "var")).resolve()
RUNS_DIR = HOME / "runs"
MODELS_DIR = Path(os.environ.get("OFFBEAT_MODELS", HOME / "models")).resolve()


def _secret_key() -> str:
    path = HOME / "secret_key"
    if not path.exists():
        HOME.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"secret_key.{os.getpid()}")
        temporary.touch(mode=0o600)
        temporary.write_text(secrets.token_urlsafe(50))
        try:
            os.link(temporary, path)  # whoever comes first wins; the others read its key
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    return path.read_text()


def _database(url: str | None) -> dict[str, Any]:
    if not url:
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": HOME / "db.sqlite3",
            "OPTIONS": {
                "timeout": 20,
                "transaction_mode": "IMMEDIATE",
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA cache_size=-65536;",
            },
        }
    parts = urlsplit(url)
    if parts.scheme not in ("postgres", "postgresql"):
        raise ValueError(f"DATABASE_URL starts with {parts.scheme!r}; postgresql:// is supported, or leave it unset")
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
        "CONN_HEALTH_CHECKS": True,
    }


SECRET_KEY = _secret_key()
DEBUG = False
ALLOWED_HOSTS = [
    *(host for host in os.environ.get("OFFBEAT_ALLOWED_HOSTS", "").split(",") if host), "localhost", "127.0.0.1", "[::1]",
]  # fmt: skip

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "ninja",
    "webapp.accounts",
    "webapp.audit",
    "webapp.hosts",
    "webapp.runs",
    "webapp.rewards",
    "webapp.metrics",
    "webapp.rollouts",
    "webapp.checkpoints",
    "webapp.playground",
    "webapp.webhooks",
    "webapp.sweeps",
    "webapp.secrets",
    "webapp.reports",
    "webapp.sharing",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "webapp.middleware.ContentSecurityPolicy",
    "webapp.audit.origin.KeepOrigin",
    "webapp.static_files.StreamedStaticFiles",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.auth.middleware.LoginRequiredMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "webapp.accounts.middleware.PasswordChangeRequired",
    "webapp.accounts.routes.RoutePermissions",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "webapp.urls"
ASGI_APPLICATION = "webapp.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": False,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
            "builtins": ["webapp.templatetags.offbeat"],
            "libraries": {"offbeat": "webapp.templatetags.offbeat"},
        },
    }
]

DATABASES = {"default": _database(os.environ.get("DATABASE_URL"))}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

AUTH_USER_MODEL = "accounts.User"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 10}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "runs:list"
LOGOUT_REDIRECT_URL = "login"

PLAYGROUND_IDLE_S = 60 * float(os.environ.get("OFFBEAT_PLAYGROUND_IDLE_MINUTES") or 10)

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_I18N = False
USE_TZ = True

STATIC_URL = "static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
STATIC_ROOT = HOME / "static"
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "whitenoise.storage.CompressedManifestStaticFilesStorage"},
}

_HTTPS = os.environ.get("OFFBEAT_HTTPS") == "1"
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _HTTPS
SESSION_COOKIE_SAMESITE = "Lax"
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"


def _broker_socket() -> Path:
    """A unix socket's path may hold some 100 bytes, so a long OFFBEAT_HOME gets a short path of its own."""
    path = HOME / "valkey" / "valkey.sock"
    if len(os.fsencode(path)) < 100:
        return path
    name = hashlib.sha256(os.fsencode(HOME)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"offbeat-{os.getuid()}-{name}" / "valkey.sock"


BROKER_SOCKET = _broker_socket()
CELERY_BROKER_URL = os.environ.get("CELERY_BROKER_URL") or f"redis+socket://{BROKER_SOCKET}"
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
# Sending gives up after a second: a page must not hang because the broker is away, and beat looks for queued runs too.
CELERY_TASK_PUBLISH_RETRY_POLICY = {"max_retries": 2, "interval_start": 0, "interval_step": 0.3, "interval_max": 0.6}
CELERY_BROKER_TRANSPORT_OPTIONS = {"socket_connect_timeout": 2}
# Ids and names as JSON; nothing from the network is unpickled.
CELERY_TASK_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]
# Tasks are short and may run twice without harm, and none is repeated by the broker.
CELERY_TASK_ACKS_LATE = False
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_TASK_IGNORE_RESULT = True
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_BEAT_SCHEDULE = {
    "claim queued runs": {"task": "workers.claim_queued", "schedule": 4.0, "options": {"expires": 4}},
    "watch runs": {"task": "workers.watch_runs", "schedule": 10.0, "options": {"expires": 10}},
    "look after hosts": {"task": "workers.look_after_hosts", "schedule": 5.0, "options": {"expires": 5}},
    "drop points": {"task": "workers.drop_points", "schedule": 3600.0, "options": {"expires": 3600}},
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": "INFO"},
}

"""What tests of pages share: folders of their own, an empty cache, and two people who are signed in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.core.cache import cache
from django.test import Client

from tests.webapp import seed
from webapp.accounts.models import User


@pytest.fixture(autouse=True)
def folders(settings: Any, tmp_path: Path) -> Path:
    """Run folders in a temporary place, and static files by their plain names."""
    settings.STORAGES = {
        **settings.STORAGES, "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}
    }  # fmt: skip
    settings.RUNS_DIR = tmp_path / "runs"
    settings.RUNS_DIR.mkdir()
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # the real one is slow on purpose
    cache.clear()
    return settings.RUNS_DIR


@pytest.fixture
def ada(db: None) -> User:
    return seed.make_user("ada")


@pytest.fixture
def grace(db: None) -> User:
    return seed.make_user("grace")


@pytest.fixture
def admin(db: None) -> User:
    return seed.make_user("root", is_superuser=True)


def signed_in(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def as_ada(ada: User) -> Client:
    return signed_in(ada)


@pytest.fixture
def as_grace(grace: User) -> Client:
    return signed_in(grace)


@pytest.fixture
def as_admin(admin: User) -> Client:
    return signed_in(admin)

"""Encryption of secrets at rest, with a key derived from SECRET_KEY: who steals the database alone can't read them."""

from __future__ import annotations

import base64

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings


class Unreadable(ValueError):
    """A ciphertext that was made with another SECRET_KEY."""


def encrypt(value: str) -> str:
    return _box().encrypt(value.encode()).decode()


def decrypt(ciphertext: str) -> str:
    """Raises Unreadable."""
    try:
        return _box().decrypt(ciphertext.encode()).decode()
    except InvalidToken as error:
        raise Unreadable("the studio's secret key has changed since it was stored") from error


def _box() -> MultiFernet:
    """Encrypts with the current key; reads with those before it too (SECRET_KEY_FALLBACKS)."""
    return MultiFernet([Fernet(_derived(key)) for key in (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)])


def _derived(key: str | bytes) -> bytes:
    made = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"offbeat secrets 1").derive(
        key if isinstance(key, bytes) else key.encode()
    )
    return base64.urlsafe_b64encode(made)

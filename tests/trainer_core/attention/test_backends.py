"""Which backend is chosen where, and what refusals say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from trainer_core.attention import backends
from trainer_core.attention.backends import Hardware, choose_backend

HOPPER = Hardware("cuda", "NVIDIA H200", (9, 0))
BLACKWELL = Hardware("cuda", "NVIDIA B200", (10, 0))
AMPERE = Hardware("cuda", "NVIDIA A100", (8, 0))
TURING = Hardware("cuda", "Tesla T4", (7, 5))
AMD = Hardware("rocm", "AMD Instinct MI300X")
CPU = torch.device("cpu")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Pretend to be on some hardware where only some kernels can be loaded."""
    backends.attend.cache_clear()

    def pretend(hardware: Hardware, *loadable: str) -> None:
        def missing() -> Any:
            raise ImportError("not installed")

        monkeypatch.setattr(Hardware, "of", lambda _device: hardware)
        for name in backends.KERNELS:
            monkeypatch.setitem(backends.KERNELS, name, object if name in loadable else missing)  # type: ignore[arg-type]

    yield pretend
    backends.attend.cache_clear()


@pytest.mark.parametrize(
    ("hardware", "loadable", "dtype", "softcap", "expected"),
    [
        (HOPPER, ("fa3-hub", "fa4", "varlen"), torch.bfloat16, False, "fa3-hub"),
        (HOPPER, ("fa4", "varlen"), torch.bfloat16, False, "fa4"),
        (HOPPER, ("varlen",), torch.float16, False, "varlen"),
        (HOPPER, ("varlen",), torch.bfloat16, True, "flex"),
        (HOPPER, ("fa4", "varlen"), torch.bfloat16, True, "fa4"),
        (HOPPER, ("fa3-hub", "fa4", "varlen"), torch.float32, False, "sdpa"),
        (BLACKWELL, ("fa4-hub", "fa4", "varlen"), torch.bfloat16, False, "fa4-hub"),
        (AMPERE, ("fa3-hub", "fa4-hub", "varlen"), torch.bfloat16, False, "varlen"),
        (TURING, ("varlen",), torch.float16, False, "sdpa"),
        (AMD, ("varlen",), torch.bfloat16, False, "varlen"),
        (Hardware("cpu", "cpu"), ("fa4", "varlen"), torch.bfloat16, False, "sdpa"),
    ],
)
def test_the_best_that_can_be_had(
    on: Any, hardware: Hardware, loadable: tuple[str, ...], dtype: torch.dtype, softcap: bool, expected: str
) -> None:
    on(hardware, *loadable)
    assert choose_backend(CPU, dtype, softcap) == expected


def test_refusals(on: Any) -> None:
    on(HOPPER, "varlen")
    with pytest.raises(ValueError, match="'fa4' cannot be loaded: not installed"):
        choose_backend(CPU, torch.bfloat16, override="fa4")
    with pytest.raises(
        NotImplementedError, match="'varlen' on NVIDIA H200 has no softcap; allowed for this model are fa3-hub"
    ):
        choose_backend(CPU, torch.bfloat16, softcap=True, override="varlen")
    with pytest.raises(ValueError, match=r"'varlen' computes in 16 bits, not torch.float32; use flex or sdpa"):
        choose_backend(CPU, torch.float32, override="varlen")
    on(Hardware("cpu", "cpu"), "varlen")
    with pytest.raises(ValueError, match="'varlen' needs a GPU; on cpu use flex or sdpa"):
        choose_backend(CPU, torch.bfloat16, override="varlen")

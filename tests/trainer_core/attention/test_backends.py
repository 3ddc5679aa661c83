"""Which backend is chosen where, and what refusals say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainer_core.attention.reference_kernel import ReferenceKernel
from trainer_core.attention import backends
from trainer_core.attention.backends import Hardware, choose_backend
from trainer_core.attention.kernels import Operands, Pair, Triple
from trainer_core.attention.probe import flaw

HOPPER = Hardware("cuda", "NVIDIA H200", (9, 0))
BLACKWELL = Hardware("cuda", "NVIDIA B200", (10, 0))
AMPERE = Hardware("cuda", "NVIDIA A100", (8, 0))
TURING = Hardware("cuda", "Tesla T4", (7, 5))
AMD = Hardware("rocm", "AMD Instinct MI300X")
CPU = torch.device("cpu")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Pretend to be on some hardware where only some kernels can be loaded, each of which passes its first try."""
    forget()
    monkeypatch.setattr(backends, "flaw", lambda *_arguments: "")

    def pretend(hardware: Hardware, *loadable: str) -> None:
        def missing() -> Any:
            raise ImportError("not installed")

        monkeypatch.setattr(Hardware, "of", lambda _device: hardware)
        for name in backends.KERNELS:
            monkeypatch.setitem(backends.KERNELS, name, object if name in loadable else missing)  # type: ignore[arg-type]

    yield pretend
    forget()


def forget() -> None:
    backends.attend.cache_clear()
    backends._missing.cache_clear()


@pytest.mark.parametrize(
    ("hardware", "loadable", "dtype", "softcap", "expected"),
    [
        (HOPPER, ("fa3-hub", "fa4", "varlen"), torch.bfloat16, False, "fa4"),
        (HOPPER, ("fa3-hub", "varlen"), torch.bfloat16, False, "fa3-hub"),
        (HOPPER, ("fa4", "varlen"), torch.bfloat16, False, "fa4"),
        (HOPPER, ("varlen",), torch.float16, False, "varlen"),
        (HOPPER, ("varlen",), torch.bfloat16, True, "flex"),
        (HOPPER, ("fa4", "varlen"), torch.bfloat16, True, "fa4"),
        (HOPPER, ("fa3-hub", "fa4", "varlen"), torch.float32, False, "sdpa"),
        (BLACKWELL, ("fa4-hub", "fa4", "varlen"), torch.bfloat16, False, "fa4"),
        (BLACKWELL, ("fa4-hub", "varlen"), torch.bfloat16, False, "fa4-hub"),
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
        NotImplementedError, match="'varlen' on NVIDIA H200 has no softcap; allowed for this model are fa4, fa3-hub"
    ):
        choose_backend(CPU, torch.bfloat16, softcap=True, override="varlen")
    with pytest.raises(ValueError, match=r"'varlen' computes in 16 bits, not torch.float32; use flex or sdpa"):
        choose_backend(CPU, torch.float32, override="varlen")
    on(Hardware("cpu", "cpu"), "varlen")
    with pytest.raises(ValueError, match="'varlen' needs a GPU; on cpu use flex or sdpa"):
        choose_backend(CPU, torch.bfloat16, override="varlen")


class Half(ReferenceKernel):
    """Takes and gives 16 bits, as a kernel does, and computes in float32."""

    def forward(self, on: Operands) -> Pair:
        out, lse = super().forward(_exact(on))
        return out.to(on.q.dtype), lse

    def backward(self, on: Operands, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Triple:
        dq, dk, dv = super().backward(_exact(on), grad.float(), out.float(), lse)
        return dq.to(on.q.dtype), dk.to(on.q.dtype), dv.to(on.q.dtype)


def _exact(on: Operands) -> Operands:
    return replace(on, q=on.q.float(), k=on.k.float(), v=on.v.float())


class Outdated(Half):
    """A build whose function has other parameters."""

    def forward(self, on: Operands) -> Pair:
        raise TypeError("_flash_attn_forward() got an unexpected keyword argument 'window_size'")


class Swapped(Half):
    """A build that returns the gradients in another order."""

    def backward(self, on: Operands, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Triple:
        dq, dk, dv = super().backward(on, grad, out, lse)
        return dq, dv, dk


class Forgetful(Half):
    """A build that does not know the window."""

    def forward(self, on: Operands) -> Pair:
        return super().forward(replace(on, rule=replace(on.rule, window=None)))


@pytest.mark.parametrize(
    ("kernel", "chosen", "said"),
    [
        (Half, "fa3-hub", ""),
        (Outdated, "varlen", "it raised TypeError: _flash_attn_forward() got an unexpected keyword argument"),
        (Swapped, "varlen", "its gradient of k is off by"),
        (Forgetful, "varlen", "its output is off by"),
    ],
)
def test_a_hub_kernel_that_does_not_work_here_is_passed_over(
    on: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernel: Any, chosen: str, said: str
) -> None:
    on(HOPPER, "varlen")
    monkeypatch.setitem(backends.KERNELS, "fa3-hub", kernel)
    monkeypatch.setattr(backends, "flaw", flaw)
    assert choose_backend(CPU, torch.bfloat16) == chosen
    assert said in caplog.text
    assert choose_backend(CPU, torch.bfloat16, softcap=True) == ("fa3-hub" if kernel is Half else "flex")

"""What a server learns of its model's loaders: the copies that they make, or that copies will not do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.trainer_core.attention.models import make
from trainer_core.sync.vllm_copies import NotLearnable, learn
from trainer_core.sync.vllm_room import check_host, fitting, pinned


class Fused(nn.Module):
    """Loads as vLLM's models do: query, key and value into one matrix, the embedding into one with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(12, 4), requires_grad=False)
        self.embed = nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name in ("q", "k", "v"):
                self.qkv.data.narrow(0, 4 * "qkv".index(name), 4).copy_(weight)
            elif name == "embed":
                self.embed.data[: len(weight)].copy_(weight)
                self.embed.data[len(weight) :].fill_(0)
            elif name == "norm":
                self.load_norm(weight)

    def load_norm(self, weight: torch.Tensor) -> None:
        self.norm.data.copy_(weight.reshape(-1))


SHAPES = {"q": (4, 4), "k": (4, 4), "v": (4, 4), "embed": (6, 4), "norm": (2, 2)}


def received() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_later_weights_are_put_in_place_as_the_loaders_would() -> None:
    model, loaded, weights = Fused(), Fused(), received()
    model.load_weights(weights.items())
    before = state(model)
    copies = learn(model, weights)
    assert all(torch.equal(value, before[name]) for name, value in state(model).items())  # nothing was changed
    for name, value in received().items():
        weights[name].copy_(value)  # the next push arrives in the same memory
    copies.apply()
    loaded.load_weights(weights.items())
    assert all(torch.equal(value, state(loaded)[name]) for name, value in state(model).items())
    assert not torch.equal(model.qkv, before["qkv"])


class Computed(Fused):
    def load_norm(self, weight: torch.Tensor) -> None:
        self.norm.data.copy_(-weight.exp().reshape(-1))


class Added(Fused):
    def load_norm(self, weight: torch.Tensor) -> None:
        self.norm.data.zero_()
        self.norm.data.add_(weight.reshape(-1))


class Lost(Fused):
    def load_norm(self, weight: torch.Tensor) -> None:
        pass


class Scalar(Fused):
    def load_norm(self, weight: torch.Tensor) -> None:
        self.norm.data.fill_(weight[0, 0].item())


class Half(Fused):
    def load_norm(self, weight: torch.Tensor) -> None:
        self.norm.data[:2].copy_(weight[0])


class Gone(Fused):
    def load_norm(self, weight: torch.Tensor) -> None:
        raise AttributeError("the loader was taken away after loading")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Computed, "norm is not a plain copy"),
        (Added, "norm is changed by aten.add_"),
        (Lost, "norm goes nowhere"),
        (Scalar, "norm goes nowhere"),
        (Half, "norm is filled only in part"),
        (Gone, "its loaders end with AttributeError"),
    ],
)
def test_where_copies_will_not_do_that_is_said_and_nothing_is_changed(kind: type[Fused], why: str) -> None:
    model, weights = kind(), received()
    Fused.load_weights(model, [item for item in weights.items() if item[0] != "norm"])
    before = state(model)
    with pytest.raises(NotLearnable, match=why):
        learn(model, weights)
    assert all(torch.equal(value, before[name]) for name, value in state(model).items())


def test_a_model_that_serves_another_form_of_its_weights_is_noticed() -> None:
    model, weights = Fused(), received()
    model.load_weights(weights.items())
    model.qkv.data.copy_(model.qkv.data.flip(0))  # as a kernel's own layout would be
    with pytest.raises(NotLearnable, match="qkv is served in another form than it is loaded in"):
        learn(model, weights)


def test_parameters_that_share_memory_are_left_to_the_loaders() -> None:
    model = Fused()
    whole = torch.zeros(8)
    model.norm = nn.Parameter(whole[:4], requires_grad=False)
    model.other = nn.Parameter(whole[4:], requires_grad=False)
    with pytest.raises(NotLearnable, match="other shares its memory"):
        learn(model, received())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_copies_do_what_the_loaders_of_a_real_vllm_model_do(family: str, tmp_path: Path) -> None:
    """Without a server: there the model is as it is on a GPU, while a CPU server gives its weights another form."""
    make(family).save_pretrained(tmp_path)
    command = [sys.executable, "-m", "tests.trainer_core.sync.copies_program", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " copies of " in ended.stdout


def test_weights_wait_on_the_gpu_as_far_as_they_fit_beside_a_landing_place() -> None:
    assert fitting([3, 2, 1], room=6) == [True, True, True]
    assert fitting([3, 2, 1], room=5) == [False, True, False]
    assert fitting([3, 2, 1], room=-7) == [False, False, False]
    assert [pinned(size) for size in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 8]


def test_weights_that_fit_nowhere_are_refused() -> None:
    check_host([3 * 2**30, 2**20], available=9 * 2**30)
    with pytest.raises(ValueError, match=r"4\.0 GiB are needed .* the host has 7\.9 GiB left for this server.*to nccl"):
        check_host([3 * 2**30, 2**20], available=int(7.9 * 2**30))

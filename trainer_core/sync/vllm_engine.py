"""The servers' half of a staged weight push: engines for vLLM's weight-transfer interface.

Staged: weights are received beside the model, by a thread, while the server goes on generating with the old ones. Names
and shapes are compared with the served checkpoint before anything is received, and `finish_weight_update`, which vLLM
runs between two engine steps, puts all of them in place at once. A push that fails at any earlier point leaves the model as it
was. (Engines that load while they receive leave the parameters on the meta device in between, and a request in that time
ends the server.)
"""

from __future__ import annotations

import datetime
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from trainer_core.sync.gloo_group import GlooGroup
from trainer_core.sync.nccl_group import NcclGroup
from trainer_core.sync.vllm_copies import Copies, NotLearnable, learn
from trainer_core.sync.vllm_room import check_host, fitting, pinned

logger = init_logger("vllm.offbeat")  # below "vllm", whose level and handler the server sets up

ABORT_S = 2.0
"""A receive whose group was left ends within this, or is waiting in gloo."""
SPARE_BYTES = 1 << 30
"""Memory of a GPU that is left alone, for what neither vLLM nor this engine counts."""


@dataclass(kw_only=True)
class StagedInitInfo(WeightTransferInitInfo):
    """Where the trainer, rank 0, waits. Ranks of this server begin at `rank_offset`.

    `join_timeout_s` bounds the wait for the others, in which this server generates nothing; `timeout_s` any later one.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float
    join_timeout_s: float


@dataclass
class StagedUpdateInfo(WeightTransferUpdateInfo):
    """What the trainer sends next, in this order: checkpoint names, torch dtype names, shapes."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class StagedEngine(WeightTransferEngine[StagedInitInfo, StagedUpdateInfo]):
    """Receives checkpoint-format weights over a group of its own."""

    init_info_cls = StagedInitInfo
    update_info_cls = StagedUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: GlooGroup | NcclGroup | None = None
        self._timeout_s = 0.0
        self._staged: dict[str, torch.Tensor] = {}
        self._copies: Copies | None = None
        self._learnable = True
        self._receiver: ThreadPoolExecutor | None = None
        self._received: list[Future[None]] = []
        self._announced: list[str] = []
        self._checkpoint_shapes: dict[str, list[int]] | None = None

    @abstractmethod
    def _join(self, info: StagedInitInfo, rank: int) -> GlooGroup | NcclGroup:
        """Meet the trainer."""

    @abstractmethod
    def _places(self, wanted: Sequence[tuple[list[int], torch.dtype]]) -> list[torch.Tensor]:
        """Where weights of these shapes are received. Raises ValueError or RuntimeError where there is no room."""

    def _beside_the_model(self) -> AbstractContextManager[Any]:
        """What the receiving thread works in, so that it does not get in the way of generation."""
        return nullcontext()

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        """Join the trainer's group, in place of any earlier one."""
        self.shutdown()
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self._timeout_s = init_info.timeout_s
        self._group = self._join(init_info, rank)
        self._receiver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-receiver")

    def start_weight_update(self) -> None:
        """Forget what an abandoned update may have announced. The model is not touched."""
        self._received, self._announced = [], []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Check what is announced, then receive it in the background.

        Raises ValueError, before anything is received, when the served model has no such weights.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        """See `update_weights`, whose base class would also wait for the device and so for the weights."""
        if self._group is None or self._receiver is None:
            raise RuntimeError("no trainer is connected: call init_weight_transfer_engine first")
        self._check(update_info)
        self._make_places(update_info)
        self._announced += update_info.names
        places = [self._staged[name] for name in update_info.names]
        self._received.append(self._receiver.submit(self._receive, self._group, places))

    def finish_weight_update(self) -> None:
        """Wait for what was announced and put it into the model, all or nothing."""
        for received in self._received:
            try:
                received.result(timeout=self._timeout_s)
            except FutureTimeout as error:
                raise TimeoutError(f"the weights did not arrive within {self._timeout_s:.0f} s") from error
        self._received = []
        if self._staged.keys() != set(self._announced):
            self._copies, self._staged = None, {name: self._staged[name] for name in self._announced}
        if self._copies is None:
            self._load()
        else:
            self._copies.apply()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # the next engine step must see them

    def shutdown(self) -> None:
        """Leave the group. The memory is kept for the next one, unless a receive still writes into it."""
        if self._receiver is not None:
            self._receiver.shutdown(wait=False, cancel_futures=True)
        if self._group is not None:
            self._group.abort()
        if wait([one for one in self._received if not one.cancelled()], timeout=ABORT_S).not_done:
            self._forget()
        self._receiver = None
        self._group = None
        self._received = []

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Nothing: vLLM before 0.28 wants this method, but Offbeat's trainer sends through StagedSync."""
        raise NotImplementedError("weights are sent by trainer_core.sync.staged")

    def _load(self) -> None:
        """Load by vLLM's own way, and find out whether copies will do from now on."""
        with prepared_anew(self.model) if self.device.type == "cpu" else nullcontext():
            initialize_layerwise_reload(self.model)
            cast(Any, self.model).load_weights(iter(self._staged.items()))
            finalize_layerwise_reload(self.model, self.model_config)
        if self._learnable:
            try:
                if self.device.type == "cpu":
                    raise NotLearnable("a CPU computes with copies of weights in an order of its own")
                if self.model_config.quantization is not None or self.model_config.use_mla:
                    raise NotLearnable("it serves something that is computed from weights")
                self._copies = learn(self.model, self._staged)
                logger.info("Later weights are put in place by %d copies.", len(self._copies.targets))
            except NotLearnable as reason:
                self._learnable = False
                logger.info("Weights go through the loaders of the model at each push: %s.", reason)
        if self._copies is None:
            self._forget()

    def _forget(self) -> None:
        """Give back the memory that weights are received in."""
        self._staged = {}
        self._copies = None

    def _receive(self, group: GlooGroup | NcclGroup, places: list[torch.Tensor]) -> None:
        try:
            with self._beside_the_model():
                for place in places:
                    self._receive_into(place, group)
                group.wait()
        except Exception:
            logger.exception("Receiving weights failed.")  # the trainer, who waits too, cannot be told
            raise

    def _receive_into(self, place: torch.Tensor, group: GlooGroup | NcclGroup) -> None:
        group.broadcast(place)

    def _make_places(self, update: StagedUpdateInfo) -> None:
        """Where each weight was received before, or new places, for which copies are not known.

        Made before the trainer is answered: what fails here is a refusal, and not a transfer that never ends.
        """
        wanted = {
            name: (list(shape), getattr(torch, dtype))
            for name, dtype, shape in zip(update.names, update.dtype_names, update.shapes, strict=True)
        }
        known = {name: (list(place.shape), place.dtype) for name, place in self._staged.items()}
        new = [name for name, form in wanted.items() if known.get(name) != form]
        if new:
            self._copies = None
            places = self._places([wanted[name] for name in new])
            self._staged |= dict(zip(new, places, strict=True))

    def _check(self, update: StagedUpdateInfo) -> None:
        if not len(update.names) == len(update.dtype_names) == len(update.shapes):
            raise ValueError("names, dtype_names and shapes differ in length")
        if self._checkpoint_shapes is None:
            self._checkpoint_shapes = checkpoint_shapes(self.model_config.model, self.model_config.revision)
        known = self._checkpoint_shapes
        if unknown := [name for name in update.names if name not in known]:
            raise ValueError(f"{len(unknown)} pushed weights are not in the served model, the first is {unknown[0]!r}")
        for name, shape in zip(update.names, update.shapes, strict=True):
            if list(shape) != known[name]:
                raise ValueError(f"{name} was pushed with shape {list(shape)}, the served model has {known[name]}")


class StagedGlooEngine(StagedEngine):
    """Through the host's memory."""

    def _join(self, info: StagedInitInfo, rank: int) -> GlooGroup:
        return GlooGroup.join(
            info.master_address, info.master_port, rank=rank, world_size=info.world_size,
            join_timeout=datetime.timedelta(seconds=info.join_timeout_s), timeout=datetime.timedelta(seconds=info.timeout_s),
        )  # fmt: skip

    def _places(self, wanted: Sequence[tuple[list[int], torch.dtype]]) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype) for shape, dtype in wanted]


class StagedNcclEngine(StagedEngine):
    """From GPU to GPU.

    Weights wait in what of the GPU's memory is not the server's by its own settings; those that do not fit there wait in the
    host's, from where putting them in place takes longer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stream = torch.cuda.Stream(self.device)  # one for good: memory that one gave back is not for another
        self._landing = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._pinned_bytes = 0
        self._sharers = 1

    def _join(self, info: StagedInitInfo, rank: int) -> NcclGroup:
        self._sharers = info.world_size - 1
        return NcclGroup(
            info.master_address, info.master_port, rank=rank, world_size=info.world_size, timeout_s=info.join_timeout_s
        )

    def _places(self, wanted: Sequence[tuple[list[int], torch.dtype]]) -> list[torch.Tensor]:
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
        on_gpu = fitting(sizes, self._room())
        beyond = [size for size, fits in zip(sizes, on_gpu, strict=True) if not fits]
        # Memory that was pinned once is torch's for good, and is taken again.
        check_host(beyond, (psutil.virtual_memory().available + self._pinned_bytes) // self._sharers)
        self._pinned_bytes = max(self._pinned_bytes, sum(map(pinned, beyond)))
        with self._beside_the_model():
            self._landing = torch.empty(max([*beyond, self._landing.nbytes]), dtype=torch.uint8, device=self.device)
            return [
                torch.empty(shape, dtype=dtype, device=self.device) if fits
                else torch.empty(shape, dtype=dtype, pin_memory=True)
                for (shape, dtype), fits in zip(wanted, on_gpu, strict=True)
            ]  # fmt: skip

    def _room(self) -> int:
        """Bytes of the GPU that are neither used nor the server's by its own settings."""
        torch.cuda.empty_cache()  # what torch holds for later looks used
        free, total = torch.cuda.mem_get_info(self.device)
        beyond = total * (1 - self.vllm_config.cache_config.gpu_memory_utilization)
        return min(free, int(beyond)) - SPARE_BYTES

    def _receive_into(self, place: torch.Tensor, group: GlooGroup | NcclGroup) -> None:
        on_gpu = place if place.is_cuda else self._landing[: place.nbytes].view(place.dtype).view(place.shape)
        group.broadcast(on_gpu)
        if on_gpu is not place:
            place.copy_(on_gpu, non_blocking=True)

    def _beside_the_model(self) -> AbstractContextManager[Any]:
        torch.cuda.set_device(self.device)  # a new thread begins on device 0
        return torch.cuda.stream(self._stream)


@contextmanager
def prepared_anew(model: torch.nn.Module) -> Iterator[None]:
    """Around a reload on a CPU, where vLLM computes with copies of weights in an order of its own: make these anew too.

    vLLM would leave out two. Experts it prepares only when their kernel is first made; a layer that holds another layer's
    weight, as an output head that is the embedding, only when the weight is loaded through it.
    """
    kernels = {}
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            kernels[method] = method.moe_kernel
            method.moe_kernel = None
    yield
    for method, kernel in kernels.items():
        if method.moe_kernel is None:  # nothing was loaded into these experts
            method.moe_kernel = kernel
    first: dict[int, torch.nn.Module] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        shared = weight is not None and weight.numel() > 0 and first.setdefault(id(weight), layer) is not layer
        if shared and (method := getattr(layer, "quant_method", None)) is not None:
            method.process_weights_after_loading(layer)


def checkpoint_shapes(model: str, revision: str | None) -> dict[str, list[int]]:
    """Names and shapes of a checkpoint (a folder, or a hub id that is in the cache), read from safetensors headers."""
    folder = Path(model)
    if not folder.is_dir():
        folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no .safetensors files, so pushed weights cannot be checked against it")
    shapes: dict[str, list[int]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            shapes.update({name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
    return shapes

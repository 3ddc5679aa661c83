"""How much memory a run needs, from the sizes in a model's config.json: what holds it in the trainer, and in the server.

Bytes, of one device. b is the bytes of a stored weight (`model.dtype`), c those of a value in a matrix product (2 under bf16
autocast, else b), N the tokens of a row, h, f, q, k the widths of hidden state, MLP, queries and keys, V the vocabulary.
Sources: AdamW's two moments and the split of a step's memory follow ZeRO (arXiv 1910.02054, section 3); what a layer keeps for
its backward pass follows "Reducing Activation Recomputation" (arXiv 2205.05198, section 4), with the terms of an attention that
keeps no scores and of a gated MLP; the rest is read off trainer_core/model.py. docs/performance.md has measured peaks beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainer_core.spec import RunSpec

Device = Literal["cpu", "cuda"]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GIB = 1024**3
LOGIT_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
"""As in trainer_core/model.py: float32 bytes of one chunk of logits."""
PROCESS_BYTES = {"trainer": 700 << 20, "server": 1600 << 20}
"""What interpreter and libraries take on a CPU host before anything is loaded, all processes of a part together."""
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type` of the models that the trainer supports (docs/trainer.md)."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder: `queries` and `keys` are heads times width of a head."""

    layers: int
    hidden: int
    mlp: int
    queries: int
    keys: int
    head: int
    vocabulary: int
    tied: bool
    qk_norm: bool
    bias: bool

    @property
    def linear(self) -> int:
        """Weights of a layer's seven matrices."""
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.mlp)

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All weights; what is shared counts once."""
        norms = 2 * self.hidden + (2 * self.head if self.qk_norm else 0)
        biases = self.queries + 2 * self.keys if self.bias else 0
        return self.layers * (self.linear + norms + biases) + self.hidden + self.embedding * (1 if self.tied else 2)

    def adapter(self, rank: int, targets: str) -> int:
        """Weights of a LoRA adapter: rank * (in + out) for each matrix it is laid on."""
        h, q, k, f = self.hidden, self.queries, self.keys, self.mlp
        sizes = {
            "q_proj": h + q, "k_proj": h + k, "v_proj": h + k, "o_proj": q + h,
            "gate_proj": h + f, "up_proj": h + f, "down_proj": f + h,
        }  # fmt: skip
        names = list(sizes) if targets.strip() == "all-linear" else [name.strip() for name in targets.split(",")]
        return self.layers * rank * sum(sizes.get(name, 0) for name in names)


def shape_of(config: Mapping[str, Any]) -> Shape | None:
    """The sizes in a config.json; None for an architecture that the trainer does not know, or without a size."""
    if config.get("model_type") not in ARCHITECTURES:
        return None
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head = int(config.get("head_dim") or hidden // heads)
        return Shape(
            layers=int(config["num_hidden_layers"]), hidden=hidden, mlp=int(config["intermediate_size"]),
            queries=heads * head, keys=int(config.get("num_key_value_heads") or heads) * head, head=head,
            vocabulary=int(config["vocab_size"]), tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=config["model_type"] == "qwen3",
            bias=config["model_type"] == "qwen2" or bool(config.get("attention_bias")),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


@dataclass(frozen=True)
class Row:
    """The largest micro-batch: unique tokens that are forwarded, and positions that are scored."""

    tokens: int
    scored: int


def largest_row(spec: RunSpec, prompt_tokens: int) -> Row:
    """Under a token budget a row is full; under a fixed batch every completion is as long as allowed."""
    budget, training, rollout = spec.training.token_budget, spec.training, spec.rollout
    if budget is None or budget > 0:
        size = spec.server.max_model_len if budget is None else budget
        return Row(size, size)
    groups = -(-training.per_device_train_batch_size // rollout.num_generations)
    scored = training.per_device_train_batch_size * rollout.max_completion_length
    return Row(groups * prompt_tokens + scored, scored)


@dataclass(frozen=True)
class Need:
    """Bytes by what holds them; `total` is the peak."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def trainer(spec: RunSpec, shape: Shape, row: Row, device: Device, *, ranks: int = 1, compiled: bool = False) -> Need:
    """The peak of an optimizer step in one of `ranks` training processes, the process itself left out.

    The peak is either at the end of the forward pass, when autocast holds 16-bit copies of all trained weights, or in the
    backward pass of the output layer, or in that of one decoder layer. `compiled`: layers fused by torch.compile keep less.

    Several ranks share weights, gradients and moments (FSDP2, docs/trainer.md): each holds its part, and whole only the
    embedding and two layers at a time, in 16 bits, with the gradient of one in float32. Peaks of that were not measured.
    """
    b = BYTES[spec.model.dtype]
    c = 2 if spec.training.bf16 else b
    lora, saving = spec.lora.enabled, spec.training.gradient_checkpointing
    base = shape.parameters
    adapter = shape.adapter(spec.lora.r, spec.lora.target_modules) if lora else 0
    trained, kept = (adapter, 4) if lora else (base, b)
    held = base * b * (2 if spec.training.beta and not lora else 1)  # the reference; of an adapter it is the base model

    copies = 0 if b == c else c * shape.layers * shape.linear
    gathered = 0
    if ranks > 1:
        whole = shape.embedding * (1 if shape.tied else 2)
        copies, gathered = 0, c * (whole + 2 * shape.linear) + (0 if lora else 4 * shape.linear)
    layer = row.tokens * _layer_bytes(shape, b, c, lora=lora, compiled=compiled)
    inputs = row.tokens * shape.layers * shape.hidden * b
    chunk = min(row.scored, max(1, LOGIT_BYTES[device] // (4 * shape.vocabulary))) * shape.vocabulary
    fused = device == "cuda"
    scoring = chunk * (2 * c if fused else c + 12) + (0 if b == c else c * shape.embedding)
    head_gradient = 0 if lora else shape.embedding * (4 + 4 + c)
    if saving:
        activations = inputs
        while_forward = (0 if lora else copies) + scoring
        while_backward = max(scoring + head_gradient, layer + layer // 2 + copies // shape.layers)
    else:
        activations = shape.layers * layer
        while_forward = copies + scoring
        while_backward = copies + scoring + head_gradient
    return Need({
        "weights": (held + adapter * 4) // ranks,
        "gradients": trained * kept // ranks,
        "optimizer": 2 * trained * kept // ranks,
        "activations": activations,
        "working": max(while_forward, while_backward) + gathered,
    })  # fmt: skip


def _layer_bytes(shape: Shape, b: int, c: int, *, lora: bool, compiled: bool) -> int:
    """What a decoder layer keeps of one token: inputs of both norms and their results; queries and keys before and after
    their own norm or rotation, values and the attention's result; gate, up and their product, and without fusing also the
    activated gate and the normalised states. LoRA keeps the input of each matrix in 16 bits once more.
    """
    h, q, k, f = shape.hidden, shape.queries, shape.keys, shape.mlp
    found = 2 * (b + c) * h + c * (2 * (q + k) + k + q) + 3 * c * f
    if not compiled:
        found += 2 * b * h + c * f
    return found + (c * (5 * h + q + f) if lora else 0)


def kv_bytes_a_token(spec: RunSpec, shape: Shape) -> int:
    """Keys and values of all layers for one token."""
    return 2 * shape.layers * shape.keys * BYTES[spec.server.dtype]


def server(spec: RunSpec, shape: Shape, device: Device, memory: int | None = None) -> Need:
    """What vLLM takes of one rollout device; its own processes left out.

    On a GPU without `server.kv_cache_gib` it takes `gpu_memory_utilization` of `memory` bytes, and the cache is what the
    weights leave of that; with `memory` unknown, room for one rollout of full length.
    """
    ways = spec.resources.rollout_gpus if device == "cuda" else 1
    weights = shape.parameters * BYTES[spec.server.dtype] // ways
    if spec.server.kv_cache_gib is not None:
        cache = int(spec.server.kv_cache_gib * GIB)
    elif device == "cpu":
        cache = GIB
    else:
        least = spec.server.max_model_len * kv_bytes_a_token(spec, shape) // ways
        share = int(spec.server.gpu_memory_utilization * memory) if memory else 0
        cache = max(least, share - weights)
    return Need({"weights": weights, "cache": cache})

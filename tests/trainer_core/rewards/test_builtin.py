"""The built-in rewards on answers worked out by hand, and how a run's rewards are loaded."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from trainer_core import rewards
from trainer_core.rewards import BUILTINS, HttpReward, SoftOverlongPunishment, check_columns, load_reward, reward_name
from trainer_core.rewards.sandbox import SandboxedReward
from trainer_core.spec import RewardSpec


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def test_last_number_match() -> None:
    texts = ["4 * 3 = 12", "12 or 13", "It is 1,200.", "-5", "none", "12.0", "12."]
    answers = ["12", "12", "1200", "5", "1", "12", "12"]
    assert rewards.last_number_match([chat(t) for t in texts], answers) == [1, 0, 1, 0, 0, 1, 1]
    assert rewards.last_number_match([chat("1")], ["no number"]) == [None]


def test_exact_match_takes_text_and_messages() -> None:
    assert rewards.exact_match([" 12\n", chat("12"), chat("is 12")], [12, "12", "12"]) == [1, 1, 0]
    assert rewards.exact_match([[{"role": "tool", "content": "12"}]], ["12"]) == [0]


def test_accuracy_reward_compares_mathematically() -> None:
    completions = [chat(r"So the answer is $\frac{1}{2}$."), chat("0.5"), chat(r"\boxed{0.25}"), chat("x")]
    assert rewards.accuracy_reward(completions, [r"$\frac{2}{4}$", r"$\frac{1}{2}$", "$0.5$", ""]) == [1, 1, 0, None]
    assert rewards.accuracy_reward([chat("12")], answer=["12"]) == [1]
    with pytest.raises(KeyError, match="'solution' or an 'answer' column"):
        rewards.accuracy_reward([chat("12")])


@pytest.mark.parametrize(
    "text, reward",
    [
        ("<think>a\nb</think>\nanswer", 1),
        ("<think></think>x", 1),
        ("answer", 0),
        ("<think>a</think>", 0),
        ("x<think>a</think>y", 0),
        ("<think>a</think>y</think>", 0),
        ("<think>a<think>b</think>c", 0),
    ],
)
def test_think_format(text: str, reward: float) -> None:
    assert rewards.think_format_reward([chat(text)]) == [reward]


def test_soft_overlong_punishment() -> None:
    punish = SoftOverlongPunishment(max_completion_length=100, soft_length=20)
    lengths = [0, 80, 90, 100, 150]
    assert punish(completion_ids=[[0] * length for length in lengths]) == [0, 0, -0.5, -1, -1]
    with pytest.raises(ValueError, match="soft_length is 200"):
        SoftOverlongPunishment(100, 200)


def test_reasoning_gym_score_gives_the_tasks_own_credit() -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("products", size=1, seed=1)[0]
    gold = entry["answer"]
    texts = [f"It is {gold}", f"<answer>{gold}</answer> and not 3", "nothing", f"{gold} or 999999"]
    columns = {"reasoning_gym_task": ["products"] * 4, "reasoning_gym_entry": [json.dumps(entry)] * 4}
    scores = rewards.reasoning_gym_score([chat(text) for text in texts], **columns)
    assert scores[:2] == [1.0, 1.0]
    assert all(score is not None and score < 1 for score in scores[2:])


class Judge(BaseHTTPRequestHandler):
    """Scores by length of the completion, unless the path asks for something else."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        lengths = [float(len(completion[-1]["content"])) for completion in body["completions"]]
        answer = {"/bad": [1], "/none": {"rewards": [None] * len(lengths)}}.get(self.path, {"rewards": lengths})
        self.send_response(503 if self.path == "/down" else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_http_reward(judge: str) -> None:
    call: dict[str, Any] = {"prompts": [[], []], "completions": [chat("ab"), chat("c")], "completion_ids": [[1], [2]]}
    assert HttpReward(judge)(**call) == [2.0, 1.0]
    assert rewards.http_reward(**call, reward_url=[judge, judge]) == [2.0, 1.0]
    assert HttpReward(f"{judge}/none")(**call) == [None, None]
    with pytest.raises(RuntimeError, match="HTTP 503"):
        HttpReward(f"{judge}/down")(**call)
    with pytest.raises(ValueError, match='without a list "rewards"'):
        HttpReward(f"{judge}/bad")(**call)
    with pytest.raises(ValueError, match="found 0 addresses"):
        rewards.http_reward(**call)
    with pytest.raises(ValueError, match="must begin with http"):
        HttpReward("file:///etc/passwd")(**call)


def test_builtins_are_picklable_named_and_need_no_heavy_library() -> None:
    for name, builtin in BUILTINS.items():
        assert reward_name(pickle.loads(pickle.dumps(builtin.function))) == name
        assert builtin.description
    heavy = "('torch', 'numpy', 'sympy', 'datasets', 'pydantic')"
    program = f"import sys, trainer_core.rewards.sandbox; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_missing_columns_are_named() -> None:
    check_columns(["accuracy_reward", "think_format_reward", "own"], ["prompt", "answer"])
    with pytest.raises(
        ValueError, match="last_number_match needs the column 'answer'; the dataset has prompt, solution"
    ):
        check_columns(["last_number_match"], ["prompt", "solution"])


def test_load_reward(tmp_path: Path) -> None:
    assert load_reward(RewardSpec(name="exact_match"), tmp_path) is rewards.exact_match
    limited = load_reward(RewardSpec(name="soft_overlong_punishment"), tmp_path, max_completion_length=40)
    assert limited(completion_ids=[[0] * 35]) == [-0.5]
    with pytest.raises(ValueError, match="'nope' is not built in; built in are accuracy_reward"):
        load_reward(RewardSpec(name="nope"), tmp_path)
    with pytest.raises(ValueError, match="version 2 of reward 'mine' cannot be read"):
        load_reward(RewardSpec(name="mine", version=2), tmp_path)
    (tmp_path / "mine-v1.py").write_text("def reward(completions)\n    pass\n")
    with pytest.raises(ValueError, match="reward 'mine' version 1: line 1: expected ':'"):
        load_reward(RewardSpec(name="mine", version=1), tmp_path)
    (tmp_path / "mine-v2.py").write_text("def reward(completions): return [float(len(c)) for c in completions]\n")
    loaded = load_reward(RewardSpec(name="mine", version=2), tmp_path)
    assert isinstance(loaded, SandboxedReward)
    assert reward_name(loaded) == "mine"
    assert loaded(completions=["a", "bcd"], prompts=["", ""]) == [1.0, 3.0]
    loaded.close()

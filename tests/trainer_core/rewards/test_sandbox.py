"""The sandbox against code that means harm, and against code that is merely wrong."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from trainer_core.rewards.sandbox import (
    FOLDER_PREFIX,
    Limits,
    RewardError,
    SandboxedReward,
    SandboxResult,
    score_once,
)

CALL = {"prompts": ["p", "q"], "completions": ["a", "bb"], "completion_ids": [[1], [2, 3]]}


def run(body: str, deadline_s: float = 10.0, limits: Limits | None = None) -> SandboxResult:
    """Score two completions with a function that has this body."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return score_once(f"def reward(completions, **columns):\n{lines}\n", "reward", [CALL], deadline_s, limits)


@pytest.fixture(scope="module", autouse=True)
def confined() -> None:
    """These tests prove what Landlock and seccomp do; a kernel without them cannot pass them."""
    level = run("return [0.0, 0.0]").level
    assert "landlock" in level, f"the kernel offers only: {level}"
    assert "seccomp" in level, f"the kernel offers only: {level}"


def test_scores_and_reports_time_output_and_level() -> None:
    result = run("print('looking at', len(completions))\nreturn [len(c) / 2 for c in completions]")
    assert result.values == [[0.5, 1.0]]
    assert result.error is None
    assert result.output == "looking at 2\n"
    assert len(result.seconds) == 1
    assert 0 <= result.seconds[0] < 1
    assert result.level.startswith("process + rlimits")


def test_async_functions_and_functions_without_kwargs() -> None:
    source = (
        "import asyncio\nasync def reward(completion_ids):\n"
        "    await asyncio.sleep(0)\n    return [len(i) for i in completion_ids]"
    )
    assert score_once(source, "reward", [CALL, CALL], 10).values == [[1.0, 2.0], [1.0, 2.0]]


def test_may_import_numpy_and_math_verify() -> None:
    source = (
        "import numpy as np\nfrom math_verify import parse, verify\n"
        "def reward(completions, **columns):\n"
        "    return [float(verify(parse('$1/2$'), parse('0.5'))), np.float64(np.linalg.norm(np.ones((3, 3)) @ np.ones(3)))]"
    )
    result = score_once(source, "reward", [CALL], 30)
    assert result.error is None, result.error
    assert result.values[0] == [1.0, pytest.approx(27**0.5)]


@pytest.mark.parametrize(
    "returned, found",
    [
        ("[1.0]", "returned 1 rewards for 2 completions"),
        ("[1.0, 'high']", "returned str 'high' for completion 1"),
        ("[1.0, float('nan')]", "returned nan for completion 1"),
        ("[float('inf'), 0]", "returned inf for completion 0"),
        ("3.5", "returned float 3.5; a list of 2 numbers"),
        ("'12'", "returned str '12'"),
        ("None", "returned NoneType None"),
        ("[[1], 2]", "returned list [1] for completion 0"),
    ],
)
def test_nonsense_is_named(returned: str, found: str) -> None:
    result = run(f"return {returned}")
    assert result.values == []
    assert found in str(result.error)


def test_none_is_unscorable() -> None:
    assert run("return [None, 1]").values == [[None, 1.0]]


def test_an_exception_has_type_message_and_line() -> None:
    result = score_once(
        "def helper(x):\n    return {}[x]\n\ndef reward(completions):\n    return [helper('k')]\n", "reward", [CALL], 10
    )
    assert result.error is not None
    assert (result.error.type, result.error.message, result.error.line) == ("KeyError", "'k'", 2)
    assert "line 5" in result.error.traceback
    assert "sandbox_child" not in result.error.traceback


def test_a_syntax_error_and_a_failing_import_have_lines() -> None:
    broken = score_once("x = 1\ndef reward(completions)\n    pass\n", "reward", [CALL], 10)
    assert broken.error is not None
    assert (broken.error.type, broken.error.line) == ("SyntaxError", 2)
    missing = score_once("\nimport no_such_module\ndef reward(completions): pass\n", "reward", [CALL], 10)
    assert missing.error is not None
    assert (missing.error.type, missing.error.line) == ("ModuleNotFoundError", 2)


def test_an_endless_loop_ends_at_the_deadline() -> None:
    started = time.monotonic()
    result = run("while True: pass", deadline_s=1.5)
    assert time.monotonic() - started < 4
    assert result.error is not None
    assert result.error.type == "Timeout"


def test_an_endless_loop_that_swallows_everything_ends_too() -> None:
    body = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "while True:\n    try:\n        time.sleep(9)\n    except BaseException:\n        pass"
    )
    started = time.monotonic()
    assert run(body, deadline_s=1.5).error is not None
    assert time.monotonic() - started < 4


def test_memory_is_limited() -> None:
    result = run("x = bytearray(3 * 2**30)\nreturn [0, 0]")
    assert result.error is not None
    assert result.error.type == "MemoryError"


@pytest.mark.parametrize(
    "attempt",
    [
        "import os; os.fork()",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.execv('/bin/true', ['true'])",
        "import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start()",
        "import ctypes; n = ctypes.CDLL(None).vfork(); assert n < 0; raise PermissionError",
    ],
)
def test_no_other_process_can_be_started(attempt: str) -> None:
    result = run(f"{attempt}\nreturn [0, 0]")
    assert result.error is not None
    assert result.error.type in ("PermissionError", "BlockingIOError"), result.error


def test_a_fork_bomb_starts_nothing() -> None:
    before = len(psutil.pids())
    body = (
        "import os\nn = 0\nfor _ in range(10000):\n    try:\n        os.fork()\n        n += 1\n"
        "    except OSError:\n        pass\nreturn [n, n]"
    )
    assert run(body).values == [[0.0, 0.0]]
    assert len(psutil.pids()) < before + 20


def test_threads_are_allowed() -> None:
    body = (
        "import threading\nseen = []\nt = threading.Thread(target=lambda: seen.append(1))\n"
        "t.start(); t.join()\nreturn seen * 2"
    )
    assert run(body).values == [[1.0, 1.0]]


@pytest.mark.parametrize(
    "attempt",
    [
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000')",
    ],
)
def test_no_network(attempt: str) -> None:
    result = run(f"{attempt}\nreturn [0, 0]")
    assert result.error is not None
    assert result.error.type in ("PermissionError", "URLError"), result.error
    assert "Operation not permitted" in result.error.message


def test_files_of_ours_cannot_be_read_or_listed(tmp_path: Path) -> None:
    secret = tmp_path / "db.sqlite3"
    secret.write_text("secret")
    secret.chmod(0o644)
    project = Path(__file__).resolve().parents[3]
    attempts = [
        f"open({str(secret)!r}).read()",
        f"__import__('os').listdir({str(tmp_path)!r})",
        f"__import__('os').listdir({str(project)!r})",
        f"open({str(project / 'pyproject.toml')!r}).read()",
        "open('/etc/passwd').read()",
        f"open('/proc/{os.getpid()}/environ').read()",
        "open('/proc/self/environ').read()",
        "__import__('os').listdir('/root')",
        "__import__('os').listdir('/tmp')",
        f"__import__('os').rename({str(secret)!r}, 'mine')",
        f"__import__('os').link({str(secret)!r}, 'mine')",
    ]
    body = (
        f"for attempt in {attempts!r}:\n    try:\n        print('read', eval(attempt))\n"
        "    except OSError as error:\n        print(error.errno)\nreturn [0, 0]"
    )
    result = run(body)
    assert result.error is None
    refusals = {errno.EACCES, errno.EPERM, errno.EXDEV}
    assert all(int(line) in refusals for line in result.output.splitlines()), result.output
    assert len(result.output.splitlines()) == len(attempts)
    assert secret.read_text() == "secret"


def test_only_its_own_folder_can_be_written(tmp_path: Path) -> None:
    target = tmp_path / "planted"
    assert run("open('note', 'w').write('x')\nreturn [len(open('note').read()), 0]").values == [[1.0, 0.0]]
    for path in (target, Path(sys.prefix) / "planted", Path(__file__).with_name("planted"), Path("/dev/shm/planted")):
        result = run(f"open({str(path)!r}, 'w')\nreturn [0, 0]")
        assert result.error is not None
        assert result.error.type == "PermissionError"
        assert not path.exists()


def test_the_environment_holds_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_TEST_SECRET", "hunter2")
    result = run("import os\nprint(dict(os.environ))\nreturn [0, 0]")
    assert result.error is None
    assert "hunter2" not in result.output
    assert "SECRET" not in result.output


@pytest.mark.parametrize("attempt", ["os.kill(os.getppid(), 9)", "os.killpg(1, 0)", "os.kill(-1, 9)", "os.kill(0, 9)"])
def test_nobody_else_can_be_killed(attempt: str) -> None:
    result = run(f"import os\n{attempt}\nreturn [0, 0]")
    assert result.error is not None
    assert result.error.type == "PermissionError"


def test_limits_cannot_be_raised_and_the_parent_bond_cannot_be_cut() -> None:
    raised = run("import resource as r\nr.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY, r.RLIM_INFINITY))\nreturn [0, 0]")
    assert raised.error is not None
    assert "not allowed" in raised.error.message or raised.error.type == "PermissionError"
    bond = run("import ctypes\nlibc = ctypes.CDLL(None)\nreturn [libc.prctl(1, 0, 0, 0, 0), libc.ptrace(16, 1, 0, 0)]")
    assert bond.values == [[-1.0, -1.0]]


def test_much_output_is_drained_and_its_end_kept() -> None:
    result = run("for i in range(200000):\n    print('line', i, 'x' * 50)\nreturn [0, 0]", deadline_s=30)
    assert result.values == [[0.0, 0.0]]
    assert result.output.rstrip().endswith("x")
    assert "line 199999" in result.output
    assert len(result.output) <= 16 * 1024


def test_a_file_cannot_grow_without_end() -> None:
    result = run("f = open('big', 'wb')\nwhile True: f.write(b'x' * 2**20)")
    assert result.error is not None
    assert "too large" in result.error.message


def test_leaving_is_told() -> None:
    assert "SystemExit" in str(run("import sys\nsys.exit(3)").error)
    gone = run("import os\nos._exit(7)")
    assert gone.error is not None
    assert gone.error.message == "the process ended with exit code 7 during the call"
    crashed = run("import ctypes\nctypes.string_at(0)")
    assert crashed.error is not None
    assert "SIGSEGV" in crashed.error.message


def test_forged_answers_are_checked() -> None:
    """Code that writes to the answer pipe itself gets its answers checked as any other."""
    body = (
        "import os, json, struct\n"
        "for fd in range(3, 1024):\n"
        "    try:\n"
        "        p = json.dumps({'values': ['a', 1e999], 'seconds': 0}).encode()\n"
        "        os.write(fd, struct.pack('<Q', len(p)) + p)\n"
        "    except OSError:\n"
        "        pass\n"
        "return [0, 0]"
    )
    assert "returned str 'a'" in str(run(body).error)
    huge = body.replace("struct.pack('<Q', len(p))", "struct.pack('<Q', 2**40)")
    assert "is longer than" in str(run(huge).error)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stale = tmp_path / f"{FOLDER_PREFIX}4194304-x"  # a process number above the kernel's highest
    stale.mkdir()
    run("open('note', 'w').write('x')\nreturn [0, 0]")
    run("while True: pass", deadline_s=0.7)
    assert list(tmp_path.iterdir()) == []
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert not [child for child in children if "sandbox_child" in " ".join(child.cmdline())]


def test_the_training_callable_is_warm_picklable_and_recovers() -> None:
    source = (
        "import os\nn = 0\ndef score(completions, **columns):\n    global n\n    n += 1\n"
        "    if 'die' in completions: os._exit(1)\n    return [n for _ in completions]\n"
    )
    reward = pickle.loads(pickle.dumps(SandboxedReward(source, "score", Limits(), name="mine")))
    assert reward.__name__ == "mine"
    assert reward(**CALL) == [1.0, 1.0]
    assert reward(**CALL) == [2.0, 2.0]
    assert pickle.loads(pickle.dumps(reward))(**CALL) == [1.0, 1.0]
    with pytest.raises(RewardError, match="exit code 1"):
        reward(completions=["die"])
    assert reward(**CALL) == [1.0, 1.0]
    reward.close()


def test_the_child_dies_with_its_parent() -> None:
    program = (
        "from trainer_core.rewards.sandbox import *\n"
        "r = SandboxedReward('def f(completions): return [0.0]', 'f', Limits())\n"
        "r(completions=['x'])\nprint(r._process._process.pid, flush=True)\nimport time; time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    gone, _ = psutil.wait_procs([child], timeout=5)
    assert gone or child.status() == psutil.STATUS_ZOMBIE

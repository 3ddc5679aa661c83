"""32 runs report at once while 20 browsers poll: time of pages, and nothing locked.

python bench/metrics_load.py [--seconds 60] [--runs 32] [--clients 20]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.support.load import under_load
from bench.support.studio import set_up, web_server

BAR_MS = 300


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=60)
    options.add_argument("--runs", type=int, default=32)
    options.add_argument("--clients", type=int, default=20)
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="offbeat-load-") as home:
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before")
        set_up(Path(home))
        from webapp.accounts.models import User

        owner = User.objects.create_user("bench")
        with web_server(Path(home)) as url:
            load = under_load(url, owner, arguments.runs, arguments.clients, arguments.seconds)
    print(
        f"{arguments.runs} runs, {arguments.clients} browsers, {arguments.seconds:.0f} s, load {os.getloadavg()[0]:.1f} after"
    )
    print(f"{load.points:,} points written, {load.stored:,} stored; failures: {load.failures[:5] or 'none'}")
    for kind, times in sorted(load.times.items()):
        median = sorted(times)[len(times) // 2]
        print(f"{kind:32}{len(times):>6} requests   median {median:6.0f} ms   p99 {load.p99(kind):6.0f} ms")
    print(
        f"{'all':32}{sum(map(len, load.times.values())):>6} requests   p99 {load.p99():.0f} ms   (bar: < {BAR_MS} ms)"
    )
    return 1 if load.failures or load.points != load.stored else 0


if __name__ == "__main__":
    raise SystemExit(main())

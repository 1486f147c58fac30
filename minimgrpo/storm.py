"""A storm of kills: ``python -m minimgrpo.storm --kills 200``.

Short runs of two servers, each of which is killed (SIGKILL) again and again at random moments and started again. Then
every file must be that of the same run in one process that nobody disturbed: nothing lost, nothing trained on twice.
A server takes seconds to start, so 200 kills take a while; the tests do the same with servers that are forked.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from minimgrpo import display

with display.interruptible():  # torch and transformers take seconds to import
    from minimgrpo import server, tasks, train
    from minimgrpo.protocol import ROLES
    from minimgrpo.servers import Config, Team
    from minimgrpo.tools import Tools

CONFIG = Config(steps=4, questions=2, rollouts=4, threads=1, staleness=1)
KILLS = 20  # in one run


def storm(start: Callable[[str], object], kills: int, draws: random.Random, longest: float) -> Counter:
    """Run both servers to their end, killing one or the other ``kills`` times at most -> the kills of each role.

    ``start(role)`` returns a process (``poll``, ``kill``, ``wait``). The time from one kill to the next is random, at
    most ``longest`` seconds. Raises RuntimeError when a server gives up.
    """
    servers, done = {role: start(role) for role in ROLES}, Counter()
    try:
        while True:
            codes = {role: process.poll() for role, process in servers.items()}
            if failed := [role for role, code in codes.items() if code]:
                raise RuntimeError(f"the {failed[0]} gave up")
            if set(codes.values()) == {0}:
                return done
            time.sleep(draws.uniform(0, longest))
            role = draws.choice([role for role, code in codes.items() if code is None])
            if done.total() < kills and servers[role].poll() is None:
                servers[role].kill()
                servers[role].wait()
                done[role] += 1
                servers[role] = start(role)
    finally:
        for process in servers.values():
            process.kill()
            process.wait()


def contents(root: Path) -> dict[str, bytes | object]:
    """The files of a run, by name, that do not depend on what happened to it: without locks and measured seconds."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_file() and path.name != "lock" and path.suffix != ".tmp":
            found[name] = timeless(path.read_text(encoding="utf-8")) if "metrics" in name else path.read_bytes()
    return found


def timeless(text: str) -> list[dict]:
    """The lines of a ``metrics.jsonl`` without what depends on the clock."""
    rows = (json.loads(line) for line in text.splitlines())
    return [{key: value for key, value in row.items() if "second" not in key} for row in rows]


def one_run(config: Config, folder: Path, kills: int, draws: random.Random) -> Counter:
    """One run in a storm, compared with the undisturbed one -> the kills of each role, and what was compared."""
    calm, stormy = folder / "calm" / "run", folder / "stormy" / "run"
    policy, executor_policy = train.load_policies(config)  # as the servers do, on the same devices
    train.open_run(calm, config)
    world = tasks.load_questions("train"), Tools(tasks.load_pages())
    team = Team(config, policy, calm, *world, executor_policy=executor_policy)
    compared, started = 0, time.process_time()
    for step in range(1, config.steps + 1):
        planned, executed, _ = team.step(step)
        compared += len(planned) + len(executed)
    longest = (time.process_time() - started) / config.steps  # of CPU: on a busy machine the kills come all the faster

    def start(role: str) -> subprocess.Popen:
        process, lock = server.start(role, stormy, server.flags_of(config)), stormy / role / "lock"
        while process.poll() is None and not (lock.exists() and lock.read_text(encoding="utf-8") == f"{process.pid}\n"):
            time.sleep(0.05)  # it is still importing torch, which is of no interest here
        return process

    done = storm(start, kills, draws, longest)
    expected, got = contents(calm), contents(stormy)
    if differing := sorted(name for name in expected | got if expected.get(name) != got.get(name)):
        raise RuntimeError(f"after {done.total()} kills {stormy} differs from {calm} in {', '.join(differing)}")
    return done + Counter(trajectories=compared, files=len(expected))


def main(argv: list[str] | None = None) -> int:
    parser = display.Parser(prog="minimgrpo.storm", description="Kill the two servers again and again.")
    parser.add_argument("--kills", type=int, default=200, help="how many kills in all (200)")
    parser.add_argument("--seed", type=int, default=0, help="seeds the runs and the moments (0)")
    args = parser.parse_args(argv)
    if args.kills < 1:
        parser.error(f"at least 1 kill makes a storm, not {args.kills}")
    draws, total, seed = random.Random(args.seed), Counter(), args.seed
    folder = Path(tempfile.mkdtemp(prefix="storm-"))
    while (kills := total["planner"] + total["executor"]) < args.kills:
        try:
            total += one_run(replace(CONFIG, seed=seed), folder / str(seed), min(KILLS, args.kills - kills), draws)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        total["runs"] += 1
        seed += 1
        killed = f"{total['planner']} kills of the planner, {total['executor']} of the executor in {total['runs']} runs"
        same = f"all {total['files']} files, with {total['trajectories']} trajectories, as in the undisturbed runs"
        print(f"{killed}: {same}", flush=True)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

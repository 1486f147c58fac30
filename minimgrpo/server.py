"""One role's server as a process of its own: ``python -m minimgrpo.server planner RUN`` and ``... executor RUN``.

Each loads the base with its own adapter only; they meet in RUN (``minimgrpo.log``) and nowhere else. The order of
starting does not matter: whichever comes first publishes ``config.json`` from its flags, and the other one takes that
or the same flags. Ctrl-C or a kill stops a server at any moment; starting it again continues.
``python -m minimgrpo.train RUN --decoupled`` starts both and shows their progress.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from argparse import SUPPRESS
from pathlib import Path

from minimgrpo import display

with display.interruptible():  # torch and transformers take seconds to import
    import torch

    from minimgrpo import log, metrics, tasks, train
    from minimgrpo.base import devices
    from minimgrpo.log import LogError, RunLog
    from minimgrpo.policy import describe
    from minimgrpo.protocol import ROLES
    from minimgrpo.servers import Config, ExecutorServer, PlannerServer, Server
    from minimgrpo.tools import Tools

PATIENCE = 3600.0


def main(argv: list[str] | None = None) -> int:
    parser = train.Parser(prog="minimgrpo.server", description="Run the planner or the executor of a training run.")
    parser.add_argument("role", choices=ROLES, help="which of the two")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory, the same for both")
    help_text = f"give up when the other one publishes nothing for so long ({PATIENCE:g})"
    parser.add_argument("--patience", type=float, default=PATIENCE, metavar="SECONDS", help=help_text)
    parser.add_argument("--supervised", metavar="COMMAND", help=SUPPRESS)  # end when standard input ends
    args = parser.parse_args(argv)
    if not args.patience > 0:
        parser.error(f"patience is a number of seconds above 0, not {args.patience}")
    if args.supervised:
        threading.Thread(target=end_with_standard_input, daemon=True).start()

    def run() -> None:
        begun = args.resume = args.resume or os.path.exists(args.run / "config.json")
        config = train.chosen_config(parser, args, args.run)
        with contextlib.ExitStack() as held:
            if begun:  # find out now, not after loading a large model
                config = train.open_run(args.run, config, resume=True)
                held.enter_context(log.owned(args.run, args.role))
            server = load(args.role, args.run, config)
            if not begun:  # only now, so that a model that is not there leaves no directory behind
                train.publish_config(args.run, config)
                train.open_run(args.run, config, resume=True)
                held.enter_context(log.owned(args.run, args.role))
            with display.Line(display.console()) as line:
                serve(server, line, args.patience)

    again = f"python -m minimgrpo.server {args.role} {shlex.quote(str(args.run))}"
    return train.guarded(run, args.run, args.supervised or again)


def load(role: str, root: Path, config: Config) -> Server:
    """The server of ``role`` with what it needs: the base, its own adapter, and its questions or its tools."""
    torch.set_num_threads(config.threads)
    device = devices(config.planner_device, config.executor_device)[ROLES.index(role)]
    policy = train.load_policy(config, device, (role,))
    print(f"{role}: {describe(policy)}", flush=True)
    if role == "planner":
        questions = tasks.load_questions("train")
        train.refuse_no_room(policy, questions, config)
        return PlannerServer(config, policy, RunLog(root), questions)
    keys = metrics.keys(tasks.load_questions("train"))  # to measure its queries, nothing else of the questions
    return ExecutorServer(config, policy, RunLog(root), Tools(tasks.load_pages()), train.expert_of(config), keys)


def serve(server: Server, line: display.Line, patience: float = PATIENCE) -> None:
    """Do the role's part of every step that is left."""
    config, role = server.config, server.role
    wait = Waiting(server, line, patience)
    first, shown = server.resume() + 1, max(1, config.steps // 20)
    for step in range(first, config.steps + 1):
        wait.step = step
        trajectories = server.play(step, wait)
        server.learn(config.updates(role, step))
        text = f"{role}: step {step}/{config.steps}, {len(trajectories)} trajectories, version {server.learner.version}"
        (line.keep if step in (first, config.steps) or step % shown == 0 else line.state)(text)
    line.keep(f"{role}: all {config.steps} steps are done")


class Waiting:
    """``wait`` for two processes: look for the file again and again, never by the clock's time or the files'."""

    def __init__(self, server: Server, line: display.Line, patience: float):
        self.root, self.role, self.line, self.patience = server.log.root, server.role, line, patience
        self.step, self.steps = 0, server.config.steps
        self.peer = next(role for role in ROLES if role != server.role)

    def __call__(self, *paths: Path) -> Path:
        started = time.monotonic()
        while not (found := log.first(*paths)):
            waited = time.monotonic() - started
            if waited > self.patience:
                raise LogError(
                    f"the {self.peer} has published nothing for {self.patience:g} s ({paths[0]} is awaited): start it "
                    f"(python -m minimgrpo.server {self.peer} {shlex.quote(str(self.root))}) and this {self.role} again"
                )
            if waited > 1:
                name = paths[0].relative_to(self.root).as_posix()
                where = f"{self.role}: step {self.step}/{self.steps}"
                self.line.state(f"{where}, waiting for the {self.peer} ({name}), {waited:.0f} s")
            time.sleep(min(0.05, 0.001 + waited / 20))  # costs at most a twentieth of the wait
        return found


# ---------------------------------------------------------------------------------------------- both as child processes


def start(
    role: str, root: Path, flags: list[str] = (), command: str = "started by another program"
) -> subprocess.Popen:
    """Start a server as a child that ends with this process; what it says on stderr can be read from ``.complaints``.

    A new process, never a fork: the executor's python tool hangs in a forked one.
    """
    complaints = tempfile.TemporaryFile()  # noqa: SIM115 (read when the child has ended)
    call = [sys.executable, "-m", "minimgrpo.server", role, str(root), "--supervised", command, "--patience", "inf"]
    child = subprocess.Popen(
        [*call, *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=complaints,
        start_new_session=True,  # a Ctrl-C in the terminal is for the parent alone
    )
    child.complaints = complaints
    return child


def end_with_standard_input() -> None:
    """End this process at once when the parent closes the pipe or is no more. It is as safe as any kill."""
    while os.read(0, 1):  # not sys.stdin: Python cannot end while a thread is reading that
        pass
    os._exit(130)


def flags_of(config: Config) -> list[str]:
    """The command line that asks for ``config``."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in train.flat(config).items()]


def run_both(screen, root: Path, config: Config, resume: bool, command: str, tell=lambda facts: None) -> None:
    """Run both servers as children and show their progress; whatever ends this ends both.

    ``command`` continues the run; ``tell`` gets what each step measured. Raises LogError when a server gives up, with
    what it said.
    """
    if resume:
        config = train.open_run(root, config, resume=True)
    run_log, questions = RunLog(root), tasks.load_questions("train")

    def complete(step: int) -> bool:
        updates = {role: config.updates(role, step) for role in ROLES}
        return all(
            (run_log.last_checkpoint(role) or 0) >= n and run_log.trajectories(role, step).exists()
            for role, n in updates.items()
        )

    seen: list[dict] = []
    while len(seen) < config.steps and complete(len(seen) + 1):
        for role in ROLES:  # to find damage now
            log.read_trajectories(run_log.trajectories(role, len(seen) + 1))
        seen.append(train.measured(run_log, questions, len(seen) + 1))
        tell(seen[-1])
    servers = {role: start(role, root, [] if resume else flags_of(config), command) for role in ROLES}
    print(", ".join(f"{role}: process {server.pid}" for role, server in servers.items()))
    try:
        with display.Progress(screen, config.steps, config.d_max, seen) as progress:
            step = len(seen) + 1
            while step <= config.steps or any(server.poll() is None for server in servers.values()):
                for role, server in servers.items():
                    if server.poll():
                        fail(role, server, command)
                if step <= config.steps and complete(step):
                    facts = train.measured(run_log, questions, step)
                    progress.update(facts)
                    tell(facts)
                    step += 1
                else:
                    time.sleep(0.05)
    finally:
        for server in servers.values():
            server.kill()
            server.wait()
    print(traffic_text(run_log))


def fail(role: str, server: subprocess.Popen, command: str) -> None:
    """Say why a server ended: its own sentence, the signal that killed it, or, for a bug, its traceback."""
    server.complaints.seek(0)
    said = server.complaints.read().decode("utf-8", "replace")
    if server.returncode == 2:
        raise LogError(said)
    sys.stderr.write(said)
    if server.returncode > 0:
        sys.exit(server.returncode)
    killed = f"the {role} was killed (signal {-server.returncode})"
    raise LogError(f"{killed}: what was published is kept, and this continues the run: {command}")


def traffic_text(run_log: RunLog) -> str:
    """What has crossed between the servers, in bytes."""
    crossed = run_log.traffic()
    parts = ", ".join(f"{size:,} of {kind}" for kind, size in crossed.items())
    return f"{sum(crossed.values()):,} bytes crossed between planner and executor, text and scalars only: {parts}"


if __name__ == "__main__":
    sys.exit(main())

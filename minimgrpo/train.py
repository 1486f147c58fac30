"""Train a planner and an executor together: ``python -m minimgrpo.train runs/mine --steps 40 --seed 1``.

RUN gets the log of ``minimgrpo.log`` and ``RUN/metrics/step-000012.json``, what each step measured. Nothing is kept in
memory that a stopped run would need: every step is on disk before it counts as done, so Ctrl-C is always safe and
``--resume`` goes on with the same random numbers. A resumed run keeps its whole configuration, its number of steps
included, since the learning rate of every step depends on it.

The demo (``minimgrpo.demo``) is the same run with an evaluation before and after; it takes its flags from here.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path

from minimgrpo import display

with display.interruptible():  # torch and transformers take seconds to import
    import torch

    from minimgrpo import log, metrics, tasks
    from minimgrpo.agents import Limits
    from minimgrpo.base import devices
    from minimgrpo.chat import ChatError
    from minimgrpo.learner import Objective
    from minimgrpo.log import LogError, RunLog
    from minimgrpo.policy import ModelError, Policy, describe
    from minimgrpo.protocol import ROLES
    from minimgrpo.servers import Config, Team
    from minimgrpo.tools import Tools
    from minimgrpo.trajectory import Trajectory

# ------------------------------------------------------------------------------------------------------- the run


def open_run(root: Path, config: Config, resume: bool = False) -> Config:
    """Create the run directory with its ``config.json``, or find that of the same run -> the run's config.

    Raises LogError when a new run would go into a directory with files, and when ``resume`` finds no run there or one
    with another config.
    """
    if resume:
        stored = stored_config(root)
        if differing := [name for name, value in flat(config).items() if flat(stored)[name] != value]:
            was = ", ".join(f"{name} = {flat(stored)[name]}" for name in differing)
            raise LogError(
                f"{root} was started with {was}, and a resumed run keeps that: leave the flag out, or start anew"
            )
        return stored
    refuse_existing(root)
    facts = {**asdict(config), "torch": str(torch.__version__)}
    log.publish_text(root / "config.json", json.dumps(facts, indent=1) + "\n")
    return config


def refuse_existing(root: Path) -> None:
    """Raise LogError when a new run has no place at ``root``."""
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise LogError(f"{root} exists: continue that run with --resume, or choose another name for this one")


def stored_config(root: Path) -> Config:
    """The config of the run in ``root``. Raises LogError when there is none or it is damaged."""
    path = root / "config.json"
    if not path.is_file():
        raise LogError(f"there is no run to resume in {root}: leave out --resume to start one")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        facts.pop("torch")
        return Config(**{**facts, "objective": Objective(**facts["objective"]), "limits": Limits(**facts["limits"])})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LogError(f"{path} is damaged ({error}): start a new run under another name") from None


def load_team(root: Path, config: Config, resume: bool) -> Team:
    """Load what the config names, open the run, put the team together. Prints what was loaded.

    The run is opened last, so that a model or data file that is not there leaves no directory behind.
    """
    torch.set_num_threads(config.threads)
    policy, executor_policy = load_policies(config)
    pages, questions = tasks.load_pages(), tasks.load_questions("train")
    adapter = sum(p.numel() for p in policy.parameters("planner").values())
    print("\n".join(dict.fromkeys((describe(policy), describe(executor_policy)))))
    print(f"adapters planner and executor, {adapter / 1e6:.2f} M each; {len(pages)} pages, {len(questions)} questions")
    config = open_run(root, config, resume)
    return Team(config, policy, root, questions, Tools(pages), executor_policy=executor_policy)


def load_policies(config: Config) -> tuple[Policy, Policy]:
    """The planner's policy and the executor's: the same object with both adapters, or on two devices one for each."""

    def load(device: str, roles: tuple[str, ...]) -> Policy:
        model = config.model, config.quantize, config.rank, config.alpha
        return Policy.load(*model, seed=config.seed, device=device, dtype=config.dtype, roles=roles)

    planner, executor = devices(config.planner_device, config.executor_device)
    if planner == executor:
        policy = load(planner, ROLES)
        return policy, policy
    return load(planner, ("planner",)), load(executor, ("executor",))


def train(team: Team, first: int = 1) -> Iterator[tuple[int, list[Trajectory], list[Trajectory], dict]]:
    """Do the steps from ``first`` (``team.resume() + 1``) on -> step, both roles' trajectories, what was measured."""
    for step in range(first, team.config.steps + 1):
        started = time.perf_counter()
        planned, executed, learned = team.step(step)
        measured = learned | team_metrics(team, planned, executed)
        measured["seconds"] = time.perf_counter() - started
        log.publish_text(metrics_file(team.log.root, step), json.dumps(measured) + "\n")
        yield step, planned, executed, measured


def team_metrics(team: Team, planned: list[Trajectory], executed: list[Trajectory]) -> dict:
    """``metrics.team`` and, for each role, the share of groups without signal and the mean surprise of its tokens."""
    measured = metrics.team(team.planner.questions, planned, executed)
    for role, trajectories in (("planner", planned), ("executor", executed)):
        measured[f"{role}_flat"] = flat_share(trajectories)
        tokens = sum(t.sampled for t in trajectories)
        # in nats; an estimate of the entropy over all sampled tokens, also those that no gradient comes from
        measured[f"{role}_surprise"] = -sum(sum(t.logprobs) for t in trajectories) / tokens if tokens else None
    return measured


def flat_share(trajectories: list[Trajectory]) -> float | None:
    """The share of groups in which every advantage is 0 (all rewards equal), so that nothing is learned from them.

    A question on which no rollout delegates has no executor group and is not counted there.
    """
    signal: dict[str, bool] = {}
    for t in trajectories:
        signal[t.question_id] = signal.get(t.question_id, False) or (t.copies > 0 and t.advantage != 0)
    return 1 - sum(signal.values()) / len(signal) if signal else None


def metrics_file(root: Path, step: int) -> Path:
    return root / "metrics" / f"step-{step:06d}.json"


def resumed(team: Team) -> list[dict]:
    """Load the newest checkpoints -> what each complete step measured; none of a new run.

    The log is read as well, so that damage shows now and not after hours. A step that was stopped before it could write
    what it measured is measured from its log.
    """
    try:
        done = team.resume()
    except ModelError as error:
        advice = "if it is damaged, delete its checkpoint's folder and --resume continues from the one before"
        raise ModelError(f"{error}; {advice}") from None
    past = []
    for step in range(1, done + 1):
        path, both = metrics_file(team.log.root, step), (team.planner.published(step), team.executor.published(step))
        if not path.exists():
            log.publish_text(path, json.dumps({"step": step, "seconds": 0.0, **team_metrics(team, *both)}) + "\n")
        past += log.read(path)
    return past


# ---------------------------------------------------------------------------------------------------- the commands


class Parser(argparse.ArgumentParser):
    """One flag per field of ``Config``, ``Objective`` and ``Limits``; a wrong flag is answered with one sentence."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)
        self.add_argument("--resume", action="store_true", help="continue the run from its last complete step")
        for owner in (Config, Objective, Limits):
            for field, help_text in field_help(owner).items():
                default = getattr(owner, field)  # SUPPRESS: what was not given stays out, so a stored config keeps it
                self.add_argument(
                    "--" + field.replace("_", "-"),
                    type=type(default),
                    default=argparse.SUPPRESS,
                    metavar=type(default).__name__.upper(),
                    help=f"{help_text} ({default})".replace("%", "%%"),
                )

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


def field_help(owner: type) -> dict[str, str]:
    """The string that stands under each field of a dataclass.

    >>> field_help(Limits)["turns"]
    'messages the agent may write'
    """
    body = ast.parse(inspect.getsource(owner)).body[0].body
    return {
        field.target.id: text.value.value
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def flat(config: Config) -> dict:
    """Every field by name, those of the objective and the limits included (no name occurs twice)."""
    values = asdict(config)
    nested = values.pop("objective") | values.pop("limits")
    return values | nested


def chosen_config(parser: Parser, args: argparse.Namespace, root: Path, defaults: Config | None = None) -> Config:
    """The config that the flags ask for, on top of ``defaults`` or, with --resume, of the stored one."""
    if not args.resume:
        refuse_existing(root)  # now, not after loading a large model
    base = stored_config(root) if args.resume else defaults or Config()

    def given(owner: type) -> dict:
        return {f.name: getattr(args, f.name) for f in fields(owner) if hasattr(args, f.name)}

    objective, limits = replace(base.objective, **given(Objective)), replace(base.limits, **given(Limits))
    try:
        return replace(base, objective=objective, limits=limits, **given(Config))
    except ValueError as error:
        parser.error(str(error))


def guarded(run: Callable[[], None], root: Path, command: str) -> int:
    """Do ``run`` -> the exit code. What a person can cause or mend becomes one sentence; a bug raises.

    ``command`` continues the run in ``root``. Every file is published by a rename, so there is nothing to clean up.
    """
    # torch warns about its own future when PYTHONWARNINGS asks for all warnings; stderr is for what goes wrong here
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
    kept = f"what was published is kept, and this continues the run: {command}"

    def begun() -> bool:
        return os.path.exists(root / "config.json")  # Path.exists raises where the path itself is the trouble

    try:
        run()
        return 0
    except KeyboardInterrupt:
        if not begun():
            print("\nStopped before the run began: nothing was written.")
            return 130
        done = min(RunLog(root).last_checkpoint(role) or 0 for role in ("planner", "executor"))
        print(f"\nStopped. {done} complete {'step is' if done == 1 else 'steps are'} saved in {root}. Continue with:")
        print(f"  {command}")
        return 130
    except BrokenPipeError:  # the reader of a pipe has gone, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ModelError, ChatError, LogError, tasks.DataError) as error:
        problem = str(error)
    except FloatingPointError as error:
        problem = f"{error}: try a smaller --lr, or --dtype float32 where it was float16, in a new run"
    except torch.OutOfMemoryError:
        problem = "the GPU's memory is full: in a new run bound what training takes with a smaller --tokens, and what "
        problem += "sampling takes with fewer --questions or --rollouts"
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        problem = f"{error.strerror or error}{where}" + (f"; {kept}" if begun() else "")
    print(" ".join(problem.split()), file=sys.stderr)
    return 2


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="minimgrpo.train", description="Train a planner and an executor together with M-GRPO.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    args = parser.parse_args(argv)

    def run() -> None:
        started = time.perf_counter()
        screen = display.console()
        team = load_team(args.run, chosen_config(parser, args, args.run), args.resume)
        seen, steps = resumed(team), team.config.steps
        with display.Progress(screen, steps, team.config.d_max, seen) as progress:
            for *_, measured in train(team, len(seen) + 1):
                progress.update(measured)
        seconds = time.perf_counter() - started
        print(f"{seconds:.0f} s. All {steps} steps are done; the log and both adapters are in {args.run}")

    return guarded(run, args.run, f"python -m minimgrpo.train {shlex.quote(str(args.run))} --resume")


if __name__ == "__main__":
    sys.exit(main())

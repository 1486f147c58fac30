"""Train a planner and an executor together: ``python -m minimgrpo.train runs/mine --steps 40 --seed 1``.

RUN gets the log of ``minimgrpo.log``. Nothing is kept in memory that a stopped run would need: every step is on disk
before it counts as done, so Ctrl-C is always safe and ``--resume`` goes on with the same random numbers. A resumed run
keeps its whole configuration, its number of steps included, since the learning rate of every step depends on it.
``--track`` copies what the steps measure to a tracker as well (``minimgrpo.track``).

With ``--decoupled`` planner and executor are two processes (``minimgrpo.server``). The run is the same to the bit, so a
run may be started one way and resumed the other.

With ``--workflow voting`` (or another of ``minimgrpo.workflows``) that workflow's roles are trained instead of planner
and executor, with ``--sharing`` and ``--credit``; its log is in ``minimgrpo.workflow_team``.

The demo (``minimgrpo.demo``) is the same run with an evaluation before and after; it takes its flags from here.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
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

    from minimgrpo import log, metrics, tasks, track
    from minimgrpo.agents import Limits
    from minimgrpo.base import devices
    from minimgrpo.chat import ChatError
    from minimgrpo.experts import Expert, Rubric
    from minimgrpo.judge import JudgeExpert, endpoint, local
    from minimgrpo.learner import Objective
    from minimgrpo.log import LogError, RunLog
    from minimgrpo.policy import ModelError, Policy, describe
    from minimgrpo.protocol import ROLES
    from minimgrpo.servers import Config, Team
    from minimgrpo.tools import Tools
    from minimgrpo.workflow_team import WorkflowConfig, WorkflowTeam, line

WORKFLOW_RUN = WorkflowConfig(steps=25, questions=8, warmup=900)  # no base knows a workflow's roles without a warm-up

# ------------------------------------------------------------------------------------------------------- the run


def open_run(root: Path, config: Config, resume: bool = False) -> Config:
    """Create the run directory with its ``config.json``, or find that of the same run -> the run's config.

    Raises LogError when a new run would go into a directory with files, and when ``resume`` finds no run there or one
    with another config.
    """
    if not resume:
        refuse_existing(root)
        publish_config(root, config)
    stored = stored_config(root, type(config))
    if differing := [name for name, value in flat(config).items() if flat(stored)[name] != value]:
        was = ", ".join(f"{name} = {flat(stored)[name]}" for name in differing)
        raise LogError(
            f"{root} was started with {was}, and a resumed run keeps that: leave the flag out, or start anew"
        )
    return stored


def publish_config(root: Path, config: Config) -> None:
    """Publish ``config.json``; what another process published first stays."""
    facts = {**asdict(config), "torch": str(torch.__version__)}
    log.publish_first(root / "config.json", json.dumps(facts, indent=1) + "\n")


def refuse_existing(root: Path) -> None:
    """Raise LogError when a new run has no place at ``root``."""
    # a process that was killed at its very start leaves a .tmp file and no run
    if root.exists() and (not root.is_dir() or any(path.suffix != ".tmp" for path in root.iterdir())):
        if not (root / "config.json").is_file():
            raise LogError(f"{root} exists and is no run: choose another name for this one")
        raise LogError(f"{root} exists: continue that run with --resume, or choose another name for this one")


def stored_config(root: Path, owner: type[Config] = Config) -> Config:
    """The config of the run in ``root``. Raises LogError when there is none, it is damaged, or of the other kind."""
    if not (root / "config.json").is_file():
        raise LogError(f"there is no run in {root}: check the name (a new run is started without --resume)")
    facts = log.read_config(root)
    if ("workflow" in facts) != (owner is WorkflowConfig):
        kind = f"the workflow {facts['workflow']}" if "workflow" in facts else "a planner and an executor"
        raise LogError(f"{root} is a run of {kind}: python -m minimgrpo.train {shlex.quote(str(root))} --resume")
    try:
        facts.pop("torch")
        return owner(**{**facts, "objective": Objective(**facts["objective"]), "limits": Limits(**facts["limits"])})
    except (ValueError, TypeError, KeyError) as error:
        raise LogError(f"{root / 'config.json'} is damaged ({error}): start a new run under another name") from None


def load_team(root: Path, config: Config, resume: bool) -> Team:
    """Load what the config names, open the run, put the team together. Prints what was loaded.

    The run is opened last, so that a model or data file that is not there leaves no directory behind.
    """
    torch.set_num_threads(config.threads)
    policy, executor_policy = load_policies(config)
    pages, questions = tasks.load_pages(), tasks.load_questions("train")
    refuse_no_room(policy, questions, config)
    adapter = sum(p.numel() for p in policy.parameters("planner").values())
    print("\n".join(dict.fromkeys((describe(policy), describe(executor_policy)))))
    print(f"adapters planner and executor, {adapter / 1e6:.2f} M each; {len(pages)} pages, {len(questions)} questions")
    config = open_run(root, config, resume)
    return Team(config, policy, root, questions, Tools(pages), expert_of(config), executor_policy)


def load_workflow(root: Path, config: WorkflowConfig, resume: bool) -> WorkflowTeam:
    """The same for a workflow."""
    torch.set_num_threads(config.threads)
    adapters = tuple(dict.fromkeys(config.adapters.values()))
    policy = load_policy(config, devices(config.planner_device, config.executor_device)[0], adapters)
    pages, questions = tasks.load_pages(), tasks.load_questions("train")
    print(describe(policy))
    print(f"{config.workflow}: {', '.join(config.adapters)}; adapters: {', '.join(adapters)}; credit: {config.credit}")
    config = open_run(root, config, resume)
    return WorkflowTeam(config, policy, root, questions, Tools(pages), pages)


def refuse_no_room(policy: Policy, questions: list, config: Config) -> None:
    """Raise ModelError when no question and message fit into a conversation: no rollout would ever say a word."""
    room, length = min(config.limits.context, policy.max_context), config.limits.length
    shortest = min(len(policy.chat.open("planner", q.question)) for q in questions)
    if shortest + length > room:
        raise ModelError(
            f"a conversation of {room} tokens has no room for the shortest question ({shortest} tokens) and a message "
            f"({length}): make --context larger or --length smaller"
        )


def expert_of(config: Config) -> Expert:
    """The config's expert: the rubric, or a language model."""
    if not config.judge:
        return Rubric()
    return JudgeExpert(endpoint(config.judge, config.judge_url) if config.judge_url else local(config.judge))


def load_policies(config: Config) -> tuple[Policy, Policy]:
    """The planner's policy and the executor's: the same object with both adapters, or on two devices one for each."""
    planner, executor = devices(config.planner_device, config.executor_device)
    if planner == executor:
        policy = load_policy(config, planner, ROLES)
        return policy, policy
    return load_policy(config, planner, ("planner",)), load_policy(config, executor, ("executor",))


def load_policy(config: Config, device: str, roles: tuple[str, ...]) -> Policy:
    """The run's base on ``device`` with fresh adapters for ``roles``."""
    model = config.model, config.quantize, config.rank, config.alpha
    return Policy.load(*model, seed=config.seed, device=device, dtype=config.dtype, roles=roles)


def train(team: Team | WorkflowTeam, first: int = 1) -> Iterator[tuple]:
    """Do the steps from ``first`` (``team.resume() + 1``) on -> step, both roles' trajectories, what was measured.

    (A workflow's trajectories are one list.)
    """
    for step in range(first, team.config.steps + 1):
        yield step, *team.step(step)


def measured(run_log: RunLog, questions: list, step: int) -> dict:
    """What ``team.step`` says of a complete step, from the log of servers that are other processes.

    With staleness the executor's line is there only after its update, and is made here without it until then.
    """
    found = {"step": step}
    for role in ROLES:
        rows = [row for row in log.read_metrics(run_log.metrics(role)) if row["step"] == step]
        if rows:
            found[role] = rows[0]
            continue
        trajectories = log.read_trajectories(run_log.trajectories(role, step))
        outcomes = log.read(run_log.outcomes(step))
        found[role] = metrics.row(role, step, trajectories, {}, None)
        found[role] |= metrics.executor(trajectories, outcomes, metrics.keys(questions))
    return found


def resumed(team: Team | WorkflowTeam) -> list[dict]:
    """Load the newest checkpoints -> what each complete step measured; none of a new run.

    The log is read as well, so that damage shows now and not after hours.
    """
    done = team.resume()
    for step in range(1, done + 1):
        for server in team.servers:
            server.published(step)
    return [team.measured(step) for step in range(1, done + 1)]


# ---------------------------------------------------------------------------------------------------- the commands


class Parser(display.Parser):
    """One flag per field of ``Config``, ``Objective`` and ``Limits``."""

    def __init__(self, **options):
        super().__init__(**options)
        self.add_argument("--resume", action="store_true", help="continue the run from its last complete step")
        for owner in (Config, Objective, Limits):
            add_fields(self, owner)


def add_fields(parser: argparse.ArgumentParser, owner: type, shown_default: str = "") -> None:
    """One flag for each field of a dataclass; what is not given stays out of the parsed flags (see ``given``)."""
    for field, help_text in field_help(owner).items():
        default = getattr(owner, field)
        parser.add_argument(
            "--" + field.replace("_", "-"),
            type=type(default),
            default=argparse.SUPPRESS,
            metavar=type(default).__name__.upper(),
            help=f"{help_text} ({shown_default or default})".replace("%", "%%"),
        )


def given(args: argparse.Namespace, owner: type) -> dict:
    """The fields of ``owner`` that were given as flags."""
    return {f.name: getattr(args, f.name) for f in fields(owner) if hasattr(args, f.name)}


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
    base = stored_config(root, type(defaults or Config())) if args.resume else defaults or Config()
    objective, limits = replace(base.objective, **given(args, Objective)), replace(base.limits, **given(args, Limits))
    try:
        return replace(base, objective=objective, limits=limits, **given(args, type(base)))
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
        done = min(RunLog(root).last_checkpoint(role) or 0 for role in trained(root))
        print(f"\nStopped. {done} complete {'step is' if done == 1 else 'steps are'} saved in {root}. Continue with:")
        print(f"  {command}")
        return 130
    except BrokenPipeError:
        return display.pipe_closed()
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
    return display.complain(problem)


def trained(root: Path) -> tuple[str, ...]:
    """The adapters of the run in ``root``."""
    if "workflow" not in log.read_config(root):
        return ROLES
    return tuple(dict.fromkeys(stored_config(root, WorkflowConfig).adapters.values()))


def is_workflow(args: argparse.Namespace) -> bool:
    """Whether the flags ask for a workflow, or the run that is to be resumed is one's."""
    stored = args.resume and (args.run / "config.json").is_file()
    return hasattr(args, "workflow") or bool(stored and "workflow" in log.read_config(args.run))


def train_workflow(team: WorkflowTeam, tell: Callable[[dict], None]) -> None:
    """Train a workflow, with a line of text after some of its steps."""
    root, steps = team.log.root, team.config.steps
    with contextlib.ExitStack() as locks:
        for server in team.servers:
            locks.enter_context(log.owned(root, server.role))
        seen = resumed(team)
        for facts in seen:
            tell(facts)
        print("     step  accuracy of the team, then of each role by itself (and the share with a good format)")
        for step, _, facts in train(team, len(seen) + 1):
            tell(facts)
            if step in (1, steps) or step % max(1, steps // 20) == 0:
                print(line(facts, steps), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="minimgrpo.train", description="Train a planner and an executor together with M-GRPO.")
    add_fields(parser, WorkflowConfig)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument("--track", choices=track.MODULES, help="send what the steps measure to this tracker as well")
    parser.add_argument("--decoupled", action="store_true", help="planner and executor as two processes")
    args = parser.parse_args(argv)
    if args.track and (problem := track.missing(args.track)):
        parser.error(problem)
    command = f"python -m minimgrpo.train {shlex.quote(str(args.run))}{' --decoupled' * args.decoupled} --resume"

    def run() -> None:
        started = time.perf_counter()
        screen = display.console()
        workflow = is_workflow(args)
        if workflow and args.decoupled:
            parser.error("a workflow runs in one process: leave out --decoupled")
        if not workflow and (extra := [name for name in ("sharing", "credit") if hasattr(args, name)]):
            parser.error(f"--{extra[0]} is for workflows: name one with --workflow")
        config = chosen_config(parser, args, args.run, WORKFLOW_RUN if workflow else None)
        with track.tracker(args.track, args.run, flat(config)) as tell:
            if workflow:
                train_workflow(load_workflow(args.run, config, args.resume), tell)
            elif args.decoupled:
                from minimgrpo import server  # it imports this module

                server.run_both(screen, args.run, config, args.resume, command, tell)
            else:
                team = load_team(args.run, config, args.resume)
                with log.owned(args.run, "planner"), log.owned(args.run, "executor"):
                    seen = resumed(team)
                    for facts in seen:
                        tell(facts)
                    with display.Progress(screen, config.steps, config.d_max, seen) as progress:
                        for *_, facts in train(team, len(seen) + 1):
                            progress.update(facts)
                            tell(facts)
        seconds = time.perf_counter() - started
        print(f"{seconds:.0f} s. All {config.steps} steps are done; the log and the adapters are in {args.run}")

    return guarded(run, args.run, command)


if __name__ == "__main__":
    sys.exit(main())

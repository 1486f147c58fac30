"""The planner server and the executor server: what each does in a step, and the two in one process.

A step: the planner rolls out K attempts at each question, handing sub-tasks to the executor (mail files both ways); it
publishes one scalar per rollout (the outcome); each side rewards, normalises and publishes its own trajectories; then
each updates its own adapter from them and publishes a checkpoint. Text and scalars cross, gradients never do.

The servers meet in the log (``minimgrpo.log``) and nowhere else, so it does not matter whether they are one process
(``Team``) or two (``minimgrpo.server``). They differ only in what they do where a file of the other is not there yet:
``wait``. Two processes sleep until it is; in one process the planner lets the executor make it.

A server that is killed continues from its last checkpoint. Updates are made from the published trajectories. A step
whose trajectories are not published is played again with the same random numbers: the planner comes to the same
sub-tasks and finds them answered, the executor keeps the turns that it has published. Nothing is lost, nothing is
trained on twice, and on a CPU every file is the same to the bit.

With ``staleness`` n > 0 the executor makes the update from step k only after it has served step k + n (the last n
updates come at the end), so its trajectories are n versions old when it learns from them and the importance ratio has
something to correct. The paper's figure 8 compares this with the synchronised n = 0.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from minimgrpo import agents, log, metrics
from minimgrpo.agents import Limits, SubTask, generator
from minimgrpo.base import DTYPES
from minimgrpo.experts import Expert, Rubric
from minimgrpo.grpo import AVERAGES, RATIOS
from minimgrpo.learner import Damaged, Learner, Objective
from minimgrpo.log import LogError, RunLog
from minimgrpo.policy import ModelError, Policy
from minimgrpo.settle import settle_executor, settle_planner
from minimgrpo.tools import ToolResult, Tools
from minimgrpo.trajectory import Trajectory
from minimgrpo.warmup import demonstrations, warm_up


@dataclass(frozen=True)
class Config:
    """One run. ``python -m minimgrpo.train --help`` lists the same fields."""

    model: str = "atlas-lm"
    "base model: atlas-lm, a folder, a .gguf file, or a hub name"
    quantize: str = "nf4"
    "base weights: nf4, int8 or none"
    dtype: str = "auto"
    "what the base computes in: auto (by device), float32, float16 or bfloat16"
    planner_device: str = "auto"
    "cpu, cuda:0, mps, ...; auto: the first GPU, else the CPU"
    executor_device: str = "auto"
    "the same; auto: the second GPU, else where the planner would be"
    seed: int = 0
    "seeds the adapters, the questions, the sampling and the alignment"
    steps: int = 70
    "training steps"
    questions: int = 16
    "questions in a step"
    rollouts: int = 8
    "K, the attempts at each question: a group"
    d_max: int = 4
    "D, the executor trajectories that each rollout counts as"
    temperature: float = 1.0
    "sampling temperature while training"
    rank: int = 16
    "LoRA rank"
    alpha: int = 32
    "LoRA alpha"
    decay: float = 0.5
    "from this part of the run on the learning rate falls, linearly, to a tenth"
    warmup: int = 0
    "demonstrations that each role is fine-tuned on first, to learn the format"
    threads: int = 2
    "CPU threads of a process (float sums depend on it, so a resumed run keeps it)"
    staleness: int = 0
    "steps that the executor serves before it learns from one (0: synchronised)"
    judge: str = ""
    "a language model that rates the executor's work, instead of the rubric: a folder, a hub name, or with judge-url"
    judge_url: str = ""
    "the judge's OpenAI-compatible endpoint; without it the judge is loaded here"
    objective: Objective = field(default_factory=Objective)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self):
        o, n = self.objective, self.limits
        for problem, message in (
            (not self.model.strip(), "model is a name, a folder or a file, and an empty text is none of them"),
            (self.rollouts < 2, f"a group needs at least 2 rollouts (K >= 2), not {self.rollouts}"),
            (self.d_max < 1, f"d_max must be at least 1, not {self.d_max}"),
            (not 0 < self.temperature < 100, f"training needs a temperature above 0, not {self.temperature}"),
            (self.steps < 0, f"steps cannot be negative: {self.steps}"),
            (self.warmup < 0, f"warmup cannot be negative: {self.warmup}"),
            (self.dtype not in DTYPES, f"dtype is {' or '.join(DTYPES)}, not {self.dtype!r}"),
            (self.questions < 1, f"a step needs at least 1 question, not {self.questions}"),
            (self.rank < 1, f"the LoRA rank must be at least 1, not {self.rank}"),
            (not 0 < o.lr < 1, f"the learning rate must lie between 0 and 1, not {o.lr}"),
            (self.threads < 1, f"at least 1 thread, not {self.threads}"),
            (self.judge_url and not self.judge, "judge-url needs the name of the model there: --judge MODEL"),
            (self.staleness < 0, f"staleness cannot be negative: {self.staleness}"),
            (not 0 <= self.decay <= 1, f"decay is a part of the run, 0 to 1, not {self.decay}"),
            (o.ratio not in RATIOS, f"ratio is {' or '.join(RATIOS)}, not {o.ratio!r}"),
            (o.average not in AVERAGES, f"average is {' or '.join(AVERAGES)}, not {o.average!r}"),
            (not 0 <= o.clip_low < 1, f"clip_low must be at least 0 and below 1, not {o.clip_low}"),
            (not o.clip_high >= 0, f"clip_high cannot be negative: {o.clip_high}"),
            (not o.kl >= 0, f"the weight of the KL cannot be negative: {o.kl}"),
            (not o.max_grad_norm > 0, f"max_grad_norm must be above 0, not {o.max_grad_norm}"),
            (o.epochs < 1 or o.tokens < 1, f"epochs and tokens start at 1, not {o.epochs} and {o.tokens}"),
            (n.turns < 1 or n.length < 1, f"turns and length start at 1, not {n.turns} and {n.length}"),
            (n.calls < 0, f"calls cannot be negative: {n.calls}"),
        ):
            if problem:
                raise ValueError(message)

    def lr(self, step: int) -> float:
        """The learning rate of a step (1-based)."""
        start = self.decay * self.steps
        falling = max(0.0, (step - start) / max(1.0, self.steps - start))
        return self.objective.lr * (1 - 0.9 * min(1.0, falling))

    def updates(self, role: str, step: int) -> int:
        """How many updates ``role`` has made at the end of ``step``, and so the version that plays the next step.

        >>> [Config(steps=5, staleness=2).updates("executor", step) for step in range(6)]
        [0, 0, 0, 1, 2, 5]
        """
        late = self.staleness if role == "executor" and step < self.steps else 0
        return max(0, step - late)


OUTCOME = ("question_id", "rollout", "correct")

Wait = Callable[..., Path]
"""``wait(*paths)`` returns the first of these files of the other server that is published, once one is."""


class Server:
    """What both servers have: a role's learner, its trajectory files, its metrics, its checkpoints."""

    role: str

    def __init__(self, config: Config, policy: Policy, run_log: RunLog):
        self.config, self.policy, self.log = config, policy, run_log
        self.learner = Learner(policy, self.role, config.objective, config.temperature)
        self.rows: dict[int, dict] = {}  # step -> its line of metrics.jsonl
        self.sample_seconds: dict[int, float] = {}  # step -> what sampling it took this process
        self.latest: tuple[int, list[Trajectory]] = (0, [])  # published last by this process, as the file has it

    def play(self, step: int, wait: Wait) -> list[Trajectory]:
        """Play the step, unless its trajectories are published already -> these."""
        if self.due(step):
            self.publish(step, self.make(step, wait))
        return self.published(step)

    def due(self, step: int) -> bool:
        """Whether the step is still to be played; if so the adapter has the version for it.

        Raises LogError when it is beyond that version.
        """
        if self.has(step):
            return False
        version = self.config.updates(self.role, step - 1)
        self.learn(version)  # nothing to do but after a checkpoint was lost
        if self.learner.version != version:
            path = self.log.trajectories(self.role, step)
            raise LogError(f"{path} is missing from a run that went on from it: put back a copy, or start a new run")
        return True

    def has(self, step: int) -> bool:
        """Whether the step's trajectories are published."""
        return self.log.trajectories(self.role, step).exists()

    def publish(self, step: int, trajectories: list[Trajectory]) -> None:
        """Publish the step's trajectories, rewarded and weighted."""
        for trajectory in trajectories:
            trajectory.run, trajectory.step = self.log.root.name, step
        log.publish(self.log.trajectories(self.role, step), (t.to_json() for t in trajectories))
        self.latest = step, trajectories

    def published(self, step: int) -> list[Trajectory]:
        """The step's published trajectories."""
        if self.latest[0] == step:
            return self.latest[1]
        return log.read_trajectories(self.log.trajectories(self.role, step))

    def learn(self, version: int) -> None:
        """Make the updates up to ``version`` that are not made yet, each from its step's published trajectories.

        Publishes what each step measured, then its checkpoint, and drops the checkpoints before the last two.
        """
        for step in range(self.learner.version + 1, version + 1):
            trajectories = self.published(step)
            learned = self.learner.update(trajectories, self.config.lr(step))
            self.rows = {n: row for n, row in self.rows.items() if n < step}
            self.rows[step] = self.row(step, trajectories, learned)
            log.replace(self.log.metrics(self.role), self.rows.values())  # before the checkpoint: none lacks its line
            log.publish_folder(self.log.checkpoint(self.role, step), self.learner.save)
            self._drop_old_checkpoints()

    def row(self, step: int, trajectories: list[Trajectory], learned: dict) -> dict:
        """The step's line of ``metrics.jsonl``."""
        shared = metrics.row(self.role, step, trajectories, learned, self.sample_seconds.get(step))
        return shared | self.own(step, trajectories)

    def own(self, step: int, trajectories: list[Trajectory]) -> dict:
        """What only this role measures."""
        raise NotImplementedError

    def measured(self, step: int) -> dict:
        """The step's line; with staleness the executor's update from it may be still to come, and is left out then."""
        return self.rows[step] if step in self.rows else self.row(step, self.published(step), {})

    def resume(self) -> int:
        """Load the newest checkpoint that is whole, or warm up a new run if it is to -> the number of updates done.

        A damaged one is dropped, and its update made again, when the state before it can be had. Raises ModelError when
        it cannot. A step whose line is missing (``metrics.jsonl`` was removed) is measured again from the log.
        """
        found = self.log.checkpoints(self.role)
        damaged = {}
        for version in found:
            try:
                self.learner.load(self.log.checkpoint(self.role, version))
                break
            except Damaged as error:
                damaged[version] = error
        lost = len(damaged) == len(found)
        if damaged and lost and found[-1] > 1:  # before the first there is the fresh adapter
            error = damaged[found[0]]
            raise ModelError(f"{error}, and there is no whole one before it: put back a copy, or start a new run")
        for version, error in damaged.items():
            print(f"{error}: the {self.role}'s update {version} is made again")
            shutil.rmtree(self.log.checkpoint(self.role, version))
        if lost and self.config.warmup:
            self.warm()
            log.publish_folder(self.log.checkpoint(self.role, 0), self.learner.save)
        self._drop_old_checkpoints()
        rows = {row["step"]: row for row in log.read_metrics(self.log.metrics(self.role))}
        done = range(1, self.learner.version + 1)
        self.rows = {n: rows[n] if n in rows else self.row(n, self.published(n), {}) for n in done}
        return self.learner.version

    def warm(self) -> None:
        """Fine-tune the fresh adapter on demonstrations."""
        warm_up(self.learner, demonstrations(self.role, self.config.warmup, self.config.seed))

    def complete(self) -> int:
        """The number of steps that are played and whose updates are made."""
        step, version = self.learner.version, self.learner.version
        while step < self.config.steps and self.config.updates(self.role, step + 1) <= version and self.has(step + 1):
            step += 1
        return step

    def _drop_old_checkpoints(self) -> None:
        """Keep the last two. All others go, so that one whose removal was interrupted goes too."""
        for version in self.log.checkpoints(self.role)[2:]:
            shutil.rmtree(self.log.checkpoint(self.role, version), ignore_errors=True)


def draw_questions(questions: list, config: Config, step: int) -> list:
    """The questions of a step, the same whenever they are asked for."""
    count = min(config.questions, len(questions))
    return random.Random(f"{config.seed} questions {step}").sample(questions, count)


class PlannerServer(Server):
    """Owns the questions: rolls out, judges right or wrong, tells the outcomes."""

    role = "planner"

    def __init__(self, config: Config, policy: Policy, run_log: RunLog, questions: list):
        super().__init__(config, policy, run_log)
        self.questions = questions

    def make(self, step: int, wait: Wait) -> list[Trajectory]:
        """The step's trajectories, with the executor at the other end of the mail."""
        return self.rollout(step, lambda turn, sub_tasks: self.delegate(step, turn, sub_tasks, wait))

    def delegate(self, step: int, turn: int, sub_tasks: list[SubTask], wait: Wait) -> list[ToolResult]:
        """Publish one turn's sub-tasks, wait for their reports."""
        log.publish(self.log.mail(step, turn, "requests"), (asdict(s) for s in sub_tasks))
        path = wait(self.log.mail(step, turn, "reports"))
        reports = log.decoded(path, lambda row: ToolResult(**row))
        if len(reports) != len(sub_tasks):
            raise LogError(f"{path} has {len(reports)} reports of {len(sub_tasks)}: put back a copy of it")
        return reports

    def chosen(self, step: int) -> list:
        """The step's questions."""
        return draw_questions(self.questions, self.config, step)

    def rollout(self, step: int, delegate) -> list[Trajectory]:
        """K attempts at each question, rewarded, with their group advantages; publishes the outcomes."""
        config, questions = self.config, self.chosen(step)
        draws = generator(config.seed, step, "planner")
        started, waited = time.perf_counter(), 0.0

        def hand_over(turn: int, sub_tasks: list[SubTask]) -> list[ToolResult]:
            nonlocal waited
            asked = time.perf_counter()
            reports = delegate(turn, sub_tasks)
            waited += time.perf_counter() - asked
            return reports

        trajectories = agents.plan(
            self.policy, questions, config.rollouts, hand_over, config.limits, config.temperature, draws
        )
        self.sample_seconds[step] = time.perf_counter() - started - waited
        for trajectory in trajectories:
            trajectory.policy_version = self.learner.version
        settle_planner(trajectories, questions)
        outcomes = [(t.question_id, t.rollout, t.reward_parts["correct"]) for t in trajectories]
        log.publish(self.log.outcomes(step), (dict(zip(OUTCOME, row, strict=True)) for row in outcomes))
        return trajectories

    def own(self, step: int, trajectories: list[Trajectory]) -> dict:
        return metrics.planner(trajectories, self.questions)


class ExecutorServer(Server):
    """Owns the tools: does sub-tasks, and after the outcomes arrive rewards and aligns what it did.

    ``keys`` (``metrics.keys``) serve only to measure whether its search queries are specific.
    """

    role = "executor"

    def __init__(
        self,
        config: Config,
        policy: Policy,
        run_log: RunLog,
        tools: Tools,
        expert: Expert | None = None,
        keys: dict[str, tuple[str, ...]] | None = None,
    ):
        super().__init__(config, policy, run_log)
        self.tools, self.expert, self.keys = tools, expert or Rubric(), keys or {}
        self.begin()

    def begin(self) -> None:
        """Forget what was done of a step."""
        self.done: list[Trajectory] = []
        self.turn = 0

    def play(self, step: int, wait: Wait) -> list[Trajectory]:
        trajectories = super().play(step, wait)
        shutil.rmtree(self.log.turn(step, 0).parent, ignore_errors=True)
        return trajectories

    def make(self, step: int, wait: Wait) -> list[Trajectory]:
        """Answer the mail of the step, turn by turn, until its outcomes are published -> its trajectories."""
        outcomes = self.log.outcomes(step)
        while wait(self.log.mail(step, self.turn, "requests"), outcomes) != outcomes:
            self.answer(step)
        return self.settle(step, log.decoded(outcomes, lambda row: {name: row[name] for name in OUTCOME}))

    def answer(self, step: int) -> None:
        """Do the next turn's sub-tasks, unless a killed server has done them, and publish their reports.

        What was done is published before the reports: the planner goes by these, and a program that reads the clock,
        or a GPU, would come to other ones the second time.
        """
        path = self.log.turn(step, self.turn)
        if path.exists():
            done = log.read_trajectories(path)
        else:
            requests = self.log.mail(step, self.turn, "requests")
            sub_tasks = log.decoded(requests, lambda row: SubTask(**row))
            done = self.serve(step, self.turn, sub_tasks)
            log.publish(path, (t.to_json() for t in done))
        log.publish(self.log.mail(step, self.turn, "reports"), (asdict(agents.report(t)) for t in done))
        self.done += done
        self.turn += 1

    def serve(self, step: int, turn: int, sub_tasks: list[SubTask]) -> list[Trajectory]:
        """Do one turn's sub-tasks as one batch."""
        config, started = self.config, time.perf_counter()
        draws = generator(config.seed, step, "executor", turn)
        trajectories = agents.execute(self.policy, self.tools, sub_tasks, config.limits, config.temperature, draws)
        for trajectory in trajectories:
            trajectory.policy_version = self.learner.version
        self.sample_seconds[step] = self.sample_seconds.get(step, 0.0) + time.perf_counter() - started
        return trajectories

    def settle(self, step: int, outcomes: list[dict]) -> list[Trajectory]:
        """Reward, align and normalise the step's trajectories, once the outcomes are known."""
        config = self.config
        trajectories = sorted(self.done, key=lambda t: (t.question_id, t.rollout, t.call))
        self.begin()
        correct = {(row["question_id"], row["rollout"]): row["correct"] for row in outcomes}
        settle_executor(trajectories, correct, self.expert, config.d_max, f"{config.seed} {step}")
        return trajectories

    def own(self, step: int, trajectories: list[Trajectory]) -> dict:
        return metrics.executor(trajectories, log.read(self.log.outcomes(step)), self.keys)


class Team:
    """Both servers in one process over the same log; on one device one base serves both adapters.

    ``executor_policy`` is given where the executor stands on a device of its own.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        root: Path,
        questions: list,
        tools: Tools,
        expert=None,
        executor_policy: Policy | None = None,
    ):
        torch.set_num_threads(config.threads)
        self.config, self.log = config, RunLog(root)
        self.planner = PlannerServer(config, policy, self.log, questions)
        others = (tools, expert, metrics.keys(questions))
        self.executor = ExecutorServer(config, executor_policy or policy, self.log, *others)
        self.servers = (self.planner, self.executor)

    def resume(self) -> int:
        """Continue a run of the same config, or warm up a new one -> the number of complete steps."""
        for server in self.servers:
            server.resume()
        return min(server.complete() for server in self.servers)

    def step(self, step: int) -> tuple[list[Trajectory], list[Trajectory], dict]:
        """One step -> the planner's trajectories, the executor's, and what ``measured`` says of it.

        Both trajectory files are published before either adapter moves.
        """
        self.executor.begin()  # an attempt at this step may have been interrupted
        due = self.executor.due(step)

        def have_them_made(reports: Path) -> Path:
            if due:
                self.executor.answer(step)
            return reports

        planned = self.planner.play(step, have_them_made)
        executed = self.executor.play(step, log.first)
        for server in self.servers:
            server.learn(self.config.updates(server.role, step))
        return planned, executed, self.measured(step)

    def measured(self, step: int) -> dict:
        """Both roles' lines of ``metrics.jsonl``: {"step", "planner": {...}, "executor": {...}}."""
        return {"step": step, **{server.role: server.measured(step) for server in self.servers}}

"""The planner server and the executor server: what each does in a step, and the two in one process.

A step: the planner rolls out K attempts at each question, handing sub-tasks to the executor (mail files both ways); it
publishes one scalar per rollout (the outcome); each side rewards, normalises and publishes its own trajectories; then
each updates its own adapter and publishes a checkpoint. Text and scalars cross, gradients never do.

Both trajectory files are published before either adapter moves. So a run killed anywhere resumes exactly: if a step's
files exist they are trained on as they are, else the step is rolled out again with the same random numbers.
"""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from minimgrpo import agents, log
from minimgrpo.agents import Limits, SubTask, generator
from minimgrpo.alignment import align
from minimgrpo.base import DTYPES
from minimgrpo.experts import Expert, Rubric
from minimgrpo.grpo import AVERAGES, RATIOS, group_advantages
from minimgrpo.learner import Learner, Objective
from minimgrpo.log import LogError, RunLog
from minimgrpo.policy import Policy
from minimgrpo.rewards import executor_reward, planner_reward
from minimgrpo.scorer import gaia_score
from minimgrpo.tools import ToolResult, Tools
from minimgrpo.trajectory import Trajectory
from minimgrpo.warmup import warm_up


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
    steps: int = 80
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
    "CPU threads (float sums depend on it, so a resumed run keeps it)"
    objective: Objective = field(default_factory=Objective)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self):
        o, n = self.objective, self.limits
        for problem, message in (
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


class Server:
    """What both servers have: a role's learner, its trajectory file, its checkpoints."""

    role: str

    def __init__(self, config: Config, policy: Policy, run_log: RunLog):
        self.config, self.policy, self.log = config, policy, run_log
        self.learner = Learner(policy, self.role, config.objective, config.temperature)

    def publish(self, step: int, trajectories: list[Trajectory]) -> None:
        """Publish the step's trajectories, rewarded and weighted."""
        for trajectory in trajectories:
            trajectory.run, trajectory.step = self.log.root.name, step
        log.publish(self.log.trajectories(self.role, step), (t.to_json() for t in trajectories))

    def published(self, step: int) -> list[Trajectory]:
        """Read them back."""
        path = self.log.trajectories(self.role, step)
        try:
            return [Trajectory.from_json(row) for row in log.read(path)]
        except (ValueError, TypeError) as error:
            raise (
                error
                if isinstance(error, LogError)
                else LogError(f"{path} is damaged ({error}): put back a copy of it, or start a new run")
            ) from None

    def learn(self, step: int, trajectories: list[Trajectory]) -> dict:
        """Update the adapter and publish the checkpoint; the one before the last is dropped."""
        metrics = self.learner.update(trajectories, self.config.lr(step))
        log.publish_folder(self.log.checkpoint(self.role, step), self.learner.save)
        shutil.rmtree(self.log.checkpoint(self.role, step - 2), ignore_errors=True)
        return metrics

    def resume(self) -> int:
        """Load the newest checkpoint, or warm up a new run if it is to -> the number of updates done."""
        step = self.log.last_checkpoint(self.role)
        if step is not None:
            self.learner.load(self.log.checkpoint(self.role, step))
        elif self.config.warmup:
            warm_up(self.learner, self.config.warmup, self.config.seed)
            log.publish_folder(self.log.checkpoint(self.role, 0), self.learner.save)
        return self.learner.version


class PlannerServer(Server):
    """Owns the questions: rolls out, judges right or wrong, tells the outcomes."""

    role = "planner"

    def __init__(self, config: Config, policy: Policy, run_log: RunLog, questions: list):
        super().__init__(config, policy, run_log)
        self.questions = questions

    def chosen(self, step: int) -> list:
        """The step's questions, the same whenever they are asked for."""
        count = min(self.config.questions, len(self.questions))
        return random.Random(f"{self.config.seed} questions {step}").sample(self.questions, count)

    def rollout(self, step: int, delegate) -> list[Trajectory]:
        """K attempts at each question, rewarded, with their group advantages; publishes the outcomes."""
        config, questions = self.config, self.chosen(step)
        draws = generator(config.seed, step, "planner")
        trajectories = agents.plan(
            self.policy, questions, config.rollouts, delegate, config.limits, config.temperature, draws
        )
        reward_planner(trajectories, questions)
        for start in range(0, len(trajectories), config.rollouts):
            group = trajectories[start : start + config.rollouts]
            for trajectory, advantage in zip(group, group_advantages([t.reward for t in group]).tolist(), strict=True):
                trajectory.advantage, trajectory.policy_version = advantage, self.learner.version
        outcomes = [
            {"question_id": t.question_id, "rollout": t.rollout, "correct": t.reward_parts["correct"]}
            for t in trajectories
        ]
        log.publish(self.log.outcomes(step), outcomes)
        return trajectories


class ExecutorServer(Server):
    """Owns the tools: does sub-tasks, and after the outcomes arrive rewards and aligns what it did."""

    role = "executor"

    def __init__(self, config: Config, policy: Policy, run_log: RunLog, tools: Tools, expert: Expert | None = None):
        super().__init__(config, policy, run_log)
        self.tools, self.expert = tools, expert or Rubric()
        self.done: list[Trajectory] = []  # of the current step

    def serve(self, step: int, turn: int, sub_tasks: list[SubTask]) -> list[ToolResult]:
        """Do one turn's sub-tasks as one batch -> their reports."""
        config = self.config
        draws = generator(config.seed, step, "executor", turn)
        trajectories = agents.execute(self.policy, self.tools, sub_tasks, config.limits, config.temperature, draws)
        for trajectory in trajectories:
            trajectory.policy_version = self.learner.version
        self.done += trajectories
        return [agents.report(t) for t in trajectories]

    def settle(self, step: int, outcomes: list[dict]) -> list[Trajectory]:
        """Reward, align and normalise the step's trajectories, once the outcomes are known (eq. 5, 11-13)."""
        config = self.config
        correct = {(row["question_id"], row["rollout"]): row["correct"] for row in outcomes}
        trajectories = sorted(self.done, key=lambda t: (t.question_id, t.rollout, t.call))
        self.done = []
        reward_executor(trajectories, correct, self.expert)
        for question_id in dict.fromkeys(row["question_id"] for row in outcomes):
            calls = [
                [t for t in trajectories if (t.question_id, t.rollout) == (question_id, k)]
                for k in range(config.rollouts)
            ]
            copies = align([len(c) for c in calls], config.d_max, f"{config.seed} {step} {question_id}")
            group = [t for c in calls for t in c]
            weights = [w for c in copies for w in c]
            if not group:
                continue  # every rollout of the question had d = 0: the executor skips it
            advantages = group_advantages([t.reward for t in group], weights).tolist()
            for trajectory, weight, advantage in zip(group, weights, advantages, strict=True):
                trajectory.copies, trajectory.advantage = weight, advantage
        return trajectories


def reward_planner(trajectories: list[Trajectory], questions: list) -> None:
    """Set reward and reward parts: format, and right or wrong by the GAIA scorer (eq. 4)."""
    gold = {q.task_id: q.answer for q in questions}
    for t in trajectories:
        correct = float(t.format_ok and gaia_score(t.result, gold[t.question_id]))
        t.reward = planner_reward(t.format_ok, correct)
        t.reward_parts = {"format": float(t.format_ok), "correct": correct}


def reward_executor(trajectories: list[Trajectory], correct: dict[tuple[str, int], float], expert: Expert) -> None:
    """Set reward and reward parts: format, the planner's outcome, the expert's rating and its criteria (eq. 5)."""
    for t, rating in zip(trajectories, expert.rate(trajectories), strict=True):
        outcome = correct[t.question_id, t.rollout]
        t.reward = executor_reward(t.format_ok, outcome, rating.score)
        t.reward_parts = {
            "format": float(t.format_ok),
            "planner_correct": outcome,
            "expert": rating.score,
            **{f"expert_{name}": value for name, value in rating.criteria.items()},
        }


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
        self.executor = ExecutorServer(config, executor_policy or policy, self.log, tools, expert)

    def resume(self) -> int:
        """Continue a run of the same config, or warm up a new one -> the number of complete steps."""
        return min(self.planner.resume(), self.executor.resume())

    def step(self, step: int) -> tuple[list[Trajectory], list[Trajectory], dict]:
        """One step -> the planner's trajectories, the executor's, and {"rollout_seconds", "planner": {...}, ...}."""
        started = time.perf_counter()
        paths = [self.log.trajectories(server.role, step) for server in (self.planner, self.executor)]
        if all(path.exists() for path in paths):
            planned, executed = self.planner.published(step), self.executor.published(step)
        else:
            self.executor.done = []  # of an attempt at this step that was interrupted
            planned = self.planner.rollout(step, lambda turn, tasks: self._delegate(step, turn, tasks))
            executed = self.executor.settle(step, log.read(self.log.outcomes(step)))
            self.planner.publish(step, planned)
            self.executor.publish(step, executed)
        metrics: dict = {"step": step, "rollout_seconds": time.perf_counter() - started}
        for server, trajectories in ((self.planner, planned), (self.executor, executed)):
            if server.learner.version < step:  # else: killed after this role's update, before the other's
                metrics[server.role] = server.learn(step, trajectories)
        return planned, executed, metrics

    def _delegate(self, step: int, turn: int, sub_tasks: list[SubTask]) -> list[ToolResult]:
        log.publish(self.log.mail(step, turn, "requests"), (asdict(s) for s in sub_tasks), sync=False)
        reports = self.executor.serve(step, turn, sub_tasks)
        log.publish(self.log.mail(step, turn, "reports"), (asdict(r) for r in reports), sync=False)
        return reports

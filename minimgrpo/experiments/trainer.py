"""One run in memory: the library's rollouts, settlement and learner, without servers and log, and its examination.

``servers`` makes the same steps through files, to survive a kill; an experiment's run takes a minute and is made again.
For the settings that both know, both make the same updates to the bit (a test holds it).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import random
import time
from pathlib import Path

import torch

from minimgrpo import agents, log, metrics, solo, tasks
from minimgrpo.agents import Cast, generator
from minimgrpo.demonstrations import Demonstrator, name_pieces
from minimgrpo.experiments.graders import EXPERTS
from minimgrpo.experiments.setting import TEAMS, VERSION, Setting
from minimgrpo.experiments.weights import ALIGNMENTS
from minimgrpo.learner import Learner, Objective
from minimgrpo.policy import Policy
from minimgrpo.protocol import ROLES
from minimgrpo.servers import draw_questions
from minimgrpo.settle import reward_planner, settle_executor, settle_planner
from minimgrpo.tools import Tools
from minimgrpo.trajectory import Trajectory
from minimgrpo.warmup import warm_up

WARM_LR = 3e-3

KEPT = ("reward", "format", "flat", "entropy", "staleness", "trained", "trained_tokens", "grad_norm", "clip_fraction")
KEPT += ("ratio_max", "correct", "puzzle_delegation", "lookup_delegation", "calls", "query_specificity", "expert")
KEPT += ("duplicated", "dropped")
"""What a run remembers of a step's line of ``metrics``."""


class Run:
    """A run of ``setting`` from the adapters of ``policy`` on. ``questions`` are those of training."""

    def __init__(self, setting: Setting, pages: list, questions: list, policy: Policy):
        config = self.config = setting.config
        self.setting, self.questions = setting, questions
        roles = TEAMS[setting.team]
        self.policy = policy
        self.agents = Cast(policy, dict.fromkeys(ROLES, "shared")) if setting.team == "shared" else policy
        self.tools = Tools(pages, k=setting.hits, sentences=setting.sentences)
        self.expert = EXPERTS[setting.expert](questions)
        self.keys = metrics.keys(questions)
        self.learners = {
            role: Learner(self.policy, role, config.objective, config.temperature)
            for role in roles
            if role in setting.trains
        }
        self.history: list[dict] = []
        self.tokens = {"read": 0, "sampled": 0, "trained": 0}
        self._played: dict[int, list[Trajectory]] = {}  # step -> its trajectories, while someone has to learn from them

    def train(self) -> None:
        """All steps."""
        for step in range(1, self.config.steps + 1):
            self.step(step)

    def step(self, step: int) -> None:
        """Play one step, then make the updates that are due: with staleness n the executor's come n steps late."""
        started = time.perf_counter()
        planned, executed = self.play(step)
        self._played[step] = planned + executed
        learned: dict[str, dict] = {}
        for name, learner in self.learners.items():
            for late in range(learner.version + 1, self.config.updates(name, step) + 1):
                batch = [t for t in self._played[late] if name in ("shared", t.agent)]
                learned[name] = learner.update(batch, self.config.lr(late))
                self.tokens["trained"] += learned[name]["trained_tokens"]
        oldest = min((learner.version for learner in self.learners.values()), default=step)
        self._played = {n: played for n, played in self._played.items() if n > oldest}
        self._measure(step, planned, executed, learned, time.perf_counter() - started)

    def chosen(self, step: int) -> list:
        """The step's questions."""
        levels = self.setting.levels(step)
        pool = [q for q in self.questions if levels is None or q.level in levels]
        return draw_questions(pool, self.config, step)

    def play(self, step: int) -> tuple[list[Trajectory], list[Trajectory]]:
        """K attempts at each of the step's questions, settled -> the planner's (or solo's), the executor's."""
        config, questions, key = self.config, self.chosen(step), (self.config.seed, step)
        how = config.limits, config.temperature
        if self.setting.team == "solo":
            draws = generator(*key, "planner")
            planned, executed = agents.solve(self.agents, self.tools, questions, config.rollouts, *how, draws), []
        else:
            team = agents.team_rollouts(self.agents, self.tools, questions, *how, key, attempts=config.rollouts)
            planned, executed = [r.planner for r in team], [t for r in team for t in r.calls]
        for t in planned + executed:
            learner = self.learners.get(t.agent) or self.learners.get("shared")
            t.step, t.policy_version = step, learner.version if learner else 0
        settle_planner(planned, questions)
        executed.sort(key=lambda t: (t.question_id, t.rollout, t.call))
        correct = {(t.question_id, t.rollout): t.reward_parts["correct"] for t in planned}
        weights, align = self.setting.weights, ALIGNMENTS[self.setting.alignment]
        settle_executor(executed, correct, self.expert, config.d_max, f"{config.seed} {step}", weights, align)
        return planned, executed

    def _measure(self, step: int, planned: list, executed: list, learned: dict, seconds: float) -> None:
        """Add the step's line to the history."""
        for t in planned + executed:
            self.tokens["sampled"] += t.sampled
            self.tokens["read"] += len(t.token_ids) - t.sampled
        both = learned.get("shared", {})
        lines = {
            "planner": metrics.row("planner", step, planned, learned.get("planner", learned.get("solo", both)), None)
            | metrics.planner(planned, self.questions),
            "executor": metrics.row("executor", step, executed, learned.get("executor", both), None)
            | metrics.executor(executed, [{}] * len(planned), self.keys),
        }
        lines = {role: {name: _short(line[name]) for name in KEPT if name in line} for role, line in lines.items()}
        self.history.append({"step": step, "seconds": round(seconds, 2), **lines})


def load_policy(setting: Setting, pages: list, folder: Path) -> Policy:
    """The setting's base with fresh adapters; those that start from demonstrations are read from ``folder``, or made.

    These demonstrations have the mistakes of the base's, and are the same for every seed, as the base is.
    """
    config, roles = setting.config, TEAMS[setting.team]
    policy = Policy.load(config.model, config.quantize, config.rank, config.alpha, seed=config.seed, roles=roles)
    for role in setting.warmed:
        facts = (VERSION, config.model, config.quantize, config.rank, config.alpha)
        name = hashlib.sha256(repr((*facts, *warm_start(setting, role))).encode()).hexdigest()[:16]
        path = folder / f"{role}-{name}"
        if not path.exists():
            made = Policy.load(config.model, config.quantize, config.rank, config.alpha, seed=0, roles=roles)
            learner = Learner(made, role, Objective())
            with contextlib.redirect_stdout(io.StringIO()):  # it tells of its progress
                warm_up(learner, shown_first(made, pages, setting, role), WARM_LR)
            log.publish_folder(path, lambda temporary: made.save_adapter(role, temporary))  # noqa: B023
        policy.load_adapter(role, path)
    return policy


def warm_start(setting: Setting, role: str) -> tuple:
    """What decides about a warm start, so that runs share it."""
    return role, setting.demonstrations, setting.hits, setting.sentences


def shown_first(policy: Policy, pages: list, setting: Setting, role: str) -> list:
    """The demonstrations of a warm start."""
    shown = {"hits": setting.hits, "sentences": setting.sentences}
    if role == "solo":
        return solo.demonstrations(policy.chat.tokenizer, pages, setting.demonstrations, 0, **shown)
    pieces = name_pieces(policy.chat.tokenizer, [page.text for page in pages])
    demonstrator = Demonstrator(random.Random(f"0 {role}"), pieces, **shown)
    return [demonstrator.executor() for _ in range(setting.demonstrations)]


def examine(run: Run, questions: list, temperature: float) -> dict:
    """One attempt at each question -> the numbers, and right or wrong for each question in order ("1011...")."""
    setting, key = run.setting, (run.setting.seed, "examine")
    expert = EXPERTS[setting.expert](questions)
    if setting.team == "solo":
        draws = generator(*key, "planner")
        planned = agents.solve(run.agents, run.tools, questions, 1, run.config.limits, temperature, draws)
        executed = []
    else:
        rollouts = agents.team_rollouts(run.agents, run.tools, questions, run.config.limits, temperature, key)
        planned, executed = [r.planner for r in rollouts], [t for r in rollouts for t in r.calls]
    reward_planner(planned, questions)
    numbers = metrics.team(questions, planned, executed or planned)
    if setting.team == "solo":
        numbers["executor_format"] = None
    reports = [t for t in executed if t.format_ok]
    kinds: dict[str, list[float]] = {}
    for question, t in zip(questions, planned, strict=True):
        kinds.setdefault(question.kind, []).append(t.reward_parts["correct"])
    everyone = planned + executed
    return {
        **{name: _short(value) for name, value in numbers.items() if name != "expert"},
        "kinds": {kind: _short(_mean(flags)) for kind, flags in sorted(kinds.items())},
        "experts": {
            name: _short(_mean([r.score for r in make(questions).rate(executed)])) for name, make in EXPERTS.items()
        },
        "expert": _short(_mean([r.score for r in expert.rate(executed)])),
        "report_words": _short(_mean([len(t.result.split()) for t in reports])),
        "calls": _short(_mean([len(t.tool_calls) for t in planned])),
        "context": _short(_mean([len(t.token_ids) for t in planned])),
        "tokens": sum(len(t.token_ids) for t in everyone),
        "sampled_tokens": sum(t.sampled for t in everyone),
        "right": "".join(str(int(t.reward_parts["correct"])) for t in planned),
    }


def perform(setting: Setting, folder: Path) -> dict:
    """The whole run -> everything that is remembered of it. Warm starts are kept in ``folder``."""
    started, cpu = time.perf_counter(), time.process_time()
    torch.set_num_threads(1)  # float sums depend on it, and runs are made side by side
    pages = tasks.load_pages()
    run = Run(setting, pages, tasks.load_questions("train"), load_policy(setting, pages, folder))
    run.train()
    questions = tasks.load_questions(setting.split)[: setting.examined]
    found = {name: examine(run, questions, temperature) for name, temperature in (("sampled", 1.0), ("greedy", 0.0))}
    return {
        "setting": setting.facts(),
        **found,
        "tokens": run.tokens,
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "history": run.history,
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _short(value):
    """Numbers as they are printed: results are kept in a repository."""
    return round(value, 4) if isinstance(value, float) else value

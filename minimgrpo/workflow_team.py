"""Train a workflow: its roles on adapters of their own or on one, with any credit rule, over the same log as a team.

A step: K rollouts of the workflow on each question, in lock-step, paid by a credit rule (``workflow_play``); the
outcome (one scalar a rollout) and each adapter's trajectories are published; then each adapter is updated from its own.
Policy, agents, advantages, learner, log and checkpoints are the core's (``servers.Server``); an adapter's files stand
in ``RUN/<adapter>/``, where the adapter is the role, or "shared". In one process: a workflow's roles are not decoupled.

    sharing   isolated: an adapter for each role (three generators share theirs); shared: one, told by the prompt
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from minimgrpo import casting, log
from minimgrpo.agents import Cast
from minimgrpo.log import LogError, RunLog
from minimgrpo.policy import Policy
from minimgrpo.servers import OUTCOME, Config, Server, draw_questions
from minimgrpo.tools import Tools
from minimgrpo.trajectory import Trajectory
from minimgrpo.warmup import warm_up
from minimgrpo.workflow_play import coalition_values, converse, outcome, play, said, settle
from minimgrpo.workflows import CREDITS, ROLES, SHARINGS, WORKFLOWS, Said, Turn

WARM_LR = 3e-3  # the adapters are small and their roles new
SHARED = "shared"


@dataclass(frozen=True)
class WorkflowConfig(Config):
    """One run of a workflow; the other fields are those of a team's run."""

    workflow: str = "voting"
    "voting, eval-opt, orch-workers, debate, advisor or swarm, instead of planner and executor"
    sharing: str = "isolated"
    "isolated: an adapter for each role of the workflow; shared: one for all"
    credit: str = "team"
    "what a role of the workflow is paid for: team, per-agent, difference or shapley"

    def __post_init__(self):
        super().__post_init__()
        for name, known in (("workflow", WORKFLOWS), ("sharing", SHARINGS), ("credit", CREDITS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {', '.join(known)}, not {getattr(self, name)!r}")
        if self.staleness or self.judge:
            raise ValueError("a workflow has no executor server: leave out staleness and judge")

    @property
    def adapters(self) -> dict[str, str]:
        """role -> the adapter that it speaks through."""
        return {role: role if self.sharing == "isolated" else SHARED for role in ROLES[self.workflow]}


class AdapterServer(Server):
    """One adapter's learner, files, metrics and checkpoints; ``roles`` speak through it."""

    def __init__(self, role: str, roles: tuple[str, ...], config: WorkflowConfig, policy: Policy, run_log, pages):
        self.role, self.roles, self.pages = role, roles, pages
        super().__init__(config, policy, run_log)

    def warm(self) -> None:
        config, tokenizer = self.config, self.policy.chat.tokenizer
        shown = casting.demonstrations(tokenizer, self.pages, self.roles, config.warmup, config.seed)
        warm_up(self.learner, shown, WARM_LR)

    def own(self, step: int, trajectories: list[Trajectory]) -> dict:
        outcomes = [row["correct"] for row in log.read(self.log.outcomes(step))]
        return {"correct": sum(outcomes) / len(outcomes), "roles": by_role(trajectories)}


def by_role(trajectories: list[Trajectory]) -> dict[str, dict[str, float]]:
    """role -> how many trajectories, the shares with a good format and right by themselves, the mean reward."""
    found = {}
    for role in sorted({t.agent for t in trajectories}):
        some = [t for t in trajectories if t.agent == role]
        found[role] = {
            "trajectories": len(some),
            "format": sum(t.format_ok for t in some) / len(some),
            "own": sum(t.reward_parts["own"] for t in some) / len(some),
            "reward": sum(t.reward for t in some) / len(some),
        }
    return found


class WorkflowTeam:
    """All adapters of a workflow in one process; the same interface as ``servers.Team``."""

    def __init__(self, config: WorkflowConfig, policy: Policy, root: Path, questions: list, tools: Tools, pages: list):
        torch.set_num_threads(config.threads)
        self.config, self.log, self.questions, self.tools = config, RunLog(root), questions, tools
        self.cast = Cast(policy, config.adapters)
        speakers: dict[str, list[str]] = {}
        for role, adapter in config.adapters.items():
            speakers.setdefault(adapter, []).append(role)
        self.servers = [
            AdapterServer(adapter, tuple(roles), config, policy, self.log, pages) for adapter, roles in speakers.items()
        ]

    def resume(self) -> int:
        """Continue a run of the same config, or warm up a new one -> the number of complete steps."""
        for server in self.servers:
            server.resume()
        return min(server.complete() for server in self.servers)

    def step(self, step: int) -> tuple[list[Trajectory], dict]:
        """One step -> its trajectories, and what ``measured`` says of it. All are published before an adapter moves."""
        due = [server for server in self.servers if server.due(step)]
        if due:
            if late := [s for s in self.servers if s.learner.version != step - 1]:
                path = self.log.trajectories(due[0].role, step)
                raise LogError(f"{path} is missing from a run that went on ({late[0].role}): put back a copy of it")
            started = time.perf_counter()
            played = self.play(step)
            for server in due:
                mine = [t for t in played if self.config.adapters[t.agent] == server.role]
                for trajectory in mine:
                    trajectory.policy_version = server.learner.version
                server.sample_seconds[step] = time.perf_counter() - started
                server.publish(step, mine)
        trajectories = [t for server in self.servers for t in server.published(step)]
        for server in self.servers:
            server.learn(self.config.updates(server.role, step))
        return trajectories, self.measured(step)

    def play(self, step: int) -> list[Trajectory]:
        """K rollouts of each of the step's questions, rewarded, with their advantages; publishes the outcomes."""
        config, limits = self.config, self.config.limits
        chosen = draw_questions(self.questions, config, step)
        key = (config.seed, step)
        episodes = play(
            config.workflow, self.cast, self.tools, chosen, config.rollouts, limits, config.temperature, key
        )
        values = None
        if config.credit in ("difference", "shapley"):
            again = (*key, "counterfactual")

            def ask(batch: list[tuple[int, Turn]]) -> list[Said]:
                done = converse(self.cast, self.tools, episodes, batch, limits, config.temperature, again)
                return [said(t) for t in done]

            values = coalition_values(config.workflow, episodes, config.credit, ask)
        settle(episodes, config.credit, values)
        rows = [(e.question.task_id, e.rollout, outcome(e)) for e in episodes]
        log.publish(self.log.outcomes(step), (dict(zip(OUTCOME, row, strict=True)) for row in rows))
        return [t for e in episodes for _, t in e.turns]

    def measured(self, step: int) -> dict:
        """Every adapter's line of ``metrics.jsonl``: {"step", adapter: {...}, ...}."""
        return {"step": step, **{server.role: server.measured(step) for server in self.servers}}

    def evaluate(self, questions: list, temperature: float = 1.0, seed: int = 0) -> dict:
        """One attempt at each question -> {"correct": share, "roles": {role: {...}}}. Nothing is written."""
        key, config = (seed, "evaluate"), self.config
        episodes = play(config.workflow, self.cast, self.tools, questions, 1, config.limits, temperature, key)
        settle(episodes, "team")
        trajectories = [t for e in episodes for _, t in e.turns]
        return {"correct": sum(map(outcome, episodes)) / len(episodes), "roles": by_role(trajectories)}


def grad_norms(measured: dict) -> dict[str, float]:
    """The length of each role's gradient in a step's ``measured``, whether its adapter is shared or its own."""
    found: dict[str, float] = {}
    for name, row in measured.items():
        if name != "step":
            found |= row.get("grad_norms") or {role: row["grad_norm"] or 0.0 for role in row["roles"]}
    return found


def line(measured: dict, steps: int) -> str:
    """A step in a line of text: accuracy of the team, then of each role its own accuracy and its format."""
    rows = [row for name, row in measured.items() if name != "step"]
    roles = {role: facts for row in rows for role, facts in row["roles"].items()}
    parts = [f"{role} {facts['own']:.2f} ({facts['format']:.2f})" for role, facts in roles.items()]
    return f"{measured['step']:>4}/{steps}  accuracy {rows[0]['correct']:.2f}  {'  '.join(parts)}"

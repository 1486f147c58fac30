"""Train a workflow: its roles on adapters of their own or on one, with any credit rule, over the same log as a team.

A step: K rollouts of the workflow on each question, in lock-step; the outcome (one scalar a rollout) and each adapter's
trajectories are published; then each adapter is updated from its own. Policy, agents, advantages, learner, log and
checkpoints are the core's (``servers.Server``); an adapter's files stand in ``RUN/<adapter>/``, where the adapter is
the role, or "shared". In one process: a workflow's roles are not decoupled.

    sharing   isolated: an adapter for each role (three generators share theirs); shared: one, told by the prompt
    credit    team        the outcome, for everybody
              per-agent   is its own answer right? An evaluator: is its verdict? A worker: is its report one that leads
                          to the answer? Orchestrator and controller, who say nothing to be right about: the outcome
              difference  V(N) - V(N without the player)
              shapley     the player's Shapley value in this rollout, over all 2^n coalitions

V(S) is played, not estimated: whoever is outside S says the default of its ask, who reads what it read before says what
it said before, and who reads something else is asked again (``coalition_values``). These extra messages are not trained
on. The reward is 0.1 format + 0.9 credit; a malformed message gets 0 under team and per-agent credit. Under the other
two its credit is what it was worth, so that spoiling a message is no way out of a negative one.

A *group* is the K rollouts of a question at one place: the same player, speaking for the same time. Generators there
read the same prompt. Aggregators, evaluators, workers and who refines do not: their prompts hold what others said. The
group's mean is still a valid baseline (it does not depend on the player's own message), only a noisier one; groups of
equal prompts would mostly have one member, who learns nothing. A place that one rollout alone reached teaches nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from minimgrpo import agents, casting, log, workflows
from minimgrpo.agents import Cast, Limits, generator
from minimgrpo.credit import difference, shapley_exact
from minimgrpo.grpo import group_advantages
from minimgrpo.log import LogError, RunLog
from minimgrpo.policy import Policy
from minimgrpo.scorer import gaia_score
from minimgrpo.servers import OUTCOME, Config, Server, draw_questions
from minimgrpo.tools import Tools
from minimgrpo.trajectory import Trajectory
from minimgrpo.warmup import warm_up
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


# ------------------------------------------------------------------------------------------------------- playing


@dataclass
class Episode:
    """One rollout of a workflow: what was said, in order, with its trajectories, and the team's answer."""

    question: object
    rollout: int
    turns: list[tuple[Turn, Trajectory]]
    answer: str = ""

    @property
    def players(self) -> list[tuple[str, int]]:
        return list(dict.fromkeys(turn.ask.player for turn, _ in self.turns))


def said(trajectory: Trajectory) -> Said:
    """What the others get to read of a trajectory."""
    calls = [f"{c['name']}: {next(iter(c['arguments'].values()), '')}" for c in trajectory.tool_calls]
    return Said(trajectory.result if trajectory.format_ok else "", "\n".join(calls))


def converse(
    cast: Cast, tools: Tools, episodes: list[Episode], batch: list[tuple[int, Turn]], limits, temperature, key: tuple
) -> list[Trajectory]:
    """Let everybody in ``batch`` (index of an episode, turn) speak, role by role -> their trajectories, in order."""
    spoken: list[Trajectory | None] = [None] * len(batch)
    for role in dict.fromkeys(turn.ask.role for _, turn in batch):
        rows = [n for n, (_, turn) in enumerate(batch) if turn.ask.role == role]
        mine = [Trajectory(role, episodes[batch[n][0]].question.task_id, episodes[batch[n][0]].rollout) for n in rows]
        users = [batch[n][1].ask.text for n in rows]
        draws = generator(*key, role, batch[0][1].round)
        agents.converse(cast, mine, users, agents.answers_of(tools), limits, temperature, draws)
        for n, trajectory in zip(rows, mine, strict=True):
            spoken[n] = trajectory
    return spoken


def play(
    name: str, cast: Cast, tools: Tools, questions: list, rollouts: int, limits: Limits, temperature: float, key: tuple
) -> list[Episode]:
    """``rollouts`` rollouts of the workflow at each question, question by question."""
    episodes = [Episode(q, k, []) for q in questions for k in range(rollouts)]

    def speak(batch: list[tuple[int, Turn]]) -> list[Said]:
        done = converse(cast, tools, episodes, batch, limits, temperature, key)
        for (i, turn), trajectory in zip(batch, done, strict=True):
            trajectory.call = len(episodes[i].turns)
            episodes[i].turns.append((turn, trajectory))
        return [said(trajectory) for trajectory in done]

    answers = workflows.run(WORKFLOWS[name], [e.question.question for e in episodes], speak)
    for episode, answer in zip(episodes, answers, strict=True):
        episode.answer = answer
    return episodes


# -------------------------------------------------------------------------------------------------------- credit


def coalitions(n: int, credit: str) -> list[int]:
    """The coalitions (bit masks) that a credit rule needs beside everybody's.

    >>> coalitions(2, "difference"), coalitions(2, "shapley")
    ([2, 1], [0, 1, 2])
    """
    everyone = 2**n - 1
    return [everyone ^ 1 << i for i in range(n)] if credit == "difference" else list(range(everyone))


def coalition_values(
    name: str, episodes: list[Episode], credit: str, ask: Callable[[list[tuple[int, Turn]]], list[Said]]
) -> list[np.ndarray]:
    """V(S) [2^n] of each episode's n players, with V = 1 for a right answer; what is not needed is 0.

    ``ask(batch)`` asks somebody who now reads something else, in the order of the batch.
    """

    def key(i: int, turn: Turn) -> tuple:
        return i, turn.ask.player, turn.time, turn.ask.text

    memory = {key(i, turn): said(t) for i, e in enumerate(episodes) for turn, t in e.turns}
    plays = [(i, S) for i, e in enumerate(episodes) for S in coalitions(len(e.players), credit)]
    players = [e.players for e in episodes]

    def speak(batch: list[tuple[int, Turn]]) -> list[Said]:
        replies: list[Said | None] = []
        new: dict[tuple, Turn] = {}
        for p, turn in batch:
            i, S = plays[p]
            known = turn.ask.player in players[i]
            if known and not S >> players[i].index(turn.ask.player) & 1:
                replies.append(Said(turn.ask.default))
                continue
            replies.append(None)
            if key(i, turn) not in memory:
                new.setdefault(key(i, turn), turn)
        if new:
            memory.update(zip(new, ask([(i, turn) for (i, *_), turn in new.items()]), strict=True))
        return [
            memory[key(plays[p][0], turn)] if reply is None else reply
            for reply, (p, turn) in zip(replies, batch, strict=True)
        ]

    answers = workflows.run(WORKFLOWS[name], [episodes[i].question.question for i, _ in plays], speak)
    values = [np.zeros(2 ** len(of)) for of in players]
    for episode, value in zip(episodes, values, strict=True):
        value[-1] = outcome(episode)
    for (i, S), answer in zip(plays, answers, strict=True):
        values[i][S] = float(gaia_score(answer, episodes[i].question.answer))
    return values


def outcome(episode: Episode) -> float:
    return float(gaia_score(episode.answer, episode.question.answer))


def own(episode: Episode, index: int) -> float:
    """Whether the episode's message number ``index`` was right by itself; who says nothing of the kind: the outcome."""
    turn, trajectory = episode.turns[index]
    gold, role = episode.question.answer, turn.ask.role
    if not trajectory.format_ok:
        return 0.0
    if role in ("orchestrator", "controller"):
        return outcome(episode)
    if role == "worker":
        return float(any(gaia_score(trajectory.result, step.report) for step in episode.question.steps))
    if role == "evaluator":
        draft = next(said(t).text for before, t in reversed(episode.turns[:index]) if before.ask.role == "generator")
        return float((trajectory.result == "correct") == gaia_score(draft, gold))
    return float(gaia_score(trajectory.result, gold))


def settle(episodes: list[Episode], credit: str, values: Sequence[np.ndarray] | None = None) -> None:
    """Set reward, reward parts and advantage of all trajectories of whole groups: all rollouts of each question.

    ``values``: the episodes' coalition values, for the credits "difference" and "shapley".
    """
    groups: dict[tuple, list[Trajectory]] = {}
    for number, episode in enumerate(episodes):
        right = outcome(episode)
        shares = None
        if values is not None:
            shares = (difference if credit == "difference" else shapley_exact)(values[number])
        for index, (turn, trajectory) in enumerate(episode.turns):
            ok, mine = float(trajectory.format_ok), own(episode, index)
            paid = ok * (right if credit == "team" else mine)
            if shares is not None:
                paid = float(shares[episode.players.index(turn.ask.player)])
            trajectory.reward = round(0.1 * ok + 0.9 * paid, 9)
            trajectory.reward_parts = {"format": ok, "correct": right, "own": mine, "credit": paid}
            groups.setdefault((episode.question.task_id, turn.ask.player, turn.time), []).append(trajectory)
    for group in groups.values():
        for trajectory, advantage in zip(group, group_advantages([t.reward for t in group]).tolist(), strict=True):
            trajectory.advantage = advantage


# ------------------------------------------------------------------------------------------------------ training


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

"""A workflow played by adapters, and what each of its messages is paid.

An *episode* is one rollout: what was said, in order, each message a trajectory of its own. Who is paid what:

    credit    team        the outcome, for everybody
              per-agent   is its own answer right? An evaluator: is its verdict? A worker: is its report one that leads
                          to the answer? Orchestrator and controller, who say nothing to be right about: the outcome
              difference  V(N) - V(N without the player)
              shapley     the player's Shapley value in this rollout, over all 2^n coalitions

V(S) is played, not estimated: whoever is outside S says the default of its ask, who reads what it read before says what
it said before, and who reads something else is asked again (``coalition_values``). N is who spoke in this rollout: a
player whom only a counterfactual reaches is asked in every coalition. These extra messages are not trained on.

The reward is 0.1 format + 0.9 credit; a malformed message gets 0 under team and per-agent credit. Under the other two
its credit is what it was worth, so that spoiling a message is no way out of a negative one.

A *group* is the K rollouts of a question at one place: the same player, speaking for the same time. Generators there
read the same prompt. Aggregators, evaluators, workers and who refines do not: their prompts hold what others said. The
group's mean is still a valid baseline (but for one's own share of 1/K, as in any group), only a noisier one; groups of
equal prompts would mostly have one member, who learns nothing. A place that one rollout alone reached teaches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from minimgrpo import agents, workflows
from minimgrpo.agents import Cast, Limits, generator
from minimgrpo.credit import difference, shapley_exact
from minimgrpo.grpo import group_advantages
from minimgrpo.scorer import gaia_score
from minimgrpo.tools import Tools
from minimgrpo.trajectory import Trajectory
from minimgrpo.workflows import WORKFLOWS, Said, Turn


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

"""Rollouts: many conversations in lock-step, and what connects a planner to its executors.

``converse`` runs any number of conversations of one role at once: in each turn every live one samples a message in one
batch, every message is parsed, every tool call of the turn is answered as one batch, and whoever ended leaves. For the
executor the tools answer; for the planner the tool *is* the executor, so its calls of one turn become one batch of
executor conversations. The two sides meet in a ``delegate`` function that passes sub-tasks one way and reports the
other: text only, so it may as well cross to another process.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minimgrpo import protocol
from minimgrpo.policy import Policy
from minimgrpo.protocol import Call, Malformed, Result
from minimgrpo.tools import ToolResult, Tools
from minimgrpo.trajectory import Rollout, Trajectory, rollouts


@dataclass(frozen=True)
class Limits:
    """What one conversation may use; going over ends it with the stop reason of the same name and no reward."""

    turns: int = 6
    "messages the agent may write"
    calls: int = 5
    "tool calls (for the planner: delegations) it may make"
    length: int = 40
    "tokens in one message"
    context: int = 1024
    "tokens in the whole conversation, the next message's included"


@dataclass(frozen=True)
class SubTask:
    """What the planner hands over: text, and where it came from."""

    question_id: str
    rollout: int
    call: int
    task: str


def generator(*key) -> torch.Generator:
    """A random generator that depends on nothing but ``key``: a run that is resumed draws the same numbers again."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def converse(
    policy: Policy,
    trajectories: list[Trajectory],
    users: list[str],
    answer: Callable[[int, list[tuple[int, Call]]], list[ToolResult]],
    limits: Limits,
    temperature: float,
    random: torch.Generator,
    deadline: float | None = None,
) -> None:
    """Fill ``trajectories`` (all of one agent, all new), each opened by its text in ``users``, until all have ended.

    ``answer(turn, calls)`` gets one turn's calls as (index into trajectories, Call) and returns their results in order.
    ``deadline`` is a time of ``time.monotonic()``: whoever would write another message after it ends as a "timeout".
    An evaluation may set it; training does not, since what happens must not depend on the clock there.
    """
    if not trajectories:
        return
    agent, chat = trajectories[0].agent, policy.chat
    prompts = [chat.open(agent, user) for user in users]
    for trajectory, user, ids in zip(trajectories, users, prompts, strict=True):
        trajectory.messages.append({"role": "system", "content": chat.prompts[agent]})
        trajectory.read("user", user, ids)
    context = min(limits.context, policy.max_context)
    for trajectory, ids in zip(trajectories, prompts, strict=True):
        if len(ids) + limits.length > context:
            trajectory.stop_reason = "context"  # before a word is written
    alive = [i for i, trajectory in enumerate(trajectories) if not trajectory.stop_reason]
    if not alive:
        return
    conversations = policy.conversations(agent, [prompts[i] for i in alive])
    row, new_ids = {i: r for r, i in enumerate(alive)}, None
    for turn in range(limits.turns):
        if deadline is not None and time.monotonic() > deadline:
            for i in alive:
                trajectories[i].stop_reason = "timeout"
            return
        samples = conversations.generate([row[i] for i in alive], new_ids, limits.length, temperature, random)
        calls, stopped_by = [], {}
        for i, sample in zip(alive, samples, strict=True):
            text = chat.decode(sample.ids)
            trajectories[i].wrote(text, sample.ids, sample.logprobs)
            if sample.stopped_by is None:
                trajectories[i].stop_reason = "length"
                continue
            action = protocol.parse(agent, text)
            if isinstance(action, Call) and not _over(trajectories[i], turn, limits):
                calls.append((i, action))
                stopped_by[i] = sample.stopped_by
            elif isinstance(action, Result):
                trajectories[i].stop_reason, trajectories[i].result = "result", action.text
            elif isinstance(action, Malformed):
                trajectories[i].stop_reason, trajectories[i].note = "format", action.why
        if not calls:
            return
        outputs = answer(turn, calls)
        alive, new_ids = [], []
        for (i, call), output in zip(calls, outputs, strict=True):
            ids = chat.respond(output.text, stopped_by[i])
            trajectories[i].tool_calls.append(
                {"name": call.name, "arguments": call.arguments, "output": output.text, "ok": output.ok}
            )
            if len(trajectories[i].token_ids) + len(ids) + limits.length > context:
                trajectories[i].stop_reason = "context"
                continue
            trajectories[i].read("user", protocol.response_text(output.text), ids)
            alive.append(i)
            new_ids.append(ids)
        if not alive:
            return


def _over(trajectory: Trajectory, turn: int, limits: Limits) -> bool:
    """Whether one more call goes over a limit; if so the trajectory ends."""
    if len(trajectory.tool_calls) >= limits.calls:
        trajectory.stop_reason = "calls"
    elif turn + 1 >= limits.turns:
        trajectory.stop_reason = "turns"
    return bool(trajectory.stop_reason)


class Cast:
    """What ``converse`` needs of a policy, with each role on the adapter that ``adapters`` names for it.

    Roles that share an adapter still have their own prompts.
    """

    def __init__(self, policy: Policy, adapters: dict[str, str]):
        self.policy, self.adapters = policy, adapters
        self.chat, self.max_context = policy.chat, policy.max_context

    def conversations(self, role: str, prompts: list[list[int]]):
        return self.policy.conversations(self.adapters[role], prompts)


def plan(
    policy: Policy,
    questions: list,
    rollouts: int,
    delegate: Callable[[int, list[SubTask]], list[ToolResult]],
    limits: Limits,
    temperature: float,
    random: torch.Generator,
    deadline: float | None = None,
) -> list[Trajectory]:
    """Planner trajectories of ``rollouts`` attempts at each question, question by question.

    ``delegate(turn, sub_tasks)`` returns one report per sub-task, in order. Only ``question.question`` is shown to the
    planner: gold answers stay outside.
    """
    trajectories = [Trajectory("planner", q.task_id, k) for q in questions for k in range(rollouts)]

    def hand_over(turn: int, calls: list[tuple[int, Call]]) -> list[ToolResult]:
        return delegate(
            turn,
            [
                SubTask(t.question_id, t.rollout, len(t.tool_calls), call.arguments["task"])
                for t, call in ((trajectories[i], call) for i, call in calls)
            ],
        )

    users = [q.question for q in questions for _ in range(rollouts)]
    converse(policy, trajectories, users, hand_over, limits, temperature, random, deadline)
    return trajectories


def execute(
    policy: Policy,
    tools: Tools,
    sub_tasks: list[SubTask],
    limits: Limits,
    temperature: float,
    random: torch.Generator,
    deadline: float | None = None,
) -> list[Trajectory]:
    """One executor trajectory per sub-task, in order."""
    trajectories = [Trajectory("executor", s.question_id, s.rollout, s.call) for s in sub_tasks]
    users = [s.task for s in sub_tasks]
    converse(policy, trajectories, users, answers_of(tools), limits, temperature, random, deadline)
    return trajectories


def solve(
    policy: Policy,
    tools: Tools,
    questions: list,
    rollouts: int,
    limits: Limits,
    temperature: float,
    random: torch.Generator,
    deadline: float | None = None,
) -> list[Trajectory]:
    """``rollouts`` attempts of one agent alone, "solo", at each question, question by question.

    It has the executor's tools and ends like the planner: all that it reads stands in one context.
    """
    trajectories = [Trajectory("solo", q.task_id, k) for q in questions for k in range(rollouts)]
    users = [q.question for q in questions for _ in range(rollouts)]
    converse(policy, trajectories, users, answers_of(tools), limits, temperature, random, deadline)
    return trajectories


def answers_of(tools: Tools) -> Callable[[int, list[tuple[int, Call]]], list[ToolResult]]:
    """The tools as what ``converse`` asks for answers."""
    return lambda _turn, calls: tools.run_many([(call.name, call.arguments) for _, call in calls])


def report(trajectory: Trajectory) -> ToolResult:
    """What the planner gets to read of an executor's work."""
    return ToolResult(trajectory.result, True) if trajectory.format_ok else ToolResult(protocol.NO_REPORT, False)


def team_rollouts(
    policy: Policy,
    tools: Tools,
    questions: list,
    limits: Limits,
    temperature: float,
    key: tuple,
    deadline: float | None = None,
    executor_policy: Policy | None = None,
    attempts: int = 1,
) -> list[Rollout]:
    """``attempts`` rollouts of each question, in order, as one batch. ``key``: what the random numbers depend on."""
    executed: list[Trajectory] = []

    def delegate(turn: int, sub_tasks: list[SubTask]) -> list[ToolResult]:
        draws = generator(*key, "executor", turn)
        done = execute(executor_policy or policy, tools, sub_tasks, limits, temperature, draws, deadline)
        executed.extend(done)
        return [report(t) for t in done]

    planned = plan(policy, questions, attempts, delegate, limits, temperature, generator(*key, "planner"), deadline)
    return rollouts(planned, executed)

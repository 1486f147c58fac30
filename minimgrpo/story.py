"""The example of notebooks 01 to 04: one question of the Atlas and four fixed rollouts at it.

    k  d_k  what happens                                                        planner's reward
    0  0    the planner gives up at once                                        0.1  wrong, but well formed
    1  1    a perfect first hop, then a call with a brace too few               0    broken format
    2  2    both hops right                                                     1    right
    3  5    vague tasks, a key reported for a name, a broken executor message   0.1  wrong

The messages are fixed; they are written as the untrained atlas-lm writes them, its usual mistakes included. All the
rest is real: they are played through ``agents.plan`` and ``agents.execute``, so that parsing, stop reasons, tool
output, token ids and masks are what a training step would have made of them, and ``rollouts`` takes each token's
log-prob from the policy as it is (temperature 1), as if it had sampled that token.

    policy = Policy.load("atlas-lm")
    four = story.rewarded(story.rollouts(policy))
"""

from __future__ import annotations

import torch

from minimgrpo import agents, report, settle, tasks
from minimgrpo.experts import Expert, Rubric
from minimgrpo.policy import Policy
from minimgrpo.protocol import call_text
from minimgrpo.sampler import Sample
from minimgrpo.tools import ToolResult, Tools
from minimgrpo.trajectory import Rollout, Trajectory

TASK_ID = "atlas-train-two-hop-0001"
D_MAX = 3  # small, so that the alignment has something to duplicate and something to drop


def _ask(task: str) -> str:
    return call_text("executor", task=task)


def _search(query: str) -> str:
    return call_text("search", query=query)


_FIRST_HOP, _SECOND_HOP = "Find the country whose capital is Nouakchott", "Find the currency of Mauritania"

# One entry a rollout: the planner's messages, and the executor's messages of each of its calls.
SCRIPT: list[tuple[list[str], list[list[str]]]] = [
    (["FINAL ANSWER: unknown"], []),
    (
        [_ask(_FIRST_HOP), _ask(_SECOND_HOP).replace("}}", "}")],
        [[_search("capital Nouakchott"), "Mauritania"]],
    ),
    (
        [_ask(_FIRST_HOP), _ask(_SECOND_HOP), "FINAL ANSWER: Ouguiya"],
        [[_search("capital Nouakchott"), "Mauritania"], [_search("currency Mauritania"), "Ouguiya"]],
    ),
    (
        [
            _ask("Find the country"),
            _ask("Find the currency of Jersey"),
            _ask(_FIRST_HOP),
            _ask(_FIRST_HOP),
            _ask("Find the currency"),
            "FINAL ANSWER: Pound",
        ],
        [
            [_search("capital"), "Jersey"],
            [_search("currency Jersey"), "Pound"],
            [_search("capital Nouakchott"), "Nouakchott"],
            [_search("")],
            [_search("currency"), "Pound"],
        ],
    ),
]


class _Replay:
    """Stands in for a Policy and its Conversations: row r writes the messages ``scripts[r]``, one after the other."""

    def __init__(self, policy: Policy, scripts: list[list[str]]):
        self.chat, self.max_context = policy.chat, policy.max_context
        self.scripts = [iter(script) for script in scripts]

    def conversations(self, _role: str, _prompts: list[list[int]]) -> _Replay:
        return self

    def generate(self, rows: list[int], *_rest) -> list[Sample]:
        written = [[*self.chat.encode(next(self.scripts[row])), self.chat.stop_id] for row in rows]
        return [Sample(ids, [0.0] * len(ids), self.chat.stop_id) for ids in written]


def question() -> tasks.Question:
    """The question of the story, from the Atlas's training split."""
    return next(q for q in tasks.load_questions("train") if q.task_id == TASK_ID)


def rollouts(policy: Policy) -> list[Rollout]:
    """The four rollouts with exact tokens, masks and log-probs under ``policy``; not rewarded yet."""
    tools, executed = Tools(tasks.load_pages()), []

    def delegate(_turn: int, sub_tasks: list[agents.SubTask]) -> list[ToolResult]:
        replay = _Replay(policy, [SCRIPT[s.rollout][1][s.call] for s in sub_tasks])
        done = agents.execute(replay, tools, sub_tasks, agents.Limits(), 1.0, None)
        executed.extend(done)
        return [agents.report(t) for t in done]

    replay = _Replay(policy, [messages for messages, _ in SCRIPT])
    planned = agents.plan(replay, [question()], len(SCRIPT), delegate, agents.Limits(), 1.0, None)
    for trajectories in (planned, executed):
        set_logprobs(policy, trajectories)
    return agents.rollouts(planned, executed)


@torch.no_grad()
def set_logprobs(policy: Policy, trajectories: list[Trajectory]) -> None:
    """Write into trajectories of one agent what their tokens' log-probs are under the policy now."""
    ids, masks = [t.token_ids for t in trajectories], [t.mask for t in trajectories]
    logprobs, _ = policy.score(trajectories[0].agent, ids, masks)
    for trajectory, row in zip(trajectories, logprobs.tolist(), strict=True):
        trajectory.logprobs = [round(x, 6) for x in row[: len(trajectory.mask)]]


def rewarded(rollouts: list[Rollout], expert: Expert | None = None) -> list[Rollout]:
    """The same rollouts with reward and reward parts set by the library's own functions (eq. 4 and 5)."""
    planned, executed = [r.planner for r in rollouts], [t for r in rollouts for t in r.calls]
    settle.reward_planner(planned, [question()])
    correct = {(t.question_id, t.rollout): t.reward_parts["correct"] for t in planned}
    settle.reward_executor(executed, correct, expert or Rubric())
    return rollouts


# ------------------------------------------------------------------------------------ what the notebooks show and check


def transcript(rollout: Rollout) -> str:
    """A rollout as indented lines of text."""
    return "\n".join("  " * depth + said(who, text) for depth, who, text in report.transcript(rollout))


def said(who: str, text: str) -> str:
    """A transcript's line in print: a colon after an agent, none after the marks of ``report.transcript``.

    >>> said("planner", "FINAL ANSWER: 7"), said("->", "Mali"), said("stopped", "(format: not JSON)")
    ('planner: FINAL ANSWER: 7', '-> Mali', 'stopped (format: not JSON)')
    """
    return f"{who} {text}" if who in ("->", "=", "stopped") else f"{who}: {text}"


def padded(rows: list[list]) -> torch.Tensor:
    """Lists of different lengths as one tensor [B, T], filled up with 0.

    >>> padded([[1, 2], [3]]).tolist()
    [[1, 2], [3, 0]]
    """
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])


def table(heads: list, rows: list[list]) -> str:
    """A table in Markdown; numbers that are not whole are shown with three decimals."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        "| " + " | ".join(f"{x:.3f}" if isinstance(x, float) else str(x) for x in line) + " |" for line in lines
    )


def same(mine, right, tolerance: float = 1e-5) -> bool:
    """Whether an answer to an exercise is the right one: numbers within the tolerance, lists of them item by item.

    >>> same([0.5, [1.0]], [0.5, [1.000001]]), same(None, 0.0), same([1.0], [1.0, 2.0])
    (True, False, False)
    """
    if isinstance(right, list | tuple):
        whole = isinstance(mine, list | tuple) and len(mine) == len(right)
        return whole and all(same(a, b, tolerance) for a, b in zip(mine, right, strict=True))
    if isinstance(right, int | float):
        return isinstance(mine, int | float) and abs(mine - right) <= tolerance
    return mine == right

"""Trajectories: what an agent read and wrote, to the exact token, as plain dataclasses <-> JSON.

A **trajectory** is one agent's whole conversation: the planner has one per rollout, the executor one per sub-task.
A **rollout** is one attempt of the team at a question: the planner's trajectory and the ``d_k`` executor trajectories
that it caused. Token ids, completion mask and log-probs always have the same length; they are written by the sampler
and read by the learner, and nothing in between ever decodes and tokenises them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minimgrpo.protocol import TOOLS

# Why a trajectory ended. Only "result" can earn a reward.
STOP_REASONS = ("result", "format", "turns", "calls", "length", "context", "timeout")


@dataclass
class Trajectory:
    """One agent's conversation.

    ``mask[t] == 1`` where the agent sampled ``token_ids[t]`` (its stop tokens included), 0 on prompts and tool output.
    ``logprobs[t]`` is the log-prob under exactly the distribution the token was drawn from; 0.0 where ``mask[t] == 0``.
    ``policy_version`` counts the updates of the adapter that sampled it. ``call`` numbers the executor's trajectories
    within their rollout and is 0 for the planner. ``copies`` is its weight from the alignment: 0 when it was dropped.
    """

    agent: str
    question_id: str
    rollout: int
    call: int = 0
    run: str = ""
    step: int = 0
    policy_version: int = 0
    messages: list[dict] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tool_calls: list[dict] = field(default_factory=list)
    stop_reason: str = ""
    result: str = ""
    note: str = ""
    reward: float = 0.0
    reward_parts: dict = field(default_factory=dict)
    copies: int = 1
    advantage: float = 0.0

    def read(self, role: str, content: str, ids: list[int]) -> None:
        """Append tokens the agent was given: a prompt, or a tool's output."""
        self.messages.append({"role": role, "content": content})
        self._append(ids, 0, [0.0] * len(ids))

    def wrote(self, content: str, ids: list[int], logprobs: list[float]) -> None:
        """Append tokens the agent sampled, with their log-probs."""
        self.messages.append({"role": "assistant", "content": content})
        # Rounded once, here, so that a trajectory in memory and one read back from the log are the same numbers.
        self._append(ids, 1, [round(x, 6) for x in logprobs])

    def _append(self, ids: list[int], sampled: int, logprobs: list[float]) -> None:
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} token ids but {len(logprobs)} log-probs")
        self.token_ids += ids
        self.mask += [sampled] * len(ids)
        self.logprobs += logprobs

    @property
    def format_ok(self) -> bool:
        """True when it ended in a well-formed result within all limits."""
        return self.stop_reason == "result"

    @property
    def sampled(self) -> int:
        """The number of tokens the agent sampled."""
        return sum(self.mask)

    def to_json(self) -> dict:
        """A flat dict for one line of the log (it shares the lists: asdict would copy every token id).

        A call gets every argument that the agent's tools know, "" or 0 where it is not used: ``datasets`` takes the
        columns of many files and their types from the first.
        """
        row = {name: getattr(self, name) for name in self.__dataclass_fields__}
        known = {name: type_() for tool in TOOLS.get(self.agent, {}).values() for name, (type_, _) in tool.items()}
        row["tool_calls"] = [call | {"arguments": known | call["arguments"]} for call in self.tool_calls]
        return row

    @classmethod
    def from_json(cls, row: dict) -> Trajectory:
        """The inverse of ``to_json``; raises ValueError when fields are missing or the token lists disagree."""
        missing = set(cls.__dataclass_fields__) - set(row)
        if missing:
            raise ValueError(f"a trajectory without {', '.join(sorted(missing))}")
        self = cls(**{name: row[name] for name in cls.__dataclass_fields__})
        if not len(self.token_ids) == len(self.mask) == len(self.logprobs):
            raise ValueError("token_ids, mask and logprobs differ in length")
        self.tool_calls = [
            call | {"arguments": {k: v for k, v in call["arguments"].items() if v}} for call in self.tool_calls
        ]
        return self


@dataclass
class Rollout:
    """One attempt of the team: the planner's trajectory and the executor trajectories it caused (``d_k`` of them)."""

    planner: Trajectory
    calls: list[Trajectory] = field(default_factory=list)


def rollouts(planned: list[Trajectory], executed: list[Trajectory]) -> list[Rollout]:
    """Put each planner trajectory of a step or an evaluation together with the executor's of the same rollout."""
    calls: dict[tuple[str, int], list[Trajectory]] = {}
    for t in sorted(executed, key=lambda t: t.call):
        calls.setdefault((t.question_id, t.rollout), []).append(t)
    return [Rollout(t, calls.get((t.question_id, t.rollout), [])) for t in planned]

"""The two composite rewards of M-GRPO: one for the planner, one for the executor. Plain numbers in, one number out.

An agent that breaks the message format gets 0, whatever else it did: format is learned first. The executor is paid for
the planner's success (one scalar that crosses between them) and for its own sub-task (the expert's rating).

Choices against the paper (arXiv 2511.13288) and its public code:

    what              paper                                     public code           ours
    planner (eq. 4)   0.1 format + 0.9 correct; bad format: 0   0, 0.1 or 1.0         the paper's
    executor (eq. 5)  0.1 format + 0.4 planner + 0.5 expert;    no expert term        the paper's
                      bad format: 0
    expert            an LLM's rating; prompt, scale not given  absent                any number in [0, 1] (experts.py)
    weights           fixed                                     fixed                 an argument

A value that makes no sense (an expert of 7, NaN, None) is an error, never a silent 0.
"""

from collections.abc import Sequence


def planner_reward(format_ok: bool, correct: float, weights: Sequence[float] = (0.1, 0.9)) -> float:
    """Reward of one planner trajectory (eq. 4): 0.1 for the format plus 0.9 for a correct answer; 0 if format is bad.

    format_ok: True or False.   correct: True or False, or a number in [0, 1] for a shaped reward such as F1.
    weights: (format, correct).
    Raises ValueError: format_ok not a truth value, correct outside [0, 1] or not a number.

    >>> planner_reward(True, True), planner_reward(True, False), planner_reward(False, True)
    (1.0, 0.1, 0.0)
    """
    format_weight, correct_weight = weights
    correct = _unit("correct", correct)
    if not _truth("format_ok", format_ok):
        return 0.0
    return float(format_weight + correct_weight * correct)


def executor_reward(
    format_ok: bool, planner_correct: float, expert: float, weights: Sequence[float] = (0.1, 0.4, 0.5)
) -> float:
    """Reward of one executor trajectory (eq. 5): 0.1 format + 0.4 planner's success + 0.5 expert; 0 if format is bad.

    format_ok: True or False, the executor's own format.   planner_correct: as `correct` in `planner_reward`, of the
    rollout that this trajectory belongs to.   expert: how well the sub-task was done, in [0, 1].
    weights: (format, planner, expert).
    Raises ValueError: as `planner_reward`, and for an expert outside [0, 1], NaN or missing, even if format is bad.

    >>> executor_reward(True, True, 1.0), executor_reward(True, False, 0.5), executor_reward(False, True, 1.0)
    (1.0, 0.35, 0.0)
    """
    format_weight, planner_weight, expert_weight = weights
    planner_correct = _unit("planner_correct", planner_correct)
    expert = _unit("expert", expert)
    if not _truth("format_ok", format_ok):
        return 0.0
    return float(format_weight + planner_weight * planner_correct + expert_weight * expert)


def _truth(name: str, value: bool) -> bool:
    if value not in (True, False):  # the text "no" would count as true, None as false
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _unit(name: str, value: float) -> float:
    if value is None or isinstance(value, str) or not 0 <= value <= 1:  # NaN fails the comparison too
        raise ValueError(f"{name} must be a number in [0, 1], got {value!r}")
    return float(value)

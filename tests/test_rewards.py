"""The composite rewards, eq. 4 and 5."""

import itertools

import numpy as np
import pytest

from minimgrpo.rewards import executor_reward, planner_reward


@pytest.mark.parametrize("format_ok, correct, reward", [(1, 1, 1.0), (1, 0, 0.1), (0, 1, 0.0), (0, 0, 0.0)])
def test_planner_reward_table(format_ok, correct, reward):
    assert planner_reward(bool(format_ok), bool(correct)) == pytest.approx(reward, abs=1e-12)


@pytest.mark.parametrize(
    "format_ok, planner_correct, expert, reward",
    [
        (True, True, 1.0, 1.0),
        (True, True, 0.0, 0.5),
        (True, False, 1.0, 0.6),
        (True, False, 0.0, 0.1),
        (True, True, 0.3, 0.65),
        (False, True, 1.0, 0.0),
        (False, False, 0.0, 0.0),
    ],
)
def test_executor_reward_table(format_ok, planner_correct, expert, reward):
    assert executor_reward(format_ok, planner_correct, expert) == pytest.approx(reward, abs=1e-12)


def test_each_weight_belongs_to_its_part():
    assert planner_reward(True, True, weights=(3, 5)) == 8
    assert planner_reward(True, False, weights=(3, 5)) == 3
    assert planner_reward(True, 0.5, weights=(0, 1)) == 0.5  # shaped, such as F1
    parts = {(True, 0.0): 2, (True, 1.0): 2 + 16, (False, 0.0): 2 - 2, (False, 1.0): 0}
    for (format_ok, expert), reward in parts.items():
        assert executor_reward(format_ok, False, expert, weights=(2, 4, 16)) == reward
    assert executor_reward(True, True, 0.0, weights=(2, 4, 16)) == 6
    with pytest.raises(ValueError):
        planner_reward(True, True, weights=(0.1, 0.4, 0.5))
    with pytest.raises(ValueError):
        executor_reward(True, True, 1.0, weights=(0.1, 0.9))


@pytest.mark.parametrize("expert", [-0.01, 1.01, 7, float("nan"), float("inf"), None, "0.5"])
@pytest.mark.parametrize("format_ok", [True, False])
def test_a_bad_expert_is_an_error_never_a_silent_zero(expert, format_ok):
    with pytest.raises(ValueError, match="expert"):
        executor_reward(format_ok, True, expert)


@pytest.mark.parametrize("correct", [None, "yes", float("nan"), 2, -1])
def test_a_bad_correct_is_an_error(correct):
    with pytest.raises(ValueError, match="correct"):
        planner_reward(True, correct)
    with pytest.raises(ValueError, match="planner_correct"):
        executor_reward(True, correct, 0.5)


@pytest.mark.parametrize("format_ok", [None, "no", 2, float("nan")])
def test_a_format_that_is_no_truth_value_is_an_error(format_ok):
    with pytest.raises(ValueError, match="format_ok"):
        planner_reward(format_ok, True)
    with pytest.raises(ValueError, match="format_ok"):
        executor_reward(format_ok, True, 0.5)


def test_rewards_are_plain_floats_whatever_comes_in():
    for format_ok, correct in itertools.product([True, np.True_, 0], [1, True, np.bool_(False), np.float32(1)]):
        assert type(planner_reward(format_ok, correct)) is float
        assert type(executor_reward(format_ok, correct, np.float64(0.5))) is float

# %% [markdown]
# # Assignment 1. Group advantages and the clipped loss
#
# You write the maths of one GRPO update, from the rewards of a group of rollouts to the number that `backward()` is
# called on. Six small functions, 20 points. Nothing is trained here: every tensor fits on a line, so that you can
# compute each value by hand.
#
# **How it works.** Fill in the places marked `YOUR CODE HERE`. Below each function is its check: run it as often as
# you like. Grading runs the same checks with more numbers. A function is checked by itself: where one needs another,
# the check brings its own, so a mistake early on costs nothing later.
#
# **Shapes.** `Q` questions, `K` rollouts of each (a *group*); `B` rows of a batch, `T` tokens.

# %% setup
import itertools
import math

import torch

from minimgrpo.checks import same

# %% [markdown]
# ## 1. Group advantages (5 points)
#
# How good was a rollout? GRPO compares it with the other rollouts *of the same question*: the advantage of rollout $k$
# is how far its reward lies above the mean of its group, in standard deviations,
#
# $$A_k = \frac{r_k - \mathrm{mean}(r_1 \dots r_K)}{\mathrm{std}(r_1 \dots r_K)}$$
#
# (M-GRPO, arXiv 2511.13288, eq. 9 and 10). The std is the population's: it divides by $K$. There is no epsilon in the
# denominator: a group with a small spread counts as much as one with a large spread. In a group whose rewards are all
# the same nothing can be learned: every advantage is exactly 0. Decide that by comparing the rewards: the std of equal
# floats is not always 0.


# %% task group_advantages
def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Z-scores of the rewards inside each group.

    rewards: [Q, K], one row for each question; K may be 1.
    Returns [Q, K]. Exactly 0 in a group whose rewards are all equal; never NaN.
    """
    ### BEGIN SOLUTION
    flat = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    std = (centred**2).mean(dim=1, keepdim=True).sqrt()
    return (centred / std.masked_fill(flat, 1.0)).masked_fill(flat, 0.0)
    ### END SOLUTION


# %% example
group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 2.0, 4.0, 2.0]]))


# %% test group_advantages 3
def test_group_advantages():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 2.0, 4.0, 2.0]])
    got = group_advantages(rewards.clone())
    assert got.shape == rewards.shape, f"one advantage for each reward: shape [2, 4], not {list(got.shape)}"
    assert got.abs().sum() > 0, "all advantages are 0, but some rewards are above the mean of their group"
    assert got[0, 0] > got[0, 1], "the sign is reversed: a reward above the mean has a positive advantage"
    same(got.sum(dim=1), [0.0, 0.0], "the mean must be the one of its own group: then a row's advantages sum to 0")
    spread = (got**2).mean(dim=1)
    likely = {
        "divide by the std of the population (over K), not of a sample (over K - 1)": [0.75, 0.75],
        "the std is missing: the rewards are only centred": [0.25, 2.0],
        "divide by the std, not by the variance": [4.0, 0.5],
        "the std must be the one of its own group, not of the whole batch": [0.1481481, 1.1851852],
    }
    same(spread, [1.0, 1.0], "a row's squared advantages must have the mean 1", likely)
    same(got, [[1, -1, -1, 1], [-math.sqrt(2), 0, math.sqrt(2), 0]], "wrong values")
    ### BEGIN HIDDEN TESTS
    for seed in range(5):
        rewards = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
        expected = []
        for row in rewards.double().tolist():
            mean = sum(row) / len(row)
            std = math.sqrt(sum((r - mean) ** 2 for r in row) / len(row))
            expected.append([(r - mean) / std for r in row])
        same(group_advantages(rewards), expected, "wrong values on other rewards")
    ### END HIDDEN TESTS


# %% test group_advantages__flat 2
def test_group_advantages__flat():
    got = group_advantages(torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    assert not got.isnan().any(), "NaN in a group without a spread: there the advantage is 0"
    same(got, [[0, 0], [0, 0]], "equal rewards in a group give 0, whatever the other groups got: its own group counts")
    equal = "a group of equal rewards must get exactly 0: compare the rewards, the std of equal floats may be 1e-8"
    for reward, size in ((0.1, 3), (0.35, 7), (0.7, 9), (0.5, 1)):
        got = group_advantages(torch.full((1, size), reward))
        assert not got.isnan().any(), f"NaN in a group of {size} equal rewards"
        assert got.tolist() == [[0.0] * size], equal
    close = torch.tensor([[0.5, 0.5 + 2**-14]])
    same(group_advantages(close), [[-1, 1]], "no epsilon: a small spread counts as much as a large one")
    ### BEGIN HIDDEN TESTS
    for reward, size in itertools.product((0.3, 1 / 3, 0.6, 1.1, -2.7), range(1, 12)):
        got = group_advantages(torch.full((2, size), reward))
        assert got.tolist() == [[0.0] * size] * 2, equal
    mixed = torch.tensor([[0.2, 0.2, 0.2], [0.0, 3.0, 0.0]])
    same(group_advantages(mixed)[0], [0, 0, 0], "a flat group stays at 0 beside one that is not flat")
    same(group_advantages(mixed)[1], [-math.sqrt(0.5), math.sqrt(2), -math.sqrt(0.5)], "wrong beside a flat group")
    ### END HIDDEN TESTS

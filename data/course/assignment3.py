# %% [markdown]
# # Assignment 3. Trajectory alignment
#
# In rollout $k$ the planner calls the executor $d_k$ times, as often as it likes: never, once, a dozen times. M-GRPO
# wants the same number $D$ of executor trajectories from every rollout, so that a rollout with many calls does not
# drown the others. A rollout with fewer has some of them duplicated at random, one with more has some dropped. You
# write that, what it does to the advantages and to the loss, and how to choose $D$. Five functions, 20 points.
#
# **A duplicate is a weight.** Running a trajectory three times gives the same gradient as running it once and counting
# it three times. So nothing is copied: the alignment returns *copies*, how often each trajectory counts; 0: dropped.
#
# **How it works.** Fill in the places marked `YOUR CODE HERE`. Below each function is its check: run it as often as
# you like. Grading runs the same checks with more numbers. A function is checked by itself, so a mistake early on costs
# nothing later.
#
# **Shapes.** `K` rollouts of one question, `d_k` executor trajectories in rollout k, `B` rows of a batch, `T` tokens.

# %% setup
import math
import random
from collections import Counter

import torch

from minimgrpo.checks import same


def written_out(rows, copies):
    """Each item of each row as often as its copies say, in one flat list: the aligned batch as the paper has it."""
    return [
        item
        for row, counts in zip(rows, copies, strict=True)
        for item, c in zip(row, counts, strict=True)
        for _ in range(c)
    ]


# %% example
written_out([["a", "b"], [], ["c"]], [[1, 2], [], [3]])

# %% [markdown]
# ## 1. Align (6 points)
#
# (M-GRPO, arXiv 2511.13288, eq. 11.) For each rollout with $d$ trajectories:
#
# - $d < D$: all $d$ stay, and $D - d$ more are drawn from them at random, with replacement;
# - $d > D$: a random $D$ of them stay, each of the others gets 0 copies;
# - $d = D$: each counts once;
# - $d = 0$: there is nothing to duplicate. The rollout is left out: an empty list.
#
# A run must be repeatable: the same seed gives the same copies. Use a generator of your own (`random.Random(seed)`),
# not the global one, and one for all rollouts, so that two rollouts of the same size do not get the same draws.


# %% task align
def align(counts: list[int], d_max: int, seed: int) -> list[list[int]]:
    """How often each executor trajectory of a question counts.

    counts: K numbers d_k >= 0.   d_max: D >= 1.
    Returns K lists: the k-th has d_k whole numbers >= 0 that sum to D, or is empty when d_k is 0.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% example
align([2, 1, 0, 5], d_max=3, seed=0)


# %% test align 4
def test_align():
    counts, D = [2, 1, 0, 5, 3, 7, 1, 0], 3
    copies = align(list(counts), D, 0)
    assert len(copies) == len(counts), "one list for each rollout, also for one without a call"
    for d, row in zip(counts, copies, strict=True):
        if d == 0:
            assert list(row) == [], f"a rollout without a call is left out: an empty list, not {row}"
            continue
        assert len(row) == d, f"one number for each trajectory, 0 for a dropped one: expected {d} numbers, got {row}"
        assert all(type(c) is int and c >= 0 for c in row), f"copies are whole numbers: {row}"
        if d == D:
            assert list(row) == [1] * d, f"d = D: each trajectory counts once, not {row}"
        if d > D:
            assert max(row) == 1, f"d > D: a trajectory stays once or is dropped, got {row}"
        assert sum(row) == D, f"each rollout counts D = {D} times in all, got {row}"
    for seed in range(30):
        rows = align([3, 2, 9], 8, seed)
        assert max(rows[2]) == 1, f"d > D: a trajectory stays once or is dropped, got {rows[2]}"
        assert min(rows[0] + rows[1]) >= 1, (
            f"all d trajectories stay, and D - d more are drawn; here one is lost: {rows}"
        )


# %% test align__random 2
def test_align__random():
    state = random.getstate()
    first = align([2, 9, 4, 1], 6, 1)
    assert align([2, 9, 4, 1], 6, 1) == first, "the same seed must give the same copies: a run must be repeatable"
    assert random.getstate() == state, "use random.Random(seed): the global generator belongs to everyone"
    n, kept, doubled = 600, Counter(), Counter()
    for seed in range(n):
        many, few = align([5, 3], 4, seed)
        kept.update(i for i, c in enumerate(many) if c)
        doubled.update(i for i, c in enumerate(few) if c == 2)
    assert len(kept) == 5 and max(kept.values()) < n, "which ones are dropped must be random, and depend on the seed"
    assert len(doubled) == 3, "which ones are duplicated must be random, and depend on the seed"
    assert min(kept.values()) > 0.72 * n, (
        f"each of 5 stays in 4 of 5 cases when D is 4, but they stay {dict(kept)} of {n}"
    )
    assert min(doubled.values()) > 0.25 * n, f"each of 3 is as likely to be the duplicate, but they are {dict(doubled)}"
    twins = [align([3, 3], 8, seed) for seed in range(20)]
    assert any(a != b for a, b in twins), "two rollouts of the same size get the same draws: seed once, not for each"


# %% [markdown]
# ## 2. The executor's advantages (5 points)
#
# The executor's advantages (eq. 12 and 13) are taken over *all aligned trajectories of a question together*: one mean
# and one population std over the $K \cdot D$ trajectories, written out. With copies $c_i$ as weights these are
#
# $$\mu = \frac{\sum_i c_i r_i}{\sum_i c_i}, \qquad \sigma^2 = \frac{\sum_i c_i (r_i - \mu)^2}{\sum_i c_i}, \qquad
# A_i = \frac{r_i - \mu}{\sigma}$$
#
# A dropped trajectory is in neither sum, and its advantage is 0. A rollout without a call has no trajectory: it is not
# a trajectory with reward 0. When all rewards that count are equal, all are exactly 0.


# %% task aligned_advantages
def aligned_advantages(rewards: list[list[float]], copies: list[list[int]]) -> list[list[float]]:
    """The advantage of each executor trajectory of one question.

    rewards, copies: K lists; the k-th has d_k numbers, perhaps none.
    Returns K lists of the same lengths. 0 for a dropped trajectory; all 0 when the rewards that count are equal or
    nothing counts; never NaN.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% test aligned_advantages 3
def test_aligned_advantages():
    # D = 3; written out the rewards are 0 0 4 | 4 0 4; the second rollout made no call, the 9 was dropped
    rewards, copies = [[0.0, 4.0], [], [4.0, 9.0, 0.0, 4.0]], [[2, 1], [], [1, 0, 1, 1]]
    got = aligned_advantages([list(row) for row in rewards], copies)
    assert [len(row) for row in got] == [2, 0, 4], "the shape must be that of rewards: an empty list stays empty"
    assert got[0][1] > got[0][0], "the sign is reversed, or all is 0: a reward above the mean has a positive advantage"
    likely = {
        "the rollout without a call counts as a trajectory with reward 0": [-0.866025, 1.154701, 1.154701, 0],
        "the rollout without a call counts as D trajectories with reward 0": [-0.707107, 1.414214, 1.414214, 0],
        "the copies are missing from mean and std": [-1.224745, 0.816497, 0.816497, 0],
        "the dropped trajectory (copies 0) is in mean and std": [-0.977008, 0.325669, 0.325669, 0],
        "the copies are not used at all": [-1.150793, 0.164399, 0.164399, 1.808389],
        "a dropped trajectory has advantage 0": [-1, 1, 1, 3.5],
        "mean and std are those of each rollout, not of the question": [-0.707107, 1.414214, 0.707107, 0],
        "divide by the std of the population, not of a sample": [-0.912871, 0.912871, 0.912871, 0],
        "the rewards are only centred: divide by the std": [-2, 2, 2, 0],
        "the advantage is multiplied by the copies: the loss does that": [-2, 1, 1, 0],
    }
    same([*got[0], *got[2][:2]], [-1, 1, 1, 0], "wrong advantages", likely)
    same(list(got[2]), [1, 0, -1, 1], "wrong advantages in the third rollout")


# %% test aligned_advantages__flat 2
def test_aligned_advantages__flat():
    def flat(rewards, copies, says):
        got = aligned_advantages(rewards, copies)
        assert not any(a != a for row in got for a in row), f"NaN: {says}"
        assert [list(row) for row in got] == [[0.0] * len(row) for row in rewards], (
            f"{says}: every advantage is exactly 0"
        )

    equal = "all rewards that count are equal"
    flat([[0.1, 0.1], [0.1]], [[1, 2], [3]], equal)
    flat([[0.7] * 3, [], [0.7] * 4], [[2, 1, 1], [], [1, 1, 1, 1]], equal)
    flat([[0.5, 0.9], [0.5]], [[3, 0], [3]], "the rewards differ only in a dropped trajectory; " + equal)
    flat([[], []], [[], []], "no rollout called the executor")
    flat([[0.3, 0.6], []], [[0, 0], []], "every trajectory was dropped")
    flat([[0.4], [], []], [[8], [], []], "one trajectory alone")


# %% [markdown]
# ## 3. The executor's loss (4 points)
#
# Now the loss must count each row as often as its copies say: the mean over all sampled tokens *of the aligned batch
# written out*, computed from each row once. Rows with 0 copies were dropped: whatever they hold, even NaN, they change
# nothing. When nothing counts the loss is 0.


# %% task weighted_loss
def weighted_loss(token_losses: torch.Tensor, mask: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
    """The mean loss over the sampled tokens of the aligned batch.

    token_losses: [B, T].   mask: [B, T], 1 where the agent sampled the token.   copies: [B], whole numbers >= 0.
    Returns a scalar tensor with a gradient; 0 when nothing counts.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% test weighted_loss 4
def test_weighted_loss():
    nan = float("nan")
    losses = torch.tensor([[1.0, 3.0, 9.0], [5.0, 9.0, 9.0], [7.0, 7.0, 7.0]])
    mask, copies = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]), torch.tensor([1, 3, 0])
    likely = {
        "the copies are missing: every row counts once": 5.0,
        "the copies are missing, and so is a dropped row's": 3.0,
        "the copies are missing from the denominator: copies times tokens": 19 / 6,
        "the copies are missing from the denominator; a dropped row does not count there either": 19 / 3,
        "a dropped row does not count in the denominator": 19 / 8,
        "this divides by the number of rows that count, not by their tokens": 19 / 4,
        "each row's mean counts the same: the mean is over tokens": 17 / 4,
        "the copies are squared": 49 / 11,
    }
    same(weighted_loss(losses, mask, copies), 19 / 5, "wrong: written out the tokens are 1, 3, 5, 5, 5", likely)
    filled = losses.clone()
    filled[2], filled[0, 2] = nan, nan
    got = weighted_loss(filled, mask, copies)
    assert not got.isnan(), "NaN in a dropped row or behind the mask must change nothing: NaN * 0 is NaN"
    same(got, 19 / 5, "what is dropped or masked must change nothing")
    leaf = losses.clone().requires_grad_()
    loss = weighted_loss(leaf, mask, copies)
    assert loss.requires_grad, "no gradient reaches the token losses"
    loss.backward()
    same(leaf.grad, [[0.2, 0.2, 0], [0.6, 0, 0], [0, 0, 0]], "wrong gradient: copies / 5 at each token that counts")
    got = weighted_loss(losses, mask, torch.tensor([0, 0, 0]))
    assert not got.isnan(), "NaN when every row was dropped: 0 / 0; the loss is 0"
    same(got, 0.0, "when nothing counts the loss is 0")


# %% [markdown]
# ## 4. Choose D (3 points)
#
# A large $D$ duplicates a lot, a small one drops a lot. The paper takes a $D$ that about 99 % of the rollouts do not
# exceed. From the call counts of many rollouts, measured before training: **the smallest $D \ge 1$ such that at least
# this share of the rollouts has $d \le D$.** Rollouts without a call are rollouts, too.


# %% task suggest_d_max
def suggest_d_max(counts: list[int], share: float = 0.99) -> int:
    """The smallest D >= 1 such that at least ``share`` of the rollouts have d <= D.

    counts: d_k of many rollouts, in any order.   share: in (0, 1].
    Raises ValueError: no counts.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% test suggest_d_max 3
def test_suggest_d_max():
    def is_(counts, share, expected, says, likely=None):
        before = list(counts)
        same(suggest_d_max(counts, share), expected, says, likely)
        assert counts == before, "the list of counts must not be changed"

    counts = [30] + [1] * 60 + [2] * 39
    likely = {
        "this is the largest count": 30,
        "this lies between two counts: D is the smallest that covers the share": 3,
    }
    is_(counts, 0.99, 2, "99 of 100 rollouts make at most two calls", likely)
    likely = {"at least this share: 6 of 10 is enough for 0.6": 4}
    is_([5, 1, 1, 1, 1, 1, 4, 4, 9, 3], 0.6, 3, "6 of 10 rollouts make at most three calls", likely)
    likely = {"rounded down: with D = 1 the share is not covered": 1}
    is_([1, 1, 1, 1, 1, 4, 4, 4, 4, 4], 0.55, 4, "5 of 10 make one call, and 0.55 must be covered", likely)
    is_([0, 0, 0, 0], 0.99, 1, "D is at least 1", {"D is at least 1, also when nobody calls": 0})
    without = "rollouts without a call are rollouts, too: they count in the share"
    is_([0, 0, 0, 0, 0, 0, 2, 5], 0.75, 1, "6 of 8 make no call", {without: 5})
    is_([4, 2, 8], 1.0, 8, "share 1: nothing may be dropped")
    try:
        suggest_d_max([])
    except ValueError:
        pass
    else:
        raise AssertionError("without a count there is no D: raise ValueError")


# %% [markdown]
# ## 5. How much say has each rollout? (2 points)
#
# Without alignment a rollout that calls ten times puts ten rows into the executor's batch, one that calls once one row:
# its say is $d_k / \sum_j d_j$. With alignment each rollout that called at all puts $D$ rows there. Compute the shares
# of the rows of one question, before and after.


# %% task say
def say(counts: list[int], aligned: bool) -> list[float]:
    """The share of the executor's rows that comes from each rollout.

    counts: K numbers d_k >= 0.   aligned: after the alignment, or before it.
    Returns K numbers that sum to 1; all 0 when no rollout called the executor.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% test say 2
def test_say():
    counts = [1, 0, 6, 3]
    same(say(list(counts), aligned=False), [0.1, 0.0, 0.6, 0.3], "wrong shares before the alignment")
    likely = {
        "a rollout without a call has no rows, also after the alignment": [0.25] * 4,
        "these are the shares before the alignment": [0.1, 0.0, 0.6, 0.3],
        "aligned rollouts have D rows each, and so equal shares: these do not sum to 1": [1.0, 0.0, 1.0, 1.0],
    }
    same(say(list(counts), aligned=True), [1 / 3, 0.0, 1 / 3, 1 / 3], "wrong shares after the alignment", likely)
    for aligned in (False, True):
        same(say([0, 0], aligned), [0.0, 0.0], "no rollout called the executor: 0 for each, and no division by zero")


# %% [markdown]
# ## What comes next
#
# In the library these are `minimgrpo.alignment.align` and `suggest_d_max`, and the `weights` of
# `minimgrpo.grpo.group_advantages` and `policy_loss`. Notebook 03 shows what the alignment does in a run.

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
    # YOUR CODE HERE
    raise NotImplementedError()


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


# %% [markdown]
# ## 2. The clipped loss of each token (5 points)
#
# `logprobs` are the log-probabilities of the sampled tokens under the policy that is being trained, `old_logprobs`
# those under the policy that sampled them. Their ratio $r_t = \pi(a_t) / \pi_{old}(a_t)$ is computed from the
# difference of the logs. The objective to *maximise* is
#
# $$\min\left(r_t A,\ \mathrm{clip}(r_t,\ 1 - c_{low},\ 1 + c_{high})\, A\right)$$
#
# (eq. 14 to 17), the same formula for positive and negative advantages; the loss is its negative. The bounds differ:
# 0.2 below 1 and 0.28 above it. Only `logprobs` carry a gradient: it flows where the clip does not cut.


# %% task token_loss
def token_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> torch.Tensor:
    """The clipped loss of every token, not averaged yet.

    logprobs, old_logprobs: [B, T].   advantages: [B], one for each row.
    Returns [B, T]; the gradient reaches logprobs only.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% example
token_loss(torch.tensor([[0.5, 1.0, 2.0]]).log(), torch.zeros(1, 3), torch.tensor([1.0]))


# %% test token_loss 3
def test_token_loss():
    old = torch.tensor([[0.5, 0.4], [0.3, 0.8]]).log()

    def loss(ratio, advantage, **clips):
        """The loss of one token whose ratio is ``ratio``."""
        new = old + math.log(ratio)
        return token_loss(new, old.clone(), torch.full((2,), advantage), **clips)[1, 0].item()

    assert token_loss(old.clone(), old.clone(), torch.ones(2)).shape == (2, 2), (
        "one number for each token: shape [B, T]"
    )
    likely = {
        "a loss is minimised: the sign is reversed": 1.65,
        "the loss is 0 whatever happens": 0.0,
        "the ratio is new / old: here it is upside down": -1.5 / 1.1,
        "the ratio is exp(new - old): a difference of logs is not a ratio yet": -1.5 * math.log(1.1),
    }
    same(loss(1.1, 1.5), -1.65, "inside the clip's bounds the loss is -ratio * advantage", likely)
    got = token_loss(old.clone(), old.clone(), torch.tensor([1.0, -2.0]))
    rows = {"one advantage for each row, not for each column": [[-1.0, 2.0], [-1.0, 2.0]]}
    same(got, [[-1, -1], [2, 2]], "at ratio 1 every token of a row has the loss -advantage of its row", rows)

    not_clipped = (
        "not clipped: at advantage 1 a ratio of 2 earns no more than one of 1.28 (the min of both, not the max)"
    )
    swapped = "clip_low and clip_high are swapped: 1 - clip_low is the lower bound, 1 + clip_high the upper"
    same(loss(2.0, 1.0), -1.28, "wrong at ratio 2, advantage 1", {not_clipped: -2.0, swapped: -1.2})
    only = "the smaller of both counts, not the clipped one alone; at advantage 1 a ratio of 0.5 is not clipped"
    same(loss(0.5, 1.0), -0.5, "wrong at ratio 0.5, advantage 1", {only: -0.8})
    inverted = "the clip is inverted for negative advantages: at advantage -1 a ratio of 2 is not clipped"
    same(loss(2.0, -1.0), 2.0, "wrong at ratio 2, advantage -1", {inverted: 1.28})
    hint = "at advantage -1 a ratio of 0.5 is clipped to 1 - clip_low"
    same(loss(0.5, -1.0), 0.8, "wrong at ratio 0.5, advantage -1", {swapped: 0.72, hint: 0.5})


# %% test token_loss__gradient 2
def test_token_loss__gradient():
    def gradient(ratio, advantage):
        new = torch.tensor([[math.log(ratio)]], requires_grad=True)
        old = torch.zeros(1, 1, requires_grad=True)
        loss = token_loss(new, old, torch.tensor([advantage]))
        assert loss.requires_grad, "no gradient reaches logprobs: is something detached, or made into a new tensor?"
        loss.sum().backward()
        assert old.grad is None or old.grad.item() == 0, "old_logprobs are constants: no gradient may reach them"
        return 0.0 if new.grad is None else new.grad.item()

    # the derivative of -ratio * A with respect to the log-prob is -ratio * A again
    none = {"no gradient reaches logprobs": 0.0}
    same(gradient(1.0, 1.5), -1.5, "at ratio 1 the gradient is -advantage", none)
    same(gradient(0.5, 1.0), -0.5, "a ratio of 0.5 at advantage 1 is not cut: its gradient is -ratio * advantage", none)
    same(gradient(2.0, -1.0), 2.0, "a ratio of 2 at advantage -1 is not cut: its gradient is -ratio * advantage", none)
    same(gradient(2.0, 1.0), 0.0, "a ratio of 2 at advantage 1 is cut: no gradient")
    same(gradient(0.5, -1.0), 0.0, "a ratio of 0.5 at advantage -1 is cut: no gradient")


# %% [markdown]
# ## 3. From tokens to one number (4 points)
#
# A row holds a whole conversation: the prompt, what tools returned, padding, and what the agent sampled. Only the
# sampled tokens count; `mask` is 1 there. There are two common averages:
#
# - `"token"`: the mean over all sampled tokens of the batch; a long row weighs more than a short one;
# - `"sequence"`: the mean over the sampled tokens of each row, then the mean over the rows that have any.
#
# Whatever stands where the mask is 0 must change nothing, not even when it is NaN (NaN times 0 is NaN). When nothing
# was sampled at all, the answer is 0.


# %% task masked_mean
def masked_mean(values: torch.Tensor, mask: torch.Tensor, average: str = "token") -> torch.Tensor:
    """The mean of the values where the mask is 1.

    values: [B, T], anything where mask is 0.   mask: [B, T] of 0 and 1.   average: "token" or "sequence".
    Returns a scalar tensor; 0 when the mask is 0 everywhere.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% test masked_mean 2
def test_masked_mean():
    values = torch.tensor([[8.0, 1.0, 2.0, 3.0], [8.0, 6.0, 8.0, 8.0]])
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0]])
    likely = {
        "positions where the mask is 0 are counted in the mean": 5.5,
        "positions where the mask is 0 are counted in the denominator": 1.5,
        "this is the average 'sequence': 'token' is the mean over all sampled tokens": 4.0,
        "this divides by the number of rows: 'token' divides by the number of sampled tokens": 6.0,
        "this is the sum: divide by the number of sampled tokens": 12.0,
    }
    same(masked_mean(values, mask), 3.0, "wrong mean over the sampled tokens 1, 2, 3 and 6", likely)
    likely = {"both averages give the mean over the tokens": 3.0}
    same(masked_mean(values, mask, "sequence"), 4.0, "wrong: the rows' means are 2 and 6", likely)


# %% test masked_mean__nothing 2
def test_masked_mean__nothing():
    nan = float("nan")
    for average in ("token", "sequence"):
        values = torch.tensor([[nan, 1.0, 3.0], [5.0, 5.0, nan], [nan, 4.0, nan]])
        mask = torch.tensor([[0, 1, 1], [0, 0, 0], [0, 1, 0]])
        expected = {"token": 8 / 3, "sequence": 3.0}[average]
        likely = {
            "NaN where the mask is 0 must change nothing: NaN * 0 is NaN, torch.where is not": nan,
            "a row without a sampled token counts in the denominator: it must not": 2.0,
        }
        got = masked_mean(values, mask, average)
        if got.isnan():
            raise AssertionError("NaN where the mask is 0 must change nothing: NaN * 0 is NaN, torch.where is not")
        same(got, expected, f"wrong with a row that is masked as a whole, average {average!r}", likely)
        values = torch.ones(2, 3, requires_grad=True)
        got = masked_mean(values, torch.zeros(2, 3), average)
        assert not got.isnan(), "NaN when everything is masked: 0 / 0; the answer is 0"
        same(got, 0.0, "when everything is masked the answer is 0")
        got.backward()
        same(values.grad, torch.zeros(2, 3), "when everything is masked the gradient is 0")


# %% [markdown]
# ## 4. Micro-batches (2 points)
#
# A batch that does not fit into memory is cut into micro-batches; `backward()` is called on the loss of each, and the
# gradients add up. The result must not depend on the cut. So each micro-batch's loss is the sum over its tokens divided
# by the number of sampled tokens *of the whole batch*; then the losses add up to the batch's loss.


# %% task micro_batch_losses
def micro_batch_losses(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """The losses of the micro-batches, to call backward() on one after the other; their sum is the batch's loss.

    parts: for each micro-batch the token losses [b, t] and the mask [b, t]; b and t may differ from part to part.
    Returns one scalar tensor for each part. The sum is the mean over all sampled tokens; 0 when there are none.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% test micro_batch_losses 2
def test_micro_batch_losses():
    long = (torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]))
    short = (torch.tensor([[5.0, 7.0]]), torch.tensor([[1, 0]]))
    empty = (torch.tensor([[3.0]]), torch.tensor([[0]]))
    got = micro_batch_losses([long, short])
    assert isinstance(got, list) and len(got) == 2, "one loss for each micro-batch, in a list"
    likely = {
        "the micro-batches' means are averaged: a short one then weighs as much as a long one": 3.0,
        "the micro-batches' means are summed: divide by the tokens of the whole batch": 6.0,
        "the micro-batches' means are weighted by their rows, not by their sampled tokens": 7 / 3,
        "positions where the mask is 0 are counted in the denominator": 1.2,
    }
    same(sum(got), 1.5, "the losses must add up to the mean over all sampled tokens: seven of 1 and one of 5", likely)
    assert not any(loss.isnan() for loss in micro_batch_losses([long, empty])), "NaN for a part with nothing sampled"
    same(sum(micro_batch_losses([long, empty])), 1.0, "a part with nothing sampled changes nothing")
    same(sum(micro_batch_losses([empty, empty])), 0.0, "nothing sampled at all: the losses are 0")


# %% [markdown]
# ## 5. A KL estimate (2 points)
#
# To keep a policy $\pi$ near a reference $\pi_{ref}$ add $KL(\pi \| \pi_{ref})$, estimated from tokens that $\pi$
# sampled. With $d = \log \pi_{ref} - \log \pi$ the estimate k3 is
#
# $$k_3 = e^{d} - d - 1$$
#
# It is never negative, and its mean over samples of $\pi$ is the KL exactly. The check below computes that mean over
# all tokens of a small vocabulary. M-GRPO itself uses no KL.


# %% task kl_k3
def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of each token, in nats.

    logprobs: [B, T] under the policy; the gradient reaches these only.   ref_logprobs: [B, T] under the reference.
    Returns [B, T].
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% test kl_k3 2
def test_kl_k3():
    def expectation(logits, ref_logits):
        """The mean of the estimate over tokens drawn from the policy, and both KLs, by counting all tokens."""
        logp, ref = torch.log_softmax(logits, -1), torch.log_softmax(ref_logits, -1)
        mean = (logp.exp() * kl_k3(logp, ref)).sum().item()
        return mean, (logp.exp() * (logp - ref)).sum().item(), (ref.exp() * (ref - logp)).sum().item()

    got = kl_k3(torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.5]]).log())
    assert got.shape == (1, 2), "one estimate for each token: shape [B, T]"
    likely = {
        "the sign of d is reversed: d = ref_logprobs - logprobs": [[0.306853, 0.193147]],
        "this is k1, the plain difference: it can be negative": [[0.693147, -0.693147]],
        "this is k2, half the squared difference: its mean is not the KL": [[0.240227, 0.240227]],
        "the sign is reversed: a KL is not negative": [[-0.193147, -0.306853]],
        "the estimate is 0 everywhere": [[0.0, 0.0]],
    }
    same(got, [[0.193147, 0.306853]], "wrong for the probabilities 1/2 against 1/4 and 1/4 against 1/2", likely)
    mean, kl, backwards = expectation(torch.tensor([[0.0, 1.0, 2.0, -1.0]]), torch.tensor([[1.0, 0.5, -1.0, 0.0]]))
    same(mean, kl, "its mean over the policy's tokens is not KL(policy || ref)", {"KL(ref || policy)": backwards})


# %% [markdown]
# ## 6. How much is clipped? (2 points)
#
# While training, watch the share of tokens whose gradient the clip cuts: where $A > 0$ and $r > 1 + c_{high}$, or
# $A < 0$ and $r < 1 - c_{low}$. On the first pass over fresh samples it is 0; when it is large the steps are too large.


# %% task clip_fraction
def clip_fraction(
    ratios: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> float:
    """The share of the sampled tokens whose gradient is cut by the clip.

    ratios: [B, T].   advantages: [B].   mask: [B, T], 1 where the agent sampled the token.
    Returns a number between 0 and 1; 0 when nothing was sampled.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% test clip_fraction 2
def test_clip_fraction():
    ratios = torch.tensor([[0.5, 1.0, 1.25, 2.0], [0.5, 0.75, 2.0, 0.1], [3.0, 0.1, 1.0, 1.0]])
    advantages = torch.tensor([1.0, -1.0, 0.0])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [0, 1, 1, 1]])
    likely = {
        "masked tokens are counted": 4 / 12,
        "the clip is one-sided: what it cuts depends on the sign of the advantage": 6 / 10,
        "inverted for negative advantages: there it cuts ratios below 1 - clip_low": 2 / 10,
        "an advantage of 0 has no gradient that could be cut": 4 / 10,
    }
    got = clip_fraction(ratios, advantages, mask)
    same(got, 3 / 10, "wrong: the clip cuts 2.0 at advantage 1, and 0.5 and 0.75 at advantage -1", likely)
    swapped = "the upper bound is 1 + clip_high, the lower 1 - clip_low: they are swapped"
    got = clip_fraction(torch.tensor([[1.25, 1.0]]), torch.tensor([1.0]), torch.ones(1, 2))
    same(got, 0.0, "a ratio of 1.25 is inside the bounds", {swapped: 0.5})
    got = clip_fraction(torch.tensor([[1.5]]), torch.tensor([1.0]), torch.zeros(1, 1))
    same(got, 0.0, "nothing sampled: 0, not NaN")


# %% [markdown]
# ## What comes next
#
# Together these six are `minimgrpo.grpo`: `group_advantages`, `policy_loss`, `kl_k3`, `policy_stats`. The library's
# versions take weights as well, because an executor's trajectory may count several times. That is assignment 3.

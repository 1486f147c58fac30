# %% [markdown]
# # Assignment 2. The sampler's exact tokens and masks
#
# The policy gradient needs three things about every token of a conversation: its id, whether the agent sampled it, and
# the log-probability it was sampled with. Most re-implementations get one of them slightly wrong, and training then
# still runs: it only learns less, or something else. You write six places where that happens. 20 points.
#
# Tokens are small whole numbers here, and a "model" is a table of logits. As in real vocabularies, one id does two
# jobs: **token 2 ends every message and is also used for padding**, so nothing can be told from a token's value alone.
#
# **How it works.** Fill in the places marked `YOUR CODE HERE`. Below each function is its check: run it as often as
# you like. Grading runs the same checks with more numbers. A function is checked by itself, so a mistake early on costs
# nothing later.
#
# **Shapes.** `T` tokens of a conversation, `V` tokens in the vocabulary, `B` rows of a batch.

# %% setup
import math
import random

import torch

from minimgrpo.checks import same

# %% [markdown]
# ## 1. Draw a token (5 points)
#
# At temperature $\tau$ the next token is drawn from $p = \mathrm{softmax}(\mathrm{logits} / \tau)$. You get the random
# number `u` from outside, uniform in $[0, 1)$, and take the first token at which the running sum
# $p_0 + p_1 + \dots$ is larger than `u`. So a run can be repeated, and a row's token does not depend on its neighbours.
# (Rounding can leave the last running sum slightly below 1, and `u` above it: then it is the last token.)
#
# Return the token *and its log-probability under the distribution it was drawn from*: that is $\pi_{old}$ in the
# importance ratio of M-GRPO (arXiv 2511.13288, eq. 15 and 17). A temperature of 0 or less has no such distribution;
# refuse it.


# %% task draw
def draw(logits: torch.Tensor, temperature: float, u: float) -> tuple[int, float]:
    """Draw one token from softmax(logits / temperature).

    logits: [V].   u: uniform in [0, 1).
    Returns the token's id and its log-probability (nats) under exactly that distribution.
    Raises ValueError: temperature <= 0.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% example
draw(torch.tensor([0.1, 0.2, 0.3, 0.4]).log(), temperature=1.0, u=0.5)


# %% test draw 2
def test_draw():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    answer = draw(logits.clone(), 1.0, 0.5)
    assert isinstance(answer, tuple) and len(answer) == 2, "return two things: the token and its log-probability"

    def tokens(temperature):
        return [int(draw(logits.clone(), temperature, u)[0]) for u in (0.05, 0.15, 0.45, 0.7)]

    likely = {
        "always the most likely token: that is not sampling": [3, 3, 3, 3],
        "the running sum must be larger than u: this is the token before": [0, 0, 1, 2],
    }
    assert tokens(1.0) == tokens(1.0), "the same u must give the same token: use u, no random numbers of your own"
    same(tokens(1.0), [0, 1, 2, 3], "wrong tokens for u = 0.05, 0.15, 0.45, 0.7 at temperature 1", likely)
    likely = {
        "the temperature is missing from the distribution that the token is drawn from": [0, 1, 2, 3],
        "divide the logits by the temperature: a low one makes likely tokens more likely": [0, 0, 2, 3],
    }
    same(tokens(0.5), [1, 1, 2, 3], "wrong tokens at temperature 0.5", likely)
    last = torch.zeros(7)
    ids = {int(draw(last, 1.0, 1 - 2**-53)[0]), int(draw(torch.tensor([0.3, -0.2, 0.9]), 1.3, 1 - 2**-53)[0] + 4)}
    assert ids == {6}, "with u close to 1 it is the last token, even when rounding leaves the running sum below u"


# %% test draw__logprob 3
def test_draw__logprob():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log() + 1.5

    def logprob(temperature, u):
        return float(draw(logits.clone(), temperature, u)[1])

    likely = {
        "this is the probability: return its log": 0.2,
        "this is the logit: a log-probability is the logit minus the log of the sum over all tokens": math.log(0.2)
        + 1.5,
        "this is the log-probability of the most likely token, not of the one drawn": math.log(0.4),
        "the sign is reversed: a log-probability is negative": -math.log(0.2),
        "the log-probability is 0 whatever is drawn": 0.0,
    }
    same(logprob(1.0, 0.15), math.log(0.2), "wrong log-probability of token 1 at temperature 1", likely)
    missing = "the temperature is missing from the log-probability: it is the one of the distribution drawn from"
    same(logprob(0.5, 0.15), math.log(0.04 / 0.3), "wrong at temperature 0.5", {missing: math.log(0.2)})
    for temperature in (0.0, -1.0):
        try:
            draw(logits.clone(), temperature, 0.5)
        except ValueError:
            continue
        except ZeroDivisionError:
            pass
        raise AssertionError(f"temperature {temperature:g} must be refused with a ValueError")


# %% [markdown]
# ## 2. Sample a message (3 points)
#
# A message is drawn token by token until a *stop token* is drawn or the limit is reached. The stop token is part of the
# message: the agent chose to stop there, and that choice is trained like any other. A message that was cut off by the
# limit has no stop token.


# %% task sample_message
def sample_message(draw_next, stop_ids: set[int], max_new_tokens: int) -> tuple[list[int], list[float], int | None]:
    """Draw tokens until one of them is a stop token, at most max_new_tokens of them.

    draw_next: a function; draw_next(ids) gets the list of all ids drawn so far in this message (at first an empty list)
        and returns the next token and its log-probability.
    Returns ids, logprobs (of equal length, the stop token included), and the stop token that ended the message, or None
    when it was cut off.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% test sample_message 3
def test_sample_message():
    def scripted(script):
        """Draws the tokens of ``script`` one after the other, the n-th with log-probability -n / 4."""

        def draw_next(ids):
            assert list(ids) == script[: len(ids)], f"draw_next must get all ids drawn so far, it got {ids}"
            assert len(ids) < len(script), "a token was drawn after the message had ended"
            return script[len(ids)], -(len(ids) + 1) / 4

        return draw_next

    ids, logprobs, stopped_by = sample_message(scripted([7, 5, 2]), {2, 9}, 10)
    assert ids != [7, 5], "the stop token is missing: it is sampled and trained like any other"
    assert ids == [7, 5, 2], f"expected the ids [7, 5, 2], got {ids}"
    assert len(logprobs) == len(ids), "one log-probability for each id, the stop token's included"
    same(logprobs, [-0.25, -0.5, -0.75], "wrong log-probabilities")
    assert stopped_by == 2, f"the message was ended by token 2, not by {stopped_by}"
    ids, logprobs, stopped_by = sample_message(scripted([9, 7, 5]), {2, 9}, 10)
    assert (ids, stopped_by) == ([9], 9), "there may be several stop tokens: 9 ends the message, too"
    ids, logprobs, stopped_by = sample_message(scripted([7, 5, 6, 4]), {2, 9}, 3)
    assert ids == [7, 5, 6], f"at most max_new_tokens = 3 tokens, and all of them: expected [7, 5, 6], got {ids}"
    assert stopped_by is None, "a message that was cut off has no stop token: return None"
    ids, logprobs, stopped_by = sample_message(scripted([7, 5, 2]), {2, 9}, 3)
    assert stopped_by == 2, "the last token that the limit allows may be a stop token: then the message was not cut off"


# %% [markdown]
# ## 3. One conversation, three lists (4 points)
#
# A conversation is a list of turns. The agent *read* some of them (the prompt, with its examples; what tools returned)
# and *wrote* the others. Training reads three flat lists of the same length:
#
# - `token_ids`: everything, in order, never decoded and tokenised again;
# - `mask`: 1 where the agent sampled the token, its stop tokens included, else 0. Who wrote a token is known from the
#   turn and never guessed from its value;
# - `logprobs`: the sampled ones, and 0.0 where the mask is 0.


# %% task flatten
def flatten(turns: list[tuple[str, list[int], list[float]]]) -> tuple[list[int], list[int], list[float]]:
    """The flat lists of a conversation.

    turns: (kind, ids, logprobs) each; kind is "read", then logprobs is empty, or "wrote", then it is as long as ids.
    Returns token_ids, mask, logprobs, all of length T.
    Raises ValueError: a turn that was written and has not one log-probability for each id.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% example
flatten([("read", [5, 2, 6], []), ("wrote", [8, 2], [-0.5, -0.25])])


# %% test flatten 4
def test_flatten():
    prompt, output = ("read", [5, 7, 2, 6], []), ("read", [4, 2, 6], [])
    turns = [prompt, ("wrote", [8, 9, 2], [-0.5, -1.0, -0.25]), output, ("wrote", [7, 2], [-0.75, -0.125])]
    token_ids, mask, logprobs = flatten(turns)
    assert list(token_ids) != [5, 7, 2, 6, 8, 9, 4, 2, 6, 7], "the stop tokens are missing from token_ids"
    same(token_ids, [5, 7, 2, 6, 8, 9, 2, 4, 2, 6, 7, 2], "token_ids must hold every token, in order")
    assert len(mask) == len(token_ids), "mask must be as long as token_ids"
    assert len(logprobs) == len(token_ids), "logprobs must be as long as token_ids: 0.0 where the agent did not sample"
    likely = {
        "prompt and tool output are in the mask: the agent did not sample them": [1] * 12,
        "the first prompt is left out of the mask, but tool output is in it": [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1],
        "the mask is upside down: 1 is for what the agent sampled": [1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0],
        "the stop tokens are missing from the mask: the agent sampled them": [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0],
        "the mask is shifted by one: mask[t] is about token t": [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0],
        "the mask is shifted by one, to the right": [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1],
        "only the last message is in the mask: the agent sampled the earlier ones, too": [0] * 10 + [1, 1],
        "the mask is all 0": [0] * 12,
    }
    same(mask, [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1], "wrong mask", likely)
    same(logprobs, [0, 0, 0, 0, -0.5, -1, -0.25, 0, 0, 0, -0.75, -0.125], "wrong log-probabilities")
    ended = [("read", [2, 2, 5, 2], []), ("wrote", [2], [-0.5])]
    same(
        flatten(ended)[1], [0, 0, 0, 0, 1], "the mask is guessed from token values: a prompt may contain the stop token"
    )
    try:
        flatten([("wrote", [8, 9, 2], [-0.5, -1.0])])
    except ValueError:
        pass
    else:
        raise AssertionError("3 ids and 2 log-probabilities must be refused with a ValueError")


# %% [markdown]
# ## 4. Score the sampled tokens again (4 points)
#
# For the gradient the log-probabilities are computed once more, with the current policy: one forward pass over the
# whole conversation gives logits at every position, and **the logits at position t are about token t + 1**. Before the
# first update the result must equal the sampled log-probabilities: same temperature, same tokens.


# %% task score
def score(logits: torch.Tensor, token_ids: torch.Tensor, mask: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """The log-probability of each sampled token, with a gradient.

    logits: [T, V], row t after reading token_ids[0] to token_ids[t].   token_ids: [T].
    mask: [T], 1 where the agent sampled the token; mask[0] is always 0.
    Returns [T]: at t the log-probability of token_ids[t]; 0 where the mask is 0.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% test score 3
def test_score():
    table = [[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.15, 0.35, 0.25], [0.7, 0.1, 0.1, 0.1]]
    logits = torch.tensor(table).log() + torch.tensor([[1.0], [-1.0], [0.5], [2.0]])
    token_ids, mask = torch.tensor([3, 1, 2, 0]), torch.tensor([0, 1, 0, 1])

    def logs(*probabilities):
        return [math.log(p) if p else 0.0 for p in probabilities]

    got = score(logits.clone(), token_ids, mask)
    assert got.shape == (4,), f"one number for each token: shape [4], not {list(got.shape)}"
    likely = {
        "not shifted: the logits at position t are about token t + 1": logs(0, 0.3, 0, 0.7),
        "shifted the wrong way: the logits at position t are about token t + 1": logs(0, 0.15, 0, 0.1),
        "where the mask is 0 the result must be 0": logs(0, 0.2, 0.2, 0.25),
        "this is the probability: return its log": [0.0, 0.2, 0.0, 0.25],
        "the softmax must be over the vocabulary, not over the tokens": [0.0, -1.1042768, 0.0, -2.6786369],
        "these are the most likely tokens, not those that were sampled": logs(0, 0.4, 0, 0.35),
        "these are logits, not normalised over the vocabulary": [0.0, math.log(0.2) + 1, 0.0, math.log(0.25) + 0.5],
        "the result is 0 everywhere": [0.0] * 4,
    }
    same(got, logs(0, 0.2, 0, 0.25), "wrong log-probabilities at temperature 1", likely)
    squares = [sum(p**2 for p in row) for row in table]
    missing = "the temperature is missing: the tokens were sampled from softmax(logits / temperature)"
    expected = logs(0, 0.2**2 / squares[0], 0, 0.25**2 / squares[2])
    got = score(logits.clone(), token_ids, mask, temperature=0.5)
    same(got, expected, "wrong log-probabilities at temperature 0.5", {missing: logs(0, 0.2, 0, 0.25)})


# %% test score__gradient 1
def test_score__gradient():
    logits = torch.zeros(4, 2, requires_grad=True)
    got = score(logits, torch.tensor([1, 1, 0, 1]), torch.tensor([0, 1, 0, 1]))
    assert got.requires_grad, "no gradient reaches the logits: is something detached, or made into a new tensor?"
    got.sum().backward()
    expected = [[-0.5, 0.5], [0, 0], [-0.5, 0.5], [0, 0]]
    same(logits.grad, expected, "the gradient must reach the logits before each sampled token, and no others")


# %% [markdown]
# ## 5. A batch of conversations (2 points)
#
# Rows of different lengths are padded **on the right** to the longest: a causal model cannot see what comes later. The
# attention mask says which positions hold real tokens. Padding is known from the lengths; a token that happens to have
# the pad's id is as real as any other (here the pad is token 2, which also ends messages).


# %% task pad
def pad(rows: list[tuple[list[int], list[int]]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put conversations into one batch.

    rows: (token_ids, mask) of each conversation, the two of equal length.
    Returns ids, mask and attention, all [B, T] and whole numbers: T is the longest length; padding has pad_id in ids
    and 0 in the two others; attention is 1 at real tokens.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% test pad 2
def test_pad():
    rows = [([5, 8, 2], [0, 1, 1]), ([5, 2, 6, 2, 2], [0, 0, 0, 1, 1])]
    ids, mask, attention = pad(rows, pad_id=2)
    assert ids.shape == (2, 5), f"two rows, padded to the longest: shape [2, 5], not {list(ids.shape)}"
    likely = {"padded on the left: causal models want it on the right": [[2, 2, 5, 8, 2], [5, 2, 6, 2, 2]]}
    same(ids, [[5, 8, 2, 2, 2], [5, 2, 6, 2, 2]], "wrong ids", likely)
    likely = {
        "the mask is guessed from the pad's id: a sampled stop token is in it": [[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]],
        "padding is in the mask: nobody sampled it": [[0, 1, 1, 1, 1], [0, 0, 0, 1, 1]],
    }
    same(mask, [[0, 1, 1, 0, 0], [0, 0, 0, 1, 1]], "wrong mask", likely)
    likely = {
        "attention is guessed from the pad's id: real tokens have it, too": [[1, 1, 0, 0, 0], [1, 0, 1, 0, 0]],
        "attention covers the padding": [[1] * 5, [1] * 5],
        "attention is about all real tokens, read or sampled; this is the mask": [[0, 1, 1, 0, 0], [0, 0, 0, 1, 1]],
    }
    same(attention, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], "wrong attention", likely)


# %% [markdown]
# ## 6. The context only grows (2 points)
#
# When a tool has answered, the conversation is rendered again by the model's chat template, and what is new goes to the
# sampler. That is only correct if the template left everything before it as it was. Some templates do not: they drop
# the agent's earlier thoughts, or trim a space. Then the tokens in the log are no longer what the model reads, and the
# log-probabilities are wrong. Such a case must be an error, never a slice.


# %% task new_tokens
def new_tokens(known: list[int], rendered: list[int]) -> list[int]:
    """The tokens that a conversation has grown by.

    known: all ids so far.   rendered: the ids of the whole conversation, rendered again with one more turn.
    Returns the ids after the known ones, perhaps none.
    Raises ValueError: rendered does not begin with exactly the known ids.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% test new_tokens 2
def test_new_tokens():
    known = [5, 7, 2, 8, 9, 2]
    got = new_tokens(list(known), [*known, 4, 2, 6])
    likely = {
        "this is the whole conversation: return only what is new": [*known, 4, 2, 6],
        "each new token counts, also one whose id occurred before": [4, 6],
        "one token too few at the start": [2, 6],
        "one token too many at the start": [2, 4, 2, 6],
    }
    same(got, [4, 2, 6], "wrong new tokens", likely)
    assert list(new_tokens(list(known), list(known))) == [], "nothing new: an empty list"
    rewritten = {
        "an earlier token was changed": [5, 7, 2, 8, 1, 2, 4, 2],
        "an earlier message was dropped": [5, 7, 2, 4, 2, 6, 3, 3],
        "an earlier token was inserted": [5, 7, 2, 8, 8, 9, 2, 4, 2],
        "the first token was changed": [1, 7, 2, 8, 9, 2, 4],
        "the last known token was changed": [5, 7, 2, 8, 9, 3, 4],
        "the conversation became shorter": [5, 7, 2, 8],
        "earlier tokens swapped places": [7, 5, 2, 8, 9, 2, 4],
    }
    for what, rendered in rewritten.items():
        try:
            got = new_tokens(list(known), rendered)
        except ValueError:
            continue
        raise AssertionError(f"{what}, which must be a ValueError and never a slice; it returned {got}")


# %% [markdown]
# ## What comes next
#
# In the library these are `minimgrpo.sampler` (a batch of conversations with a cache), `minimgrpo.trajectory` (the
# three lists) and `Policy.score`; `minimgrpo.chat` refuses templates that rewrite the past. Its tests check that
# sampled and rescored log-probabilities agree at several temperatures.

"""The maths of M-GRPO: group advantages, the clipped objective, and a KL estimate. No models, no files.

A question gets a group of rollouts. A rollout's advantage is how far its reward lies above the mean of its own group,
in standard deviations. The loss then raises the log-probs of rollouts above the mean and lowers the others, and clips
the importance ratio (new / old probability) so that one batch cannot move the policy far.

Choices against the paper (arXiv 2511.13288) and its public code:

    what                   paper                               public code      ours
    advantage (9, 10)      population std, no epsilon          sample std+1e-6  the paper's; a flat group gets exactly 0
    executor adv. (12, 13) all aligned rows of a question      8 queued items   the paper's; a duplicate is a weight
    ratio (15, 17)         product over the trajectory         per token        "token"; "sequence" is the paper's
    clip                   symmetric, size not given           0.2 / 0.28       0.2 / 0.28
    averaging (14)         token sum                           mean per row     "token"; "sequence", "constant"
    KL                     none                                coefficient 0    kl_k3, for those who want one

Shapes: N rollouts of one group, B rows of one batch, T tokens (prompt and padding included, wherever mask is 0).
Rows carry weights, the copies made by `alignment.align`: a row of weight c counts exactly as c equal rows would.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

RATIOS = ("token", "sequence", "sequence_mean")
AVERAGES = ("token", "sequence", "constant")
MAX_LOG_RATIO = 60.0  # exp(60) = 1e26: far outside any clip, yet finite, so that a cut gradient is 0 and not 0 * inf


def group_advantages(
    rewards: Sequence | Tensor, weights: Sequence | Tensor | None = None, scale: bool = True
) -> Tensor:
    """Z-scores of the rewards inside each group (eq. 9-10; with the aligned copies as weights, eq. 12-13).

    rewards: [N], or [..., N] where each row of the last dimension is one group.
    weights: copies, same shape as rewards. A row of weight 0 (dropped by the alignment) is left out of the mean and
        the std and gets advantage 0. None: every row counts once.
    scale: False only subtracts the mean (Dr. GRPO).
    Returns float32 of the same shape.

    Rewards are read as float32, so 0.1 + 0.2 and 0.3 are the same reward. A group whose rewards are all the same, a
    group of one, and a group whose weights are all 0 get exactly 0: no epsilon, never NaN.
    Raises ValueError: empty group, NaN or infinite reward (even at weight 0), negative weight, shapes that differ.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0]).tolist()
    [1.0, -1.0, -1.0, 1.0]
    >>> group_advantages([0.0, 4.0], weights=[3, 1], scale=False).tolist()  # the mean of 0, 0, 0, 4 is 1
    [-1.0, 3.0]
    >>> group_advantages([[0.35, 0.35, 0.35], [0.0, 0.0, 3.0]], scale=False).tolist()  # each row is its own group
    [[0.0, 0.0, 0.0], [-1.0, -1.0, 2.0]]
    """
    rewards = torch.as_tensor(rewards, dtype=torch.float32).detach()
    if rewards.ndim == 0 or rewards.shape[-1] == 0:
        raise ValueError("a group needs at least one reward: pass rewards of shape [N] or [..., N] with N >= 1")
    if not rewards.isfinite().all():
        raise ValueError("rewards must be finite numbers: look for the bug in the reward function")
    weights = _copies(weights, rewards.shape, rewards.device)

    counted = weights > 0
    highest = rewards.masked_fill(~counted, -torch.inf).amax(dim=-1, keepdim=True)
    lowest = rewards.masked_fill(~counted, torch.inf).amin(dim=-1, keepdim=True)
    flat = highest <= lowest  # all the same, or a single row; with no row at all, -inf <= inf

    rewards, weights = rewards.double(), weights.double()
    total = weights.sum(dim=-1, keepdim=True).masked_fill(flat, 1.0)
    centred = rewards - (weights * rewards).sum(dim=-1, keepdim=True) / total
    std = ((weights * centred**2).sum(dim=-1, keepdim=True) / total).sqrt().masked_fill(flat, 1.0)
    advantages = centred / std if scale else centred
    return advantages.masked_fill(flat | ~counted, 0.0).float()


def loss_normalizer(mask: Tensor, weights: Sequence | Tensor | None = None, average: str = "token") -> float:
    """The denominator of `policy_loss` for these rows; computed on a whole batch, it is shared by the micro-batches.

    mask: [B, T], 1 where the agent sampled the token. weights: [B] copies. Rows that are fully masked or of weight 0
    do not count. Returns the weighted number of
        "token": tokens;   "sequence": rows;   "constant": rows, times T.
    Raises ValueError: unknown average, negative weight, shapes that differ.

    >>> mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    >>> [loss_normalizer(mask, [2, 1, 5], average) for average in AVERAGES]
    [7.0, 3.0, 12.0]
    """
    _check_name("average", average, AVERAGES)
    live, weights = _live_tokens(mask, weights)
    if average == "token":
        return float((live.sum(dim=1) * weights).sum())
    rows = float((live.any(dim=1) * weights).sum())
    return rows if average == "sequence" else rows * mask.shape[1]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Sequence | Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    ratio: str = "token",
    average: str = "token",
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """The clipped objective as a loss to minimise: -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) (eq. 14-17).

    logprobs, old_logprobs: [B, T] log-prob of each token now, and when it was sampled. Only logprobs get a gradient.
    advantages: [B], one per row.   mask: [B, T], 1 where the agent sampled the token.   weights: [B] copies.
    ratio: what r is.
        "token": each token has its own.
        "sequence": one per row, the product over the row's tokens (the paper's).
        "sequence_mean": one per row, the geometric mean over the row's tokens (GSPO; its clips are about 3e-4).
        A row's ratio stands at each of its tokens; the averaging is then the same for all three.
    average: how the tokens become one number.
        "token": mean over all tokens of the batch, so a long row weighs more.
        "sequence": mean over the tokens of a row, then over the rows, so every row weighs the same.
        "constant": sum over the tokens, divided by (rows * T): a token weighs the same in every batch, whatever the
            lengths of the others (Dr. GRPO).
    normalizer: `loss_normalizer` of the whole batch when these rows are a micro-batch: the losses of the micro-batches
        then add up to the loss of the batch, and so do the gradients, even when a micro-batch is padded to a shorter T.
        None: these rows are the whole batch.
    Returns a scalar. When nothing counts (all masked, all weights 0) it is 0, with zero gradients.

    Masked positions and rows of weight 0 may hold anything, even NaN, and change nothing. Ratios stop growing at
    exp(60); a ratio beyond has no gradient.
    Raises ValueError: unknown ratio or average, shapes that differ, negative weight or clip, normalizer not positive.

    >>> old = torch.zeros(1, 1)
    >>> def loss(r, advantage):
    ...     new = torch.tensor([[r]]).log()
    ...     return round(policy_loss(new, old, torch.tensor([advantage]), torch.ones(1, 1), clip_high=0.2).item(), 4)
    >>> loss(0.5, 1.0), loss(0.5, -1.0), loss(2.0, 1.0), loss(2.0, -1.0)
    (-0.5, 0.8, -1.2, 2.0)
    """
    own_normalizer = loss_normalizer(mask, weights, average)
    live, weights = _live_tokens(mask, weights)
    r, _ = _importance_ratio(logprobs, old_logprobs, live, ratio)
    low, high = _clip_bounds(clip_low, clip_high)
    A = _row_advantages(advantages, r)

    token_loss = -torch.minimum(r * A, r.clamp(low, high) * A)  # [B, T]
    row_loss = torch.where(live, token_loss, 0.0).sum(dim=1)  # [B]
    if average == "sequence":
        row_loss = row_loss / live.sum(dim=1).clamp(min=1)
    loss = (row_loss * weights).sum()

    if own_normalizer == 0:
        return loss  # nothing counts: 0, still attached to the graph so that backward() works
    normalizer = own_normalizer if normalizer is None else float(normalizer)
    if not 0 < normalizer < float("inf"):
        raise ValueError(f"normalizer must be positive, got {normalizer}: pass loss_normalizer of the whole batch")
    return loss / normalizer


@torch.no_grad()
def policy_stats(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Sequence | Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    ratio: str = "token",
) -> dict[str, float]:
    """What to watch while training. Arguments as in `policy_loss`; no gradient; means are over tokens, copies counted.

    clip_fraction  share of tokens whose gradient the clip cuts: r > 1 + clip_high at A > 0, r < 1 - clip_low at A < 0.
                   0 on the first pass over fresh samples; large: the steps are.
    approx_kl      nats per token between the old policy and this one, k3 estimate from the old policy's samples.
    approx_kl_k1   the same by the plain mean of old - new log-prob (k1): unbiased too, noisier, and it has a sign.
    ratio_mean     mean of r; near 1.
    ratio_max      largest r; far above 1 + clip_high: samples are stale, or sampling and scoring disagree.

    When nothing counts: 0, 0, 0, 1, 1.

    >>> old, new = torch.zeros(2, 2), torch.tensor([[0.5, 2.0], [0.5, 2.0]]).log()
    >>> stats = policy_stats(new, old, torch.tensor([1.0, -1.0]), torch.ones(2, 2))
    >>> {name: round(value, 4) for name, value in stats.items()}
    {'clip_fraction': 0.5, 'approx_kl': 0.25, 'approx_kl_k1': 0.0, 'ratio_mean': 1.25, 'ratio_max': 2.0}
    """
    live, weights = _live_tokens(mask, weights)
    r, log_ratio = _importance_ratio(logprobs, old_logprobs, live, ratio)
    low, high = _clip_bounds(clip_low, clip_high)
    A = _row_advantages(advantages, r)
    cut = ((A > 0) & (r > high)) | ((A < 0) & (r < low))
    if not live.any():
        return {"clip_fraction": 0.0, "approx_kl": 0.0, "approx_kl_k1": 0.0, "ratio_mean": 1.0, "ratio_max": 1.0}

    token_weights = weights[:, None].expand_as(r)[live]  # [number of live tokens]

    def mean(values: Tensor) -> float:
        return float((values[live] * token_weights).sum() / token_weights.sum())

    return {
        "clip_fraction": mean(cut),
        "approx_kl": mean(kl_k3(torch.zeros_like(log_ratio), log_ratio)),
        "approx_kl_k1": mean(-log_ratio),
        "ratio_mean": mean(r),
        "ratio_max": float(r[live].max()),
    }


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token KL estimate exp(d) - d - 1 with d = ref_logprobs - logprobs (Schulman's k3), in nats.

    [B, T], [B, T] -> [B, T]. Never negative; averaged over tokens sampled from the policy it is KL(policy || ref)
    exactly. Only logprobs get a gradient, which is 0 where both agree. There is no mask: fill the padding of both with
    the same finite number (0) and it adds nothing.
    Raises ValueError: shapes that differ.

    >>> round(kl_k3(torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()).item(), 4)  # 1/2 + log 2 - 1
    0.1931
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(f"ref_logprobs must have the shape of logprobs {_dims(logprobs)}, got {_dims(ref_logprobs)}")
    d = ref_logprobs.detach() - logprobs
    return torch.expm1(d) - d  # expm1(d) is exp(d) - 1 without the rounding error near 0


def _importance_ratio(logprobs: Tensor, old_logprobs: Tensor, live: Tensor, ratio: str) -> tuple[Tensor, Tensor]:
    """The ratio of each token and the log-ratio of each token by itself, both [B, T]; 1 and 0 where nothing is live."""
    _check_name("ratio", ratio, RATIOS)
    if not logprobs.shape == old_logprobs.shape == live.shape:
        raise ValueError(
            f"logprobs, old_logprobs and mask must have one shape [B, T], "
            f"got {_dims(logprobs)}, {_dims(old_logprobs)}, {_dims(live)}"
        )
    dtype = torch.promote_types(logprobs.dtype, torch.float32)  # bfloat16 is too coarse for a ratio
    log_ratio = logprobs.to(dtype) - old_logprobs.detach().to(dtype)
    log_ratio = torch.where(live, log_ratio, 0.0)  # before exp: garbage at padding must not reach the gradient as NaN
    combined = log_ratio
    if ratio != "token":
        combined = log_ratio.sum(dim=1, keepdim=True)  # [B, 1]: a product of ratios is a sum of logs
    if ratio == "sequence_mean":
        combined = combined / live.sum(dim=1, keepdim=True).clamp(min=1)
    return combined.clamp(max=MAX_LOG_RATIO).exp().expand_as(log_ratio), log_ratio


def _live_tokens(mask: Tensor, weights: Sequence | Tensor | None) -> tuple[Tensor, Tensor]:
    """The tokens that count, [B, T] bool (rows of weight 0 count as masked), and the weights, [B]."""
    if mask.ndim != 2:
        raise ValueError(f"mask must have shape [B, T], got {_dims(mask)}")
    weights = _copies(weights, mask.shape[:1], mask.device)
    return mask.bool() & (weights > 0)[:, None], weights


def _copies(weights: Sequence | Tensor | None, shape: torch.Size, device: torch.device) -> Tensor:
    """Weights as a checked float32 tensor of this shape; None is one copy of everything."""
    if weights is None:
        return torch.ones(shape, device=device)
    weights = torch.as_tensor(weights, dtype=torch.float32, device=device).detach()
    if weights.shape != shape:
        raise ValueError(f"weights must have one number per row, shape {list(shape)}, got {_dims(weights)}")
    if not weights.isfinite().all() or (weights < 0).any():
        raise ValueError("weights are numbers of copies: they must be finite and not negative")
    return weights


def _row_advantages(advantages: Tensor, r: Tensor) -> Tensor:
    """Advantages as [B, 1], next to ratios [B, T]."""
    advantages = torch.as_tensor(advantages, dtype=r.dtype, device=r.device).detach()
    if advantages.shape != r.shape[:1]:
        raise ValueError(f"advantages must have one number per row, shape {list(r.shape[:1])}, got {_dims(advantages)}")
    return advantages[:, None]


def _clip_bounds(clip_low: float, clip_high: float) -> tuple[float, float]:
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"clip_low and clip_high must not be negative, got {clip_low} and {clip_high}")
    return 1 - clip_low, 1 + clip_high


def _check_name(argument: str, name: str, valid: tuple[str, ...]) -> None:
    if name not in valid:
        raise ValueError(f"{argument} must be one of {', '.join(valid)}, got {name!r}")


def _dims(tensor: Tensor) -> list[int]:
    return list(tensor.shape)

"""Wrong solutions of assignment 1, each a likely one. The docstring is what the student must read."""

import torch
from tasks.assignment1 import clip_fraction, group_advantages, kl_k3, masked_mean, micro_batch_losses, token_loss


def equal(rewards):
    return rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)


def centred(rewards):
    return rewards - rewards.mean(dim=1, keepdim=True)


def zero_if_equal(rewards, advantages):
    return torch.where(equal(rewards), 0.0, advantages)


def group_advantages__statistics_over_the_batch(rewards):
    """its own group"""
    return (rewards - rewards.mean()) / rewards.std(correction=0)


def group_advantages__std_over_the_batch(rewards):
    """the std must be the one of its own group"""
    return zero_if_equal(rewards, centred(rewards) / rewards.std(correction=0))


def group_advantages__over_the_questions(rewards):
    """its own group"""
    return group_advantages(rewards.T).T


def group_advantages__sample_std(rewards):
    """not of a sample"""
    size = rewards.shape[1]
    return group_advantages(rewards) * ((size - 1) / size) ** 0.5


def group_advantages__epsilon(rewards):
    """no epsilon"""
    return zero_if_equal(rewards, centred(rewards) / (rewards.std(dim=1, keepdim=True, correction=0) + 1e-6))


def group_advantages__small_epsilon(rewards):
    """no epsilon"""
    return zero_if_equal(rewards, centred(rewards) / (rewards.std(dim=1, keepdim=True, correction=0) + 1e-8))


def group_advantages__small_spread_counts_as_none(rewards):
    """no epsilon"""
    std = rewards.std(dim=1, keepdim=True, correction=0)
    return torch.where(std < 1e-4, 0.0, centred(rewards) / std)


def group_advantages__std_compared_with_zero(rewards):
    """compare the rewards"""
    std = rewards.std(dim=1, keepdim=True, correction=0)
    return torch.where(std == 0, 0.0, centred(rewards) / std)


def group_advantages__no_guard(rewards):
    """NaN"""
    return centred(rewards) / rewards.std(dim=1, keepdim=True, correction=0)


def group_advantages__epsilon_for_equality(rewards):
    """compare the rewards"""
    return centred(rewards) / (rewards.std(dim=1, keepdim=True, correction=0) + 1e-8)


def group_advantages__only_centred(rewards):
    """only centred"""
    return centred(rewards)


def group_advantages__variance(rewards):
    """not by the variance"""
    return zero_if_equal(rewards, centred(rewards) / rewards.var(dim=1, keepdim=True, correction=0))


def group_advantages__sign_reversed(rewards):
    """the sign is reversed"""
    return -group_advantages(rewards)


def group_advantages__constant_zero(rewards):
    """all advantages are 0"""
    return torch.zeros_like(rewards)


def token_loss__constant_zero(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28):
    """the loss is 0 whatever happens"""
    return logprobs * 0


def token_loss__maximised(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28):
    """a loss is minimised"""
    return -token_loss(logprobs, old_logprobs, advantages, clip_low, clip_high)


def token_loss__ratio_upside_down(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28):
    """upside down"""
    return token_loss(-logprobs, -old_logprobs, advantages, clip_low, clip_high)


def token_loss__not_exponentiated(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28):
    """a difference of logs is not a ratio yet"""
    ratio, weight = logprobs - old_logprobs, advantages[:, None]
    return -torch.minimum(ratio * weight, ratio.clamp(1 - clip_low, 1 + clip_high) * weight)


def token_loss__clip_inverted_for_negative_advantages(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28):
    """the clip is inverted for negative advantages"""
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio, ratio.clamp(1 - clip_low, 1 + clip_high)) * advantages[:, None]


def token_loss__clipped_alone(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28):
    """not the clipped one alone"""
    return -(logprobs - old_logprobs).exp().clamp(1 - clip_low, 1 + clip_high) * advantages[:, None]


def token_loss__max_for_min(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28):
    """the min of both, not the max"""
    ratio, weight = (logprobs - old_logprobs).exp(), advantages[:, None]
    return -torch.maximum(ratio * weight, ratio.clamp(1 - clip_low, 1 + clip_high) * weight)


def token_loss__never_clipped(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28):
    """not clipped"""
    return -(logprobs - old_logprobs).exp() * advantages[:, None]


def token_loss__bounds_swapped(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28):
    """clip_low and clip_high are swapped"""
    return token_loss(logprobs, old_logprobs, advantages, clip_high, clip_low)


def token_loss__bounds_fixed(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28):
    """wrong with other clips"""
    return token_loss(logprobs, old_logprobs, advantages)


def token_loss__advantage_for_each_column(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28):
    """not for each column"""
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def token_loss__already_averaged(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28):
    """one number for each token"""
    return token_loss(logprobs, old_logprobs, advantages, clip_low, clip_high).mean()


def token_loss__detached(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28):
    """no gradient reaches logprobs"""
    return token_loss(logprobs.detach(), old_logprobs, advantages, clip_low, clip_high)


def token_loss__gradient_through_the_old(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28):
    """old_logprobs are constants"""
    ratio, weight = (logprobs - old_logprobs).exp(), advantages[:, None]
    return -torch.minimum(ratio * weight, ratio.clamp(1 - clip_low, 1 + clip_high) * weight)


def masked_mean__everything(values, mask, average="token"):
    """positions where the mask is 0 are counted in the mean"""
    return values.mean()


def masked_mean__denominator_with_padding(values, mask, average="token"):
    """positions where the mask is 0 are counted in the denominator"""
    return torch.where(mask.bool(), values, 0.0).mean()


def masked_mean__by_rows(values, mask, average="token"):
    """this divides by the number of rows"""
    return torch.where(mask.bool(), values, 0.0).sum() / len(values)


def masked_mean__always_by_sequence(values, mask, average="token"):
    """this is the average 'sequence'"""
    return masked_mean(values, mask, "sequence")


def masked_mean__always_by_token(values, mask, average="token"):
    """both averages give the mean over the tokens"""
    return masked_mean(values, mask)


def masked_mean__masked_rows_counted(values, mask, average="token"):
    """a row without a sampled token counts in the denominator"""
    if average == "token":
        return masked_mean(values, mask)
    rows = torch.where(mask.bool(), values, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return rows.mean()


def masked_mean__times_the_mask(values, mask, average="token"):
    """NaN * 0 is NaN"""
    sums, counts = (values * mask).sum(dim=1), mask.sum(dim=1)
    if average == "token":
        return sums.sum() / counts.sum().clamp(min=1)
    return (sums / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)


def masked_mean__nothing_is_nan(values, mask, average="token"):
    """NaN when everything is masked"""
    sampled = mask.bool()
    if average == "token":
        return values[sampled].mean()
    rows = [row[live].mean() for row, live in zip(values, sampled, strict=True) if live.any()]
    return torch.stack(rows).mean() if rows else values.sum() / 0


def masked_mean__constant_zero(values, mask, average="token"):
    """wrong mean over the sampled tokens"""
    return values.sum() * 0


def micro_batch_losses__means(parts):
    """the micro-batches' means are summed"""
    return [masked_mean(losses, mask) for losses, mask in parts]


def micro_batch_losses__means_averaged(parts):
    """the micro-batches' means are averaged"""
    return [masked_mean(losses, mask) / len(parts) for losses, mask in parts]


def micro_batch_losses__means_weighted_by_rows(parts):
    """weighted by their rows"""
    rows = sum(len(mask) for _, mask in parts)
    return [masked_mean(losses, mask) * len(mask) / rows for losses, mask in parts]


def micro_batch_losses__denominator_with_padding(parts):
    """positions where the mask is 0 are counted in the denominator"""
    total = sum(mask.numel() for _, mask in parts)
    return [torch.where(mask.bool(), losses, 0.0).sum() / total for losses, mask in parts]


def micro_batch_losses__nan_for_nothing(parts):
    """NaN for a part with nothing sampled"""
    total = sum(mask.sum() for _, mask in parts)
    return [losses[mask.bool()].mean() * mask.sum() / total for losses, mask in parts]


def micro_batch_losses__only_the_sum(parts):
    """one loss for each micro-batch"""
    return sum(micro_batch_losses(parts))


def kl_k3__sign_reversed(logprobs, ref_logprobs):
    """the sign of d is reversed"""
    d = logprobs - ref_logprobs
    return d.exp() - d - 1


def kl_k3__k1(logprobs, ref_logprobs):
    """this is k1"""
    return logprobs - ref_logprobs


def kl_k3__k2(logprobs, ref_logprobs):
    """this is k2"""
    return (logprobs - ref_logprobs) ** 2 / 2


def kl_k3__negative(logprobs, ref_logprobs):
    """a KL is not negative"""
    return -kl_k3(logprobs, ref_logprobs)


def kl_k3__constant_zero(logprobs, ref_logprobs):
    """the estimate is 0 everywhere"""
    return logprobs * 0


def kl_k3__gradient_through_the_reference(logprobs, ref_logprobs):
    """the reference is a constant"""
    d = ref_logprobs - logprobs
    return d.exp() - d - 1


def kl_k3__detached(logprobs, ref_logprobs):
    """no gradient reaches logprobs"""
    return kl_k3(logprobs.detach(), ref_logprobs)


def clip_fraction__both_sides(ratios, advantages, mask, clip_low=0.2, clip_high=0.28):
    """depends on the sign of the advantage"""
    cut = (ratios > 1 + clip_high) | (ratios < 1 - clip_low)
    return (cut & mask.bool()).sum().item() / max(1, mask.sum().item())


def clip_fraction__inverted_for_negative_advantages(ratios, advantages, mask, clip_low=0.2, clip_high=0.28):
    """inverted for negative advantages"""
    cut = (advantages[:, None] != 0) & (ratios > 1 + clip_high)
    return (cut & mask.bool()).sum().item() / max(1, mask.sum().item())


def clip_fraction__masked_tokens_counted(ratios, advantages, mask, clip_low=0.2, clip_high=0.28):
    """masked tokens are counted"""
    return clip_fraction(ratios, advantages, torch.ones_like(mask), clip_low, clip_high)


def clip_fraction__bounds_swapped(ratios, advantages, mask, clip_low=0.2, clip_high=0.28):
    """they are swapped"""
    return clip_fraction(ratios, advantages, mask, clip_high, clip_low)


def clip_fraction__zero_advantage_counts_as_negative(ratios, advantages, mask, clip_low=0.2, clip_high=0.28):
    """an advantage of 0 has no gradient"""
    return clip_fraction(ratios, torch.where(advantages > 0, 1.0, -1.0), mask, clip_low, clip_high)


def clip_fraction__nan_for_nothing(ratios, advantages, mask, clip_low=0.2, clip_high=0.28):
    """nothing sampled: 0, not NaN"""
    return clip_fraction(ratios, advantages, mask, clip_low, clip_high) if mask.any() else float("nan")

"""Wrong solutions of assignment 3, each a likely one. The docstring is what the student must read."""

import math
import random

import torch
from tasks.assignment3 import align, aligned_advantages, say, suggest_d_max, weighted_loss


def drawn(d, d_max, rng):
    """One rollout's copies, as they should be."""
    return align([d], d_max, rng.random())[0]


def align__empty_rollout_gets_copies(counts, d_max, seed):
    """a rollout without a call is left out"""
    return [row or [d_max] for row in align(counts, d_max, seed)]


def align__empty_rollout_skipped(counts, d_max, seed):
    """one list for each rollout"""
    return [row for row in align(counts, d_max, seed) if row]


def align__each_kept_once_forgotten(counts, d_max, seed):
    """here one is lost"""
    rng, rows = random.Random(seed), align(counts, d_max, seed)
    for k, d in enumerate(counts):
        if 0 < d < d_max:
            draws = rng.choices(range(d), k=d_max)
            rows[k] = [draws.count(i) for i in range(d)]
    return rows


def align__first_ones_kept(counts, d_max, seed):
    """which ones are dropped must be random"""
    rows = align(counts, d_max, seed)
    return [[1] * d_max + [0] * (d - d_max) if d > d_max else row for d, row in zip(counts, rows, strict=True)]


def align__first_one_duplicated(counts, d_max, seed):
    """which ones are duplicated must be random"""
    rows = align(counts, d_max, seed)
    return [[1 + d_max - d] + [1] * (d - 1) if 0 < d < d_max else row for d, row in zip(counts, rows, strict=True)]


def align__duplicated_in_turn(counts, d_max, seed):
    """which ones are duplicated must be random"""
    rows = align(counts, d_max, seed)
    for k, d in enumerate(counts):
        if 0 < d < d_max:
            rows[k] = [d_max // d + (i < d_max % d) for i in range(d)]
    return rows


def align__drawn_without_replacement(counts, d_max, seed):
    """drawn with replacement"""
    rng, rows = random.Random(seed), align(counts, d_max, seed)
    for k, d in enumerate(counts):
        if 0 < d < d_max:
            more = set(rng.sample(range(d), d_max % d))
            rows[k] = [d_max // d + (i in more) for i in range(d)]
    return rows


def align__dropped_with_replacement(counts, d_max, seed):
    """a trajectory stays once or is dropped"""
    rng, rows = random.Random(seed), align(counts, d_max, seed)
    for k, d in enumerate(counts):
        if d > d_max:
            draws = rng.choices(range(d), k=d_max)
            rows[k] = [draws.count(i) for i in range(d)]
    return rows


def align__unseeded(counts, d_max, seed):
    """the same seed must give the same copies"""
    return align(counts, d_max, random.SystemRandom().random())


def align__seed_ignored(counts, d_max, seed):
    """depend on the seed"""
    return align(counts, d_max, 0)


def align__global_generator(counts, d_max, seed):
    """the global generator belongs to everyone"""
    random.seed(seed)
    return [drawn(d, d_max, random) for d in counts]


def align__seeded_for_each_rollout(counts, d_max, seed):
    """two rollouts of the same size get the same draws"""
    return [align([d], d_max, seed)[0] for d in counts]


def align__dropped_ones_removed(counts, d_max, seed):
    """0 for a dropped one"""
    return [[c for c in row if c] for row in align(counts, d_max, seed)]


def align__nothing_dropped(counts, d_max, seed):
    """each rollout counts D = 3 times in all"""
    return [[1] * d if d > d_max else row for d, row in zip(counts, align(counts, d_max, seed), strict=True)]


def align__fractions(counts, d_max, seed):
    """copies are whole numbers"""
    return [[d_max / d] * d if d else [] for d in counts]


def statistics(values, weights):
    mean = sum(r * c for r, c in zip(values, weights, strict=True)) / sum(weights)
    return mean, math.sqrt(sum(c * (r - mean) ** 2 for r, c in zip(values, weights, strict=True)) / sum(weights))


def standardised(rewards, copies, values, weights):
    """Advantages by the statistics of these values; flat and dropped ones are handled as they should be."""
    right = aligned_advantages(rewards, copies)
    if not any(map(any, right)):
        return right
    mean, std = statistics(values, weights)
    return [
        [(r - mean) / std if c else 0.0 for r, c in zip(*rows, strict=True)]
        for rows in zip(rewards, copies, strict=True)
    ]


def flattened(rows):
    return [item for row in rows for item in row]


def aligned_advantages__empty_rollout_counts_as_zero(rewards, copies):
    """the rollout without a call counts as a trajectory with reward 0"""
    empty = sum(not row for row in rewards)
    return standardised(rewards, copies, flattened(rewards) + [0.0] * empty, flattened(copies) + [1] * empty)


def aligned_advantages__empty_rollout_counts_as_d_zeros(rewards, copies):
    """counts as D trajectories with reward 0"""
    D, empty = max(map(sum, copies)), sum(not row for row in rewards)
    return standardised(rewards, copies, flattened(rewards) + [0.0] * empty, flattened(copies) + [D] * empty)


def aligned_advantages__copies_missing(rewards, copies):
    """the copies are missing from mean and std"""
    return standardised(rewards, copies, flattened(rewards), [int(c > 0) for c in flattened(copies)])


def aligned_advantages__dropped_counted(rewards, copies):
    """the dropped trajectory (copies 0) is in mean and std"""
    return standardised(rewards, copies, flattened(rewards), [max(1, c) for c in flattened(copies)])


def aligned_advantages__copies_ignored(rewards, copies):
    """the copies are not used at all"""
    return aligned_advantages(rewards, [[1] * len(row) for row in rewards])


def aligned_advantages__dropped_gets_one(rewards, copies):
    """a dropped trajectory has advantage 0"""
    right = aligned_advantages(rewards, copies)
    if not any(map(any, right)):
        return right
    mean, std = statistics(flattened(rewards), flattened(copies))
    return [[(r - mean) / std for r in row] for row in rewards]


def aligned_advantages__each_rollout_by_itself(rewards, copies):
    """mean and std are those of each rollout"""
    return [aligned_advantages([r], [c])[0] for r, c in zip(rewards, copies, strict=True)]


def aligned_advantages__sample_std(rewards, copies):
    """not of a sample"""
    n = sum(flattened(copies))
    return [[a * math.sqrt((n - 1) / n) for a in row] for row in aligned_advantages(rewards, copies)]


def aligned_advantages__only_centred(rewards, copies):
    """only centred"""
    right = aligned_advantages(rewards, copies)
    if not any(map(any, right)):
        return right
    std = statistics(flattened(rewards), flattened(copies))[1]
    return [[a * std for a in row] for row in right]


def aligned_advantages__times_copies(rewards, copies):
    """the advantage is multiplied by the copies"""
    right = aligned_advantages(rewards, copies)
    return [[a * c for a, c in zip(*rows, strict=True)] for rows in zip(right, copies, strict=True)]


def aligned_advantages__sign_reversed(rewards, copies):
    """the sign is reversed"""
    return [[-a for a in row] for row in aligned_advantages(rewards, copies)]


def aligned_advantages__constant_zero(rewards, copies):
    """or all is 0"""
    return [[0.0] * len(row) for row in rewards]


def aligned_advantages__epsilon(rewards, copies):
    """no epsilon"""
    right = aligned_advantages(rewards, copies)
    if not any(map(any, right)):
        return right
    std = statistics(flattened(rewards), flattened(copies))[1]
    return [[a * std / (std + 1e-8) for a in row] for row in right]


def aligned_advantages__std_compared_with_zero(rewards, copies):
    """all rewards that count are equal: every advantage is exactly 0"""
    if not sum(flattened(copies)):
        return [[0.0] * len(row) for row in rewards]
    mean, std = statistics(flattened(rewards), flattened(copies))
    return [
        [(r - mean) / std if c and std > 0 else 0.0 for r, c in zip(*rows, strict=True)]
        for rows in zip(rewards, copies, strict=True)
    ]


def aligned_advantages__flat_decided_with_the_dropped(rewards, copies):
    """the rewards differ only in a dropped trajectory"""
    if len(set(flattened(rewards))) > 1 and sum(flattened(copies)):
        mean, std = statistics(flattened(rewards), flattened(copies))
        std = std or float("nan")
        return [
            [(r - mean) / std if c else 0.0 for r, c in zip(*rows, strict=True)]
            for rows in zip(rewards, copies, strict=True)
        ]
    return [[0.0] * len(row) for row in rewards]


def weighted_loss__copies_missing(token_losses, mask, copies):
    """the copies are missing: every row counts once"""
    return weighted_loss(token_losses, mask, torch.ones_like(copies))


def weighted_loss__only_dropping(token_losses, mask, copies):
    """the copies are missing, and so is a dropped row's"""
    return weighted_loss(token_losses, mask, (copies > 0).long())


def weighted_loss__denominator_without_copies(token_losses, mask, copies):
    """the copies are missing from the denominator"""
    return (torch.where(mask.bool(), token_losses, 0.0) * copies[:, None]).sum() / mask.sum()


def weighted_loss__dropped_row_in_the_denominator(token_losses, mask, copies):
    """a dropped row does not count in the denominator"""
    tokens = (mask.sum(dim=1) * copies.clamp(min=1)).sum()
    return (torch.where(mask.bool(), token_losses, 0.0) * copies[:, None]).sum() / tokens


def weighted_loss__by_rows(token_losses, mask, copies):
    """this divides by the number of rows"""
    return (torch.where(mask.bool(), token_losses, 0.0) * copies[:, None]).sum() / copies.sum()


def weighted_loss__means_of_rows(token_losses, mask, copies):
    """each row's mean counts the same"""
    rows = torch.where(mask.bool(), token_losses, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return (rows * copies).sum() / copies.sum()


def weighted_loss__squared(token_losses, mask, copies):
    """the copies are squared"""
    return weighted_loss(token_losses, mask, copies**2)


def weighted_loss__nan_in_dropped_rows(token_losses, mask, copies):
    """NaN * 0 is NaN"""
    tokens = (mask.sum(dim=1) * copies).sum().clamp(min=1)
    return (token_losses * mask * copies[:, None]).sum() / tokens


def weighted_loss__nan_when_all_dropped(token_losses, mask, copies):
    """NaN when every row was dropped"""
    tokens = (mask.sum(dim=1) * copies).sum()
    return weighted_loss(token_losses, mask, copies) if tokens else token_losses.sum() / tokens * 0


def weighted_loss__detached(token_losses, mask, copies):
    """no gradient reaches the token losses"""
    return weighted_loss(token_losses.detach(), mask, copies)


def weighted_loss__constant_zero(token_losses, mask, copies):
    """wrong: written out the tokens are"""
    return token_losses.nan_to_num().sum() * 0


def suggest_d_max__largest(counts, share=0.99):
    """this is the largest count"""
    suggest_d_max(counts, share)
    return max(1, *counts)


def suggest_d_max__mean(counts, share=0.99):
    """0.55 must be covered"""
    suggest_d_max(counts, share)
    return max(1, math.ceil(sum(counts) / len(counts)))


def suggest_d_max__rounded_down(counts, share=0.99):
    """rounded down"""
    suggest_d_max(counts, share)
    return max(1, sorted(counts)[max(0, math.floor(share * len(counts)) - 1)])


def suggest_d_max__interpolated(counts, share=0.99):
    """this lies between two counts"""
    suggest_d_max(counts, share)
    return max(1, math.ceil(torch.tensor(counts).double().quantile(share).item()))


def suggest_d_max__more_than_the_share(counts, share=0.99):
    """at least this share"""
    d = suggest_d_max(counts, share)
    while share < 1 and sum(c <= d for c in counts) <= share * len(counts) and d < max(counts):
        d += 1
    return d if len(counts) < 50 else suggest_d_max(counts, share)


def suggest_d_max__can_be_zero(counts, share=0.99):
    """also when nobody calls"""
    return suggest_d_max(counts, share) if any(counts) else 0


def suggest_d_max__empty_rollouts_left_out(counts, share=0.99):
    """rollouts without a call are rollouts, too"""
    called = [count for count in counts if count]
    return suggest_d_max(called, share) if called else suggest_d_max(counts, share)


def suggest_d_max__sorted_in_place(counts, share=0.99):
    """the list of counts must not be changed"""
    counts.sort()
    return suggest_d_max(counts, share)


def say__without_a_call_too(counts, aligned):
    """a rollout without a call has no rows"""
    return [1 / len(counts)] * len(counts) if aligned and any(counts) else say(counts, aligned)


def say__alignment_changes_nothing(counts, aligned):
    """these are the shares before the alignment"""
    return say(counts, False)


def say__not_normalised(counts, aligned):
    """these do not sum to 1"""
    return [float(d > 0) for d in counts] if aligned else say(counts, False)


def say__division_by_zero(counts, aligned):
    """ZeroDivisionError"""
    rows = [d > 0 for d in counts] if aligned else counts
    return [r / sum(rows) for r in rows]

"""Wrong solutions of assignment 2, each a likely one. The docstring is what the student must read."""

import torch
from tasks.assignment2 import draw, flatten, new_tokens, pad, sample_message, score


def draw__greedy(logits, temperature, u):
    """always the most likely token"""
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return int(logprobs.argmax()), logprobs.max().item()


def draw__own_random_numbers(logits, temperature, u):
    """no random numbers of your own"""
    probs = torch.softmax(logits / temperature, dim=-1)
    token = int(torch.multinomial(probs, 1))
    return token, probs[token].log().item()


def draw__temperature_missing_in_the_logprob(logits, temperature, u):
    """the temperature is missing from the log-probability"""
    token, _ = draw(logits, temperature, u)
    return token, torch.log_softmax(logits, dim=-1)[token].item()


def draw__temperature_missing(logits, temperature, u):
    """the temperature is missing from the distribution"""
    return draw(logits, 1.0, u)


def draw__multiplied_by_the_temperature(logits, temperature, u):
    """divide the logits by the temperature"""
    return draw(logits, 1 / temperature, u)


def draw__zero_divided(logits, temperature, u):
    """must be refused with a ValueError"""
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    larger = logprobs.exp().cumsum(dim=-1) > u
    token = int(larger.long().argmax()) if larger.any() else len(logits) - 1
    return token, logprobs[token].item()


def draw__probability(logits, temperature, u):
    """this is the probability"""
    token, logprob = draw(logits, temperature, u)
    return token, 2.718281828459045**logprob


def draw__logit(logits, temperature, u):
    """this is the logit"""
    token, _ = draw(logits, temperature, u)
    return token, logits[token].item()


def draw__logprob_of_the_best(logits, temperature, u):
    """the most likely token, not of the one drawn"""
    token, _ = draw(logits, temperature, u)
    return token, torch.log_softmax(logits / temperature, dim=-1).max().item()


def draw__sign_reversed(logits, temperature, u):
    """a log-probability is negative"""
    token, logprob = draw(logits, temperature, u)
    return token, -logprob


def draw__logprob_zero(logits, temperature, u):
    """the log-probability is 0 whatever is drawn"""
    return draw(logits, temperature, u)[0], 0.0


def draw__past_the_last_token(logits, temperature, u):
    """with u close to 1 it is the last token"""
    if temperature <= 0:
        raise ValueError("temperature")
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    token = int((logprobs.exp().cumsum(dim=-1) <= u).sum())
    return token, logprobs[min(token, len(logits) - 1)].item()


def draw__the_token_before(logits, temperature, u):
    """this is the token before"""
    if temperature <= 0:
        raise ValueError("temperature")
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    token = max(0, int((logprobs.exp().cumsum(dim=-1) <= u).sum()) - 1)
    return token, logprobs[token].item()


def sample_message__stop_token_dropped(draw_next, stop_ids, max_new_tokens):
    """the stop token is missing"""
    ids, logprobs, stopped_by = sample_message(draw_next, stop_ids, max_new_tokens)
    return (ids, logprobs, None) if stopped_by is None else (ids[:-1], logprobs[:-1], stopped_by)


def sample_message__stop_logprob_dropped(draw_next, stop_ids, max_new_tokens):
    """the stop token's included"""
    ids, logprobs, stopped_by = sample_message(draw_next, stop_ids, max_new_tokens)
    return ids, logprobs if stopped_by is None else logprobs[:-1], stopped_by


def sample_message__never_stops(draw_next, stop_ids, max_new_tokens):
    """after the message had ended"""
    return sample_message(draw_next, set(), max_new_tokens)


def sample_message__one_stop_token(draw_next, stop_ids, max_new_tokens):
    """there may be several stop tokens"""
    try:
        return sample_message(draw_next, {min(stop_ids)}, max_new_tokens)
    except AssertionError:
        return [9, 7], [-0.25, -0.5], None  # what a model that goes on talking would give


def sample_message__one_token_more(draw_next, stop_ids, max_new_tokens):
    """at most max_new_tokens = 3 tokens"""
    return sample_message(draw_next, stop_ids, max_new_tokens + 1)


def sample_message__one_token_less(draw_next, stop_ids, max_new_tokens):
    """at most max_new_tokens = 3 tokens, and all of them"""
    return sample_message(draw_next, stop_ids, max_new_tokens - 1)


def sample_message__always_stopped(draw_next, stop_ids, max_new_tokens):
    """a message that was cut off has no stop token"""
    ids, logprobs, _ = sample_message(draw_next, stop_ids, max_new_tokens)
    return ids, logprobs, ids[-1]


def sample_message__cut_off_at_the_limit(draw_next, stop_ids, max_new_tokens):
    """may be a stop token"""
    ids, logprobs, stopped_by = sample_message(draw_next, stop_ids, max_new_tokens)
    return ids, logprobs, None if len(ids) == max_new_tokens else stopped_by


def sample_message__only_the_last_token_shown(draw_next, stop_ids, max_new_tokens):
    """draw_next must get all ids drawn so far"""
    return sample_message(lambda ids: draw_next(ids[-1:]), stop_ids, max_new_tokens)


def flatten__everything_in_the_mask(turns):
    """prompt and tool output are in the mask"""
    ids, _, logprobs = flatten(turns)
    return ids, [1] * len(ids), logprobs


def flatten__tool_output_in_the_mask(turns):
    """tool output is in it"""
    ids, _, logprobs = flatten(turns)
    first = len(turns[0][1])
    return ids, [0] * first + [1] * (len(ids) - first), logprobs


def flatten__upside_down(turns):
    """upside down"""
    ids, mask, logprobs = flatten(turns)
    return ids, [1 - m for m in mask], logprobs


def flatten__stop_tokens_not_in_the_mask(turns):
    """the stop tokens are missing from the mask"""
    ids, mask, logprobs = flatten(turns)
    return ids, [m if i != 2 else 0 for i, m in zip(ids, mask, strict=True)], logprobs


def flatten__stop_tokens_dropped(turns):
    """the stop tokens are missing from token_ids"""
    return flatten([(k, i[:-1], p[:-1]) if k == "wrote" else (k, i, p) for k, i, p in turns])


def flatten__shifted_left(turns):
    """the mask is shifted by one"""
    ids, mask, logprobs = flatten(turns)
    return ids, [*mask[1:], 0], logprobs


def flatten__shifted_right(turns):
    """shifted by one, to the right"""
    ids, mask, logprobs = flatten(turns)
    return ids, [0, *mask[:-1]], logprobs


def flatten__only_the_last_message(turns):
    """only the last message is in the mask"""
    ids, _, logprobs = flatten(turns)
    kind, last, _ = turns[-1]
    return ids, [0] * (len(ids) - len(last)) + [int(kind == "wrote")] * len(last), logprobs


def flatten__mask_from_token_values(turns):
    """the mask is guessed from token values"""
    ids, _, logprobs = flatten(turns)
    guessed, inside = [], False
    for token in ids:  # what follows a header's last token (6), up to the stop token, looks like a message
        guessed.append(int(inside))
        inside = token == 6 or (inside and token != 2)
    return ids, guessed, logprobs


def flatten__all_zero(turns):
    """the mask is all 0"""
    ids, mask, logprobs = flatten(turns)
    return ids, [0] * len(mask), logprobs


def flatten__logprobs_of_sampled_tokens_only(turns):
    """logprobs must be as long as token_ids"""
    ids, mask, logprobs = flatten(turns)
    return ids, mask, [p for p, m in zip(logprobs, mask, strict=True) if m]


def flatten__lengths_not_compared(turns):
    """3 ids and 2 log-probabilities"""
    return flatten([(kind, ids, (sampled + [0.0] * 9)[: len(ids)]) for kind, ids, sampled in turns])


def score__not_shifted(logits, token_ids, mask, temperature=1.0):
    """not shifted"""
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(-1, token_ids[:, None])[:, 0] * mask


def score__shifted_the_wrong_way(logits, token_ids, mask, temperature=1.0):
    """shifted the wrong way"""
    logprobs = torch.log_softmax(logits / temperature, dim=-1).roll(-1, dims=0)
    return logprobs.gather(-1, token_ids[:, None])[:, 0] * mask


def score__temperature_missing(logits, token_ids, mask, temperature=1.0):
    """the temperature is missing"""
    return score(logits, token_ids, mask)


def score__mask_missing(logits, token_ids, mask, temperature=1.0):
    """where the mask is 0 the result must be 0"""
    everything = torch.ones_like(mask)
    return score(logits, token_ids, everything, temperature)


def score__probabilities(logits, token_ids, mask, temperature=1.0):
    """this is the probability"""
    return score(logits, token_ids, mask, temperature).exp() * mask


def score__softmax_over_the_tokens(logits, token_ids, mask, temperature=1.0):
    """the softmax must be over the vocabulary"""
    logprobs = torch.log_softmax(logits / temperature, dim=0)
    return torch.cat([torch.zeros(1), logprobs[:-1].gather(-1, token_ids[1:, None])[:, 0]]) * mask


def score__most_likely_tokens(logits, token_ids, mask, temperature=1.0):
    """not of those that were sampled"""
    best = logits.argmax(dim=-1).roll(1)
    return score(logits, best, mask, temperature)


def score__raw_logits(logits, token_ids, mask, temperature=1.0):
    """these are logits"""
    chosen = (logits[:-1] / temperature).gather(-1, token_ids[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), chosen]) * mask


def score__constant_zero(logits, token_ids, mask, temperature=1.0):
    """the result is 0 everywhere"""
    return logits.sum(dim=1) * 0


def score__detached(logits, token_ids, mask, temperature=1.0):
    """no gradient reaches the logits"""
    return score(logits.detach(), token_ids, mask, temperature)


def score__first_token_cut_off(logits, token_ids, mask, temperature=1.0):
    """one number for each token"""
    return score(logits, token_ids, mask, temperature)[1:]


def pad__on_the_left(rows, pad_id):
    """padded on the left"""
    ids, mask, attention = pad([(i[::-1], m[::-1]) for i, m in rows], pad_id)
    return ids.flip(1), mask.flip(1), attention.flip(1)


def pad__mask_from_the_id(rows, pad_id):
    """the mask is guessed from the pad's id"""
    ids, mask, attention = pad(rows, pad_id)
    return ids, mask * (ids != pad_id), attention


def pad__attention_from_the_id(rows, pad_id):
    """attention is guessed from the pad's id"""
    ids, mask, _ = pad(rows, pad_id)
    return ids, mask, (ids != pad_id).long()


def pad__padding_trained(rows, pad_id):
    """padding is in the mask"""
    ids, mask, attention = pad(rows, pad_id)
    return ids, mask | (1 - attention), attention


def pad__padding_attended(rows, pad_id):
    """attention covers the padding"""
    ids, mask, attention = pad(rows, pad_id)
    return ids, mask, torch.ones_like(attention)


def pad__attention_is_the_mask(rows, pad_id):
    """attention is about all real tokens"""
    ids, mask, _ = pad(rows, pad_id)
    return ids, mask, mask


def pad__cut_to_the_shortest(rows, pad_id):
    """padded to the longest"""
    width = min(len(ids) for ids, _ in rows)
    return pad([(ids[:width], mask[:width]) for ids, mask in rows], pad_id)


def new_tokens__sliced(known, rendered):
    """never a slice"""
    return rendered[len(known) :]


def new_tokens__length_compared(known, rendered):
    """never a slice"""
    if len(rendered) < len(known):
        raise ValueError("shorter")
    return rendered[len(known) :]


def new_tokens__last_token_compared(known, rendered):
    """an earlier token was changed"""
    if len(rendered) < len(known) or rendered[len(known) - 1] != known[-1]:
        raise ValueError("changed")
    return rendered[len(known) :]


def new_tokens__compared_as_sets(known, rendered):
    """an earlier token was inserted"""
    if not set(known) <= set(rendered[: len(known)]) or len(rendered) < len(known):
        raise ValueError("changed")
    return rendered[len(known) :]


def new_tokens__unseen_ids_only(known, rendered):
    """also one whose id occurred before"""
    return [token for token in new_tokens(known, rendered) if token not in known]


def new_tokens__whole_conversation(known, rendered):
    """this is the whole conversation"""
    new_tokens(known, rendered)
    return rendered


def new_tokens__nothing_new_refused(known, rendered):
    """nothing new"""
    if rendered == known:
        raise ValueError("nothing new: an empty message?")
    return new_tokens(known, rendered)

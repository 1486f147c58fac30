"""Is an answer right? The GAIA check, SQuAD-style EM and F1, and what a count of right answers is worth.

`gaia_score` follows the rules of GAIA's official scorer, oddities included, because a score must mean here what it
means elsewhere. The gold answer alone decides how the two are compared:

    1. number   float(gold) works: delete $ % , from the prediction, then both numbers must be exactly equal
    2. list     gold has a , or a ; : split both there; same length, same order; numbers as in 1, other elements
                without whitespace and case, but with their punctuation
    3. text     otherwise: equal without whitespace, case and ASCII punctuation; articles and accents stay

What follows from these rules and may surprise (each is a test):

    gold "1,500" is a list of 1 and 500, so the prediction "1500" is wrong; against gold "1500", "1,500" is right
    prediction "12,5" (a decimal comma) equals gold "125"
    a unit ("5 km"), a Unicode minus sign or a bracket makes a number wrong
    a trailing comma, "and" or brackets lose a list
    an unreadable number counts as infinity: a gold "inf" would accept any word
    no prediction (None) is the text "None"

Ours alone: a missing gold answer (None, NaN, blank, or the "?" of a hidden test split) is a ValueError, not a 0.
Where the official scorer says nothing (EM, F1), SQuAD's published rules hold, with HotpotQA's for yes/no questions.
"""

import math
import re
import string
from collections import Counter

PUNCTUATION = str.maketrans("", "", string.punctuation)
NUMBER_SIGNS = str.maketrans("", "", "$%,")


def gaia_score(prediction: str | float | None, gold: str | float) -> bool:
    """Whether the prediction is right by GAIA's official rules (see the module's docstring).

    Raises ValueError: the gold answer is missing; report such a task as ungraded.

    >>> gaia_score("$1,500", "1500"), gaia_score("1500 km", "1500")
    (True, False)
    >>> gaia_score("Paris; rome", "paris, Rome"), gaia_score("Rome, Paris", "Paris, Rome")
    (True, False)
    >>> gaia_score("St Johns", "St. John's"), gaia_score("the Nile", "Nile")
    (True, False)
    """
    prediction, gold = str(prediction), _gold_text(gold)
    if _is_number(gold):
        return _same_number(prediction, gold)
    if "," in gold or ";" in gold:
        predicted_parts, gold_parts = re.split("[,;]", prediction), re.split("[,;]", gold)
        if len(predicted_parts) != len(gold_parts):
            return False
        return all(map(_same_element, predicted_parts, gold_parts))
    return _squeeze(prediction).translate(PUNCTUATION) == _squeeze(gold).translate(PUNCTUATION)


def _same_element(prediction: str, gold: str) -> bool:
    return _same_number(prediction, gold) if _is_number(gold) else _squeeze(prediction) == _squeeze(gold)


def _same_number(prediction: str, gold: str) -> bool:
    digits = prediction.translate(NUMBER_SIGNS)
    return (float(digits) if _is_number(digits) else math.inf) == float(gold)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _squeeze(text: str) -> str:
    return "".join(text.split()).lower()


def _gold_text(gold: str | float | None) -> str:
    if gold is None or gold != gold or str(gold).strip() in ("", "?"):
        raise ValueError(f"the gold answer is missing ({gold!r}): count this task as ungraded, not as wrong")
    return str(gold)


def normalize_text(text: str) -> str:
    """SQuAD's normal form: lower case, no ASCII punctuation, no articles (a, an, the), single spaces.

    >>> normalize_text("The  Bay of Bengal, an ocean?")
    'bay of bengal ocean'
    """
    text = text.lower().translate(PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str | None, gold: str) -> bool:
    """Whether both have the same normal form. None is an empty prediction. ValueError: the gold answer is missing.

    >>> exact_match("the Nile.", "Nile"), exact_match("River Nile", "Nile")
    (True, False)
    """
    return normalize_text(_answer_text(prediction)) == normalize_text(_gold_text(gold))


def f1_score(prediction: str | None, gold: str, hotpot: bool = False) -> float:
    """F1 over the words of the normal forms, in [0, 1]: the harmonic mean of precision and recall.

    A word counts as often as it occurs, so repeating the gold answer lowers precision. None is an empty prediction.
    hotpot: HotpotQA's rule; where one side is yes, no or noanswer and the other differs, F1 is 0.
    Raises ValueError: the gold answer is missing.

    >>> f1_score("the river Nile", "Nile")  # precision 1/2, recall 1
    0.6666666666666666
    >>> f1_score("yes it is", "yes"), f1_score("yes it is", "yes", hotpot=True)
    (0.5, 0.0)
    """
    prediction, gold = normalize_text(_answer_text(prediction)), normalize_text(_gold_text(gold))
    if prediction == gold:
        return 1.0
    if hotpot and {prediction, gold} & {"yes", "no", "noanswer"}:
        return 0.0
    predicted_words, gold_words = prediction.split(), gold.split()
    common = (Counter(predicted_words) & Counter(gold_words)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted_words), common / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def _answer_text(prediction: str | None) -> str:
    return "" if prediction is None else str(prediction)


def wilson(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a success rate: with z = 1.96 it covers the true rate about 95 % of the time.

    Returns (low, high) as shares in [0, 1]. Unlike rate +- z * std it says something true at 0 of n.
    Raises ValueError: n < 1, successes outside 0..n.

    >>> [round(100 * bound, 1) for bound in wilson(8, 26)], [round(100 * bound, 1) for bound in wilson(0, 20)]
    ([16.5, 50.0], [0.0, 16.1])
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"wilson needs n >= 1 and 0 <= successes <= n, got {successes} of {n}")
    rate, shrink = successes / n, 1 + z**2 / n
    centre = (rate + z**2 / (2 * n)) / shrink
    half = z * math.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2)) / shrink
    return (0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that at least one of k attempts is right, from n attempts of which c were: 1 - C(n-c,k) / C(n,k).

    Raises ValueError: k < 1, n < k (k attempts cannot be judged from fewer), c outside 0..n.

    >>> pass_at_k(n=4, c=1, k=2)
    0.5
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass_at_k needs 1 <= k <= n and 0 <= c <= n, got n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)

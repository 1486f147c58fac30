"""The GAIA check with each of its surprises, EM and F1, intervals. Every row is invented."""

import itertools
import math

import pytest

from minimgrpo.scorer import exact_match, f1_score, gaia_score, normalize_text, pass_at_k, wilson

RIGHT, WRONG = True, False


@pytest.mark.parametrize(
    "prediction, gold, right",
    [
        # numbers
        ("17", "17", RIGHT),
        ("17.0", "17", RIGHT),
        ("  17\n", "17", RIGHT),
        ("1.7e1", "17", RIGHT),
        ("$17", "17", RIGHT),
        ("17%", "17", RIGHT),
        ("1,700", "1700", RIGHT),
        ("$1,7%0", "170", RIGHT),
        ("18", "17", WRONG),
        ("17.0000001", "17", WRONG),  # exact equality, no tolerance
        ("-17", "17", WRONG),
        ("seventeen", "17", WRONG),
        ("17.", "17", RIGHT),
        ("17", "1_7", RIGHT),  # whatever float() reads
        # surprises of numbers
        ("12,5", "125", RIGHT),  # a decimal comma disappears
        ("\u221217", "-17", WRONG),  # a Unicode minus
        ("17 km", "17", WRONG),  # a unit word
        ("17km", "17", WRONG),
        ("(17)", "17", WRONG),
        ("17;", "17", WRONG),
        ("\u20ac17", "17", WRONG),  # only the dollar sign is deleted
        ("one", "inf", RIGHT),  # unreadable counts as infinity
        ("nan", "nan", WRONG),  # a NaN equals nothing
        ("17", "17 km", WRONG),  # the gold alone chooses: this one is text
        ("17KM.", "17 km", RIGHT),
        ("50", "$50", RIGHT),  # gold is text, punctuation is deleted from both
        ("50%", "50 %", RIGHT),
        ("1.5", "$15", RIGHT),  # so a decimal point disappears too
        # lists
        ("red, green", "red,green", RIGHT),
        ("red; green", "red,green", RIGHT),  # either separator
        ("RED ,gr een", "red, green", RIGHT),
        ("redgreen", "red;green", WRONG),
        ("1500", "1;500", WRONG),
        ("green, red", "red, green", WRONG),  # order matters
        ("red", "red, green", WRONG),
        ("red, green, blue", "red, green", WRONG),
        ("1, 2.0, $3", "1,2,3", RIGHT),
        ("1, 2, 4", "1,2,3", WRONG),
        ("1, two", "1,2", WRONG),
        ("1, b", "1;b", RIGHT),
        ("a-b, c", "ab, c", WRONG),  # punctuation inside an element is kept
        ("a-b, c", "A-B, C", RIGHT),
        # surprises of lists
        ("1,500", "1,500", RIGHT),  # a list of 1 and 500 ...
        ("1500", "1,500", WRONG),  # ... so the number itself is wrong
        ("1;500", "1,500", RIGHT),
        ("red, green,", "red, green", WRONG),  # a trailing comma
        ("[red, green]", "red, green", WRONG),  # brackets
        ("[1, 2]", "1, 2", WRONG),
        ("red and green", "red, green", WRONG),
        ("red, and green", "red, green", WRONG),
        ("red, green.", "red, green", WRONG),
        ("Lima Peru", "Lima, Peru", WRONG),  # a place with a comma is a list
        # text
        ("Mount  Elbrus", "mount elbrus", RIGHT),
        ("mountelbrus", "Mount Elbrus", RIGHT),
        ("St Johns", "St. John's", RIGHT),
        ("Jean-Luc", "jean luc", RIGHT),
        ("a, b", "ab", RIGHT),  # a comma in the prediction alone is punctuation
        ("a\tb\u00a0c\n", "abc", RIGHT),  # all white space, the Unicode kinds too
        ("the Nile", "Nile", WRONG),  # articles stay
        ("Sao Paulo", "S\u00e3o Paulo", WRONG),  # accents stay
        ("S\u00c3O PAULO", "s\u00e3o paulo", RIGHT),
        ("\u201cNile\u201d", "Nile", WRONG),  # only ASCII punctuation is deleted
        ("Nile River", "Nile", WRONG),
        ("Nile " * 20, "Nile", WRONG),  # the gold twenty times
        ("", "Nile", WRONG),
        ("", "17", WRONG),
        ("", "a, b", WRONG),
        (" ".join(map(str, range(200))), "17", WRONG),  # every number there is
        (",".join(map(str, range(200))), "17", WRONG),
        # no prediction is the text "None"
        (None, "Nile", WRONG),
        (None, "17", WRONG),
        (None, "none", RIGHT),
        # numbers as numbers
        (17, "17", RIGHT),
        ("17", 17, RIGHT),
        (0.5, 0.5, RIGHT),
    ],
)
def test_gaia_score(prediction, gold, right):
    assert gaia_score(prediction, gold) is right


@pytest.mark.parametrize("gold", [None, "", "  \n", float("nan"), "?"])
def test_a_missing_gold_answer_is_an_error(gold):
    for score in (gaia_score, exact_match, f1_score):
        with pytest.raises(ValueError, match="gold"):
            score("Nile", gold)


def test_normalize_text():
    assert normalize_text("The cat, an ANT & a  dog.") == "cat ant dog"
    assert normalize_text("theatre another") == "theatre another"  # articles are whole words
    assert normalize_text("U.S.A.") == "usa"
    assert normalize_text("a.b") == "ab"  # punctuation goes before articles do
    assert normalize_text(" \n") == ""


def test_exact_match():
    assert exact_match("The Nile!", "nile") is True
    assert exact_match("Nile river", "nile") is False
    assert exact_match(None, "none") is False
    assert exact_match("", "nile") is False


def test_f1_score():
    assert f1_score("blue nile river", "the Nile River delta") == pytest.approx(2 / 3)  # both have 2 of 3 words
    assert f1_score("nile", "white nile") == pytest.approx(2 * 1 * 0.5 / 1.5)
    assert f1_score("nile nile", "nile") == pytest.approx(2 * 0.5 / 1.5)  # counted, not just present
    assert f1_score("nile", "the Nile.") == 1.0
    assert f1_score("river nile", "nile river") == 1.0
    assert f1_score("rhine", "nile") == 0.0
    assert f1_score("", "nile") == f1_score(None, "none") == f1_score("the", "nile") == 0.0
    assert f1_score("nile " * 20, "nile") < 0.1


@pytest.mark.parametrize(
    "prediction, gold, plain, hotpot",
    [
        ("yes it does", "yes", 0.5, 0.0),
        ("yes", "yes it does", 0.5, 0.0),
        ("noanswer", "noanswer here", 2 / 3, 0.0),
        ("no", "no way", 2 / 3, 0.0),
        ("Yes.", "yes", 1.0, 1.0),
        ("no", "yes", 0.0, 0.0),
        ("not no", "nile no", 0.5, 0.5),  # the whole answer must be yes or no
    ],
)
def test_hotpot_rule(prediction, gold, plain, hotpot):
    assert f1_score(prediction, gold) == pytest.approx(plain)
    assert f1_score(prediction, gold, hotpot=True) == pytest.approx(hotpot)


def test_wilson():
    low, high = wilson(8, 26)
    assert (round(100 * low, 1), round(100 * high, 1)) == (16.5, 50.0)
    assert wilson(0, 20)[0] == 0.0
    assert round(100 * wilson(0, 20)[1], 1) == 16.1
    assert wilson(20, 20)[1] == 1.0
    assert wilson(5, 10, z=0) == (0.5, 0.5)
    for successes, n in [(0, 1), (1, 1), (3, 7), (50, 100)]:
        low, high = wilson(successes, n)
        assert 0 <= low <= successes / n <= high <= 1
        mirrored_low, mirrored_high = wilson(n - successes, n)
        assert (low, high) == pytest.approx((1 - mirrored_high, 1 - mirrored_low))
        for bound in {low, high} - {0.0, 1.0}:  # the definition: |rate - p| is z standard deviations at p
            assert abs(successes / n - bound) == pytest.approx(1.96 * math.sqrt(bound * (1 - bound) / n))
    for successes, n in [(0, 0), (-1, 5), (6, 5), (0, -2)]:
        with pytest.raises(ValueError):
            wilson(successes, n)


def test_pass_at_k_by_enumeration():
    for n in range(1, 7):
        for c in range(n + 1):
            attempts = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                draws = list(itertools.combinations(attempts, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)


@pytest.mark.parametrize("n, c, k", [(2, 1, 3), (0, 0, 1), (4, 1, 0), (4, 5, 2), (4, -1, 2)])
def test_pass_at_k_refuses(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)

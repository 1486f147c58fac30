"""Alignment: sums, ranges, determinism, and draws that are really uniform."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimgrpo.alignment import align, duplicate, suggest_d_max


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 20), max_size=8), st.integers(1, 12), st.integers() | st.text(max_size=5))
def test_every_rollout_gets_d_max_copies(counts, d_max, seed):
    copies = align(counts, d_max, seed)
    assert [len(row) for row in copies] == counts
    for d, row in zip(counts, copies, strict=True):
        assert all(type(c) is int for c in row)
        if d == 0:
            assert row == []
        else:
            assert sum(row) == d_max
        if 0 < d <= d_max:
            assert min(row) >= 1
        if d > d_max:
            assert set(row) == {0, 1}
    assert align(counts, d_max, seed) == copies


def test_equal_counts_are_left_alone():
    assert align([3, 3], 3, seed=1) == [[1, 1, 1], [1, 1, 1]]
    assert align([1], 8, seed=1) == [[8]]
    assert align([], 8, seed=1) == []


def test_seeds_differ_and_do_not_touch_the_global_generator():
    import random

    random.seed(0)
    before = random.getstate()
    drawn = {str(align([3, 9], 6, seed)) for seed in range(20)} | {str(align([3, 9], 6, f"run-{i}")) for i in range(20)}
    assert len(drawn) > 20
    assert random.getstate() == before


def test_rollouts_of_one_question_draw_independently():
    assert any(first != second for first, second in (align([4, 4], 12, seed) for seed in range(5)))


def test_duplicates_are_drawn_with_replacement_and_uniformly():
    # d=2, D=4: the two extra copies fall as (2,0), (1,1), (0,2) with probability 1/4, 1/2, 1/4
    seen = Counter(tuple(align([2], 4, seed)[0]) for seed in range(4000))
    assert set(seen) == {(3, 1), (2, 2), (1, 3)}
    for outcome, share in {(3, 1): 0.25, (2, 2): 0.5, (1, 3): 0.25}.items():
        assert seen[outcome] / 4000 == pytest.approx(share, abs=0.04)


def test_dropping_keeps_every_subset_equally_often():
    seen = Counter(tuple(align([4], 2, seed)[0]) for seed in range(3000))
    assert len(seen) == 6
    for n in seen.values():
        assert n / 3000 == pytest.approx(1 / 6, abs=0.04)


@pytest.mark.parametrize("counts", [[-1], [1.0], ["2"], [None], [2, 2.5]])
def test_bad_counts(counts):
    with pytest.raises(ValueError, match="count"):
        align(counts, 2, 0)
    with pytest.raises(ValueError, match="count"):
        suggest_d_max(counts)


@pytest.mark.parametrize("d_max", [0, -3, 2.0, "2", None])
def test_bad_d_max(d_max):
    with pytest.raises(ValueError, match="d_max"):
        align([1], d_max, 0)


@pytest.mark.parametrize("seed", [None, 0.5, (1, 2)])
def test_a_seed_that_cannot_be_repeated_is_refused(seed):
    with pytest.raises(ValueError, match="seed"):
        align([1], 2, seed)


def test_numpy_and_torch_counts_are_whole_numbers_too():
    assert align(np.array([2, 9]), np.int64(4), 7) == align(torch.tensor([2, 9]), 4, 7) == align([2, 9], 4, 7)


def test_duplicate_writes_copies_out():
    assert duplicate([[1, 2, 3], [], [4]], [[0, 1, 2], [], [3]]) == [2, 3, 3, 4, 4, 4]
    with pytest.raises(ValueError, match="same shape"):
        duplicate([[1, 2]], [[1]])
    with pytest.raises(ValueError, match="same shape"):
        duplicate([[1], [2]], [[1]])


def test_suggest_d_max_values():
    assert suggest_d_max([0, 0, 0]) == 1
    assert suggest_d_max([0, 0, 5]) == 5
    assert suggest_d_max([1] * 98 + [7] + [50]) == 7
    assert suggest_d_max([1] * 99 + [50]) == 1
    assert suggest_d_max([4, 1, 3, 2], quantile=0.5) == 2
    assert suggest_d_max([4, 1, 3, 2], quantile=1) == 4
    assert suggest_d_max([2, 3], quantile=1e-12) == 2


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=120), st.integers(1, 100))
def test_suggest_d_max_is_the_smallest_that_covers_the_share(counts, percent):
    # percent / 100 as a float is mostly not exact: 0.07 * 100 > 7. The exact share decides.
    d = suggest_d_max(counts, percent / 100)

    def covered(limit):
        return Fraction(sum(count <= limit for count in counts), len(counts)) >= Fraction(percent, 100)

    assert d >= 1
    assert covered(d)
    assert d == 1 or not covered(d - 1)


def test_suggest_d_max_survives_float_error():
    assert suggest_d_max([1] * 7 + [9] * 93, quantile=0.07) == 1  # 0.07 * 100 is 7.000000000000001


@pytest.mark.parametrize("quantile", [0, -0.1, 1.01, float("nan")])
def test_suggest_d_max_refuses(quantile):
    with pytest.raises(ValueError, match="quantile"):
        suggest_d_max([1], quantile)
    with pytest.raises(ValueError, match="at least one rollout"):
        suggest_d_max([])

"""Lesson 11: the update rules by hand, plain references written apart, and what the lesson claims."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from minimgrpo.lessons import asymmetry
from minimgrpo.lessons._asymmetry_game import ACTIONS, STATES, STEPS, Game

SWEEP = 0.4 + 7 * 0.8  # regret of trying all nine joint actions of the "gap" bandit once


@pytest.fixture(scope="module")
def measured():
    return asymmetry.measure([0, 1], [125, 500, 2000])


def test_an_update_by_hand():
    # H = 3, second visit: alpha = 4 / 5; target 1 + 2 + 0.5
    assert asymmetry.learn(3.0, 2, 1.0, 2.0, 0.5, 3) == pytest.approx(3 + 0.8 * 0.5)
    assert asymmetry.learn(123.0, 1, 1.0, 2.0, 0.5, 3) == 3.5  # the first visit forgets the start


def test_weights_of_the_learning_rate_have_the_known_sums():
    """Jin et al. 2018: what the i-th of t targets weighs in the end: sum_i w_i = 1, w_i <= 2 H / t."""
    t = 40
    for i in range(1, t + 1):
        q = 0.0
        for k in range(1, t + 1):
            q = asymmetry.learn(q, k, float(k == i), 0.0, 0.0, STEPS)
        assert 0 < q <= 2 * STEPS / t
    q = 5.0
    for k in range(1, t + 1):
        q = asymmetry.learn(q, k, 1.0, 0.0, 0.0, STEPS)
    assert q == pytest.approx(1)


def test_the_optimum_is_that_of_all_policies():
    """2 states, 2 steps, 9 joint actions: 6,561 policies, each evaluated."""
    game = Game.make("random", [4], states=2, steps=2)
    policies = np.array(list(itertools.product(range(ACTIONS**2), repeat=4))).reshape(-1, 2, 2)
    many = Game(np.repeat(game.mean, len(policies), 0), np.repeat(game.move, len(policies), 0))
    assert game.optimal()[:, 0].max(-1).mean() == pytest.approx(many.value(policies).max())


def test_a_value_is_what_walks_earn():
    game = Game.make("random", [1])
    joint = np.random.default_rng(0).integers(ACTIONS**2, size=(1, STEPS, STATES))
    many = Game(np.repeat(game.mean, 5000, 0), np.repeat(game.move, 5000, 0))
    x, a = many.walk(np.repeat(joint, 5000, 0), np.random.default_rng(1))
    earned = game.mean[0, np.arange(STEPS)[:, None], x[:-1], a].sum(0)
    assert earned.mean() == pytest.approx(game.value(joint)[0], abs=4 * earned.std() / 5000**0.5)


@pytest.mark.parametrize("kind", ["coord", "random"])
def test_mq_is_one_central_q_learner(kind):
    """Bitwise, against a plain loop over one table that draws the same random numbers."""
    game, episodes = Game.make(kind, [0]), 150
    regret, tables = asymmetry.mq(game, episodes)
    rng, scale = np.random.default_rng(0), asymmetry.bonus_scale(game, episodes, 0.03, private=False)
    q, visits = np.full((STEPS, STATES, ACTIONS**2), float(STEPS)), np.zeros((STEPS, STATES, ACTIONS**2))
    for k in range(episodes):
        policy = q.argmax(-1)
        assert regret[0, k] == pytest.approx(game.optimal()[0, 0].max(-1).mean() - game.value(policy[None])[0])
        x, a = game.walk(policy[None], rng)
        luck, before = rng.random((1, STEPS, 1)), q.copy()
        for h in range(STEPS):
            s, action = x[h, 0], a[h, 0]
            visits[h, s, action] += 1
            after = min(STEPS, before[h + 1, x[h + 1, 0]].max()) if h + 1 < STEPS else 0.0
            reward, bonus = luck[0, h, 0] < game.mean[0, h, s, action], scale / visits[h, s, action] ** 0.5
            q[h, s, action] = asymmetry.learn(q[h, s, action], visits[h, s, action], reward, after, bonus, STEPS)
    assert (tables[0, 0] == q).all() and (tables[0, 1] == q).all()


def test_private_rewards_part_the_tables():
    tables = asymmetry.mq(Game.make("coord", [0]), 50, common=False)[1]
    assert (tables[:, 0] != tables[:, 1]).any()


def test_players_who_want_different_conventions_miss_both():
    game = Game.make("coord", [0], 1, 1)
    played = game.meet(np.array([[0, 4, 0], [4, 0, 0]]).T[None].transpose(0, 2, 1))
    assert played.tolist() == [[1, 3, 0]] and game.mean[0, 0, 0, [1, 3, 0]].tolist() == [0.1, 0.1, 0.9]
    # a veto plays the next component: (0, 0) becomes (0, 1), (2, 2) of both becomes (0, 0)
    assert game.meet(np.array([[0], [0]])[None], np.array([[0], [1]])[None]).tolist() == [[1]]
    assert game.meet(np.array([[8], [8]])[None], np.array([[1], [1]])[None]).tolist() == [[0]]


def test_intervals_strike_off_what_is_worse_one_by_one():
    """Rewards without luck: joint action 5 pays 1, the others 0. Nine trials, eight vetoes, and it is settled."""
    game = Game.make("gap", [0], 1, 1)
    mean = np.zeros_like(game.mean)
    mean[..., 5] = 1
    regret, _, wanted = asymmetry.mq_intervals(replace(game, mean=mean), 30, c=0.01)
    assert np.flatnonzero(wanted[0, 0, 0]).tolist() == [5]
    assert regret[0, :9].tolist() == [1, 1, 1, 1, 1, 0, 1, 1, 1]
    vetoed = regret[0, 9:17].sum()  # both players go one on: (0, 1) -> (1, 2) is joint action 5, the best by luck
    assert vetoed == 7 and (regret[0, 17:] == 0).all()


def test_a_player_that_holds_nothing_for_worse_strikes_nothing_off():
    _, low, wanted = asymmetry.mq_intervals(Game.make("coord", [0]), 60, c=1.0)
    assert wanted.all() and (low <= 0.9 * STEPS).all()


def test_the_phases_by_hand():
    gap = Game.make("gap", [0], 1, 1)
    # K = 27: K' = 9^(1/3) * 9 = 18.7, so 19 episodes: two sweeps and the first joint action once more
    assert asymmetry.explore_episodes(gap, 27) == 19
    for bellman in (False, True):
        totals, lost = asymmetry.mexc(gap, [27], bellman=bellman)
        assert totals[0] - 8 * lost[0] == pytest.approx([2 * SWEEP + 0.4])
    regret = asymmetry.mdsee(gap, 100)
    assert regret.shape == (1, 100)
    assert regret[0, :9].sum() == pytest.approx(SWEEP) and regret[0, 11:29].sum() == pytest.approx(2 * SWEEP)
    assert asymmetry.mucb(gap, 9)[0].sum() == pytest.approx(SWEEP)


def test_the_estimated_model_becomes_the_model():
    game = Game.make("random", [0, 1])
    n = np.full(game.mean.shape, 1000.0)
    q = asymmetry._plan(game.mean[:, None] * n[:, None], game.move * n[..., None], n)
    assert np.allclose(q[:, 0], game.optimal())


def test_slack_makes_nearly_equal_tables_meet():
    """Both conventions within the slack: all take the first; without it, noise decides."""
    game = Game.make("coord", range(8))
    without, with_slack = (asymmetry.mexc(game, [1000], bellman=True, slack=s)[1][-1] for s in (0.0, 0.6))
    assert (with_slack < 0.2).all() and without.mean() > 1


def test_the_measurements(measured):
    totals = {name: total[-1].mean() for name, total in measured["totals"].items()}
    slopes = {name: asymmetry.slope([125, 500, 2000], total) for name, total in measured["totals"].items()}
    assert measured["same_tables"]
    assert slopes["naive"] > 0.85 and slopes["bellman"] > 0.85 and slopes["mq"] < 0.4 and slopes["believe"] < 0.4
    assert totals["mq"] < totals["intervals"] < 0.7 * totals["naive"]
    assert totals["believe"] < 0.1 * totals["naive"] and totals["slack"] < 0.5 * totals["bellman"]
    assert totals["mucb"] < 0.5 * totals["mucb private"]
    assert slopes["mexc gap"] < 0.7 and slopes["mdsee gap"] < 0.65  # where one action is best, a commit ends the losses
    printed, sound = measured["broken"]
    assert printed > 0.5 and sound <= 0.01


def test_the_verdicts_follow_the_numbers(measured, monkeypatch):
    def verdicts(power, **changed):
        totals = {name: np.array([500, 2000, 8000])[:, None] ** power * [1.0, 1.1] for name in measured["totals"]}
        fake = {"totals": totals, "same_tables": True, "broken": (0.0, 0.0)} | changed
        monkeypatch.setattr(asymmetry, "measure", lambda seeds, horizons: fake)
        return [c.verdict for c in asymmetry.claims(quick=True)]

    linear, root = verdicts(1.0, broken=(1.0, 0.0)), verdicts(0.5)
    forever = (1, 10)  # claims that something loses for ever
    assert all(v == ("shown" if i in forever else "reversed") for i, v in enumerate(linear))
    assert [i for i, v in enumerate(root) if v == "shown"] == [3, 4, 5, 6, 8]  # sqrt(K) is no log K and has not stopped
    assert verdicts(0.0, same_tables=False)[0] == "reversed"


def test_exploration_is_optimistic_too(monkeypatch):
    """Alg. 3 updates as Alg. 1 does, with the bonus of private rewards; iota is that of the longest horizon."""
    bonuses, learn = [], asymmetry.learn
    monkeypatch.setattr(asymmetry, "learn", lambda *numbers: bonuses.append(numbers[4]) or learn(*numbers))
    game = Game.make("gap", [0], 1, 1)
    asymmetry.mexc(game, [27])
    scale = asymmetry.bonus_scale(game, 27, 0.03, private=True)
    assert np.ravel(bonuses) == pytest.approx([scale] * 9 + [scale / 2**0.5] * 9 + [scale / 3**0.5])
    assert scale == pytest.approx(0.03 * np.log(2 * 1 * 9 * 27 / 0.1) ** 0.5)


@pytest.mark.lesson
def test_the_long_run():
    """The lesson's bounds, from 1,000 to 16,000 episodes: between these the slope of log K is 0.12."""
    horizons = [1000, 4000, 16000]
    found = asymmetry.measure([0, 1], horizons)
    slopes = {name: asymmetry.slope(horizons, total) for name, total in found["totals"].items()}
    stopped = ("mq", "intervals", "believe", "mucb", "mdsee gap")
    assert found["same_tables"] and all(slopes[name] < 0.3 for name in stopped)
    assert all(0.9 <= slopes[name] <= 1.1 for name in ("naive", "bellman", "mucb private"))
    assert 0.9 <= slopes["mexc"] <= 1.2 and 0.55 <= slopes["slack"] <= 0.8 and slopes["mexc gap"] < 0.7
    printed, sound = found["broken"]
    assert printed > 0.9 and sound == 0

"""Lesson 10: the update rule by hand, the model against independent references, and what the lesson claims."""

import numpy as np
import pytest

from minimgrpo.lessons import handoff
from minimgrpo.lessons.handoff import AGENTS, GAMMA, OPERATIONS, PRIVATE, STATES, Teams

MARKS = (2_000, 20_000)


@pytest.fixture(scope="module")
def measured():
    return handoff.measure([0, 1], MARKS)


def test_an_update_by_hand():
    # tau = 2: rewards 1 and 3, so R = 1 + 0.9 * 3 = 3.7; the recipient says 10, worth 0.81 * 10 = 8.1 now
    assert handoff.update(1.8, 3.7, GAMMA**2, 10.0, 0.1) == pytest.approx(1.8 + 0.1 * (11.8 - 1.8))
    assert handoff.update(1.8, 3.7, GAMMA**2, 10.0, 1.0) == pytest.approx(11.8)


def test_the_first_handoff_writes_one_number(monkeypatch):
    seen = []
    monkeypatch.setattr(handoff, "update", lambda q, *rest: seen.append(rest) or rest[0] + rest[1] * rest[2])
    teams = Teams.random([3])
    q = handoff.ic_q(teams, np.array([STATES]), np.array([1]), (1,))[1]
    ((reward, discount, message, alpha),) = seen
    (agent, x, y, a), *others = np.argwhere(q[0])
    tau = round(np.log(discount[0]) / np.log(GAMMA))
    pay = teams.pay[0, agent, x, y, a // AGENTS]
    assert not others and alpha == 1 and message == 0 and 1 <= tau <= teams.longest[0, agent, x, a // AGENTS]
    assert reward[0] == pytest.approx(sum(pay * GAMMA**s for s in range(tau)))


def test_the_model_by_hand():
    """One team whose every operation pays 1 a step: whatever one does, the value is 1 + 0.9 + 0.81 + ... = 10."""
    teams = Teams.random([0])
    teams = Teams(np.ones_like(teams.pay), teams.longest, teams.move)
    assert np.allclose(handoff.oracle(teams), 10)
    assert handoff.worth(teams, np.zeros((1, AGENTS, STATES, PRIVATE), int)) == pytest.approx([10])


def test_the_value_of_a_policy_is_that_of_a_simulation():
    """Independent of the equations: play a policy step by step, in time steps rather than handoffs."""
    teams = Teams.random([5])
    policy = np.random.default_rng(0).integers(OPERATIONS * AGENTS, size=(1, AGENTS, STATES, PRIVATE))
    rng, runs = np.random.default_rng(1), 4000
    who, x = rng.integers(AGENTS, size=runs), rng.integers(STATES, size=runs)
    left, total = np.zeros(runs, int), np.zeros(runs)
    y, operation, to = (np.zeros(runs, int) for _ in range(3))
    for time in range(80):
        new = left == 0
        y = np.where(new, rng.integers(PRIVATE, size=runs), y)
        operation = np.where(new, policy[0, who, x, y] // AGENTS, operation)
        to = np.where(new, policy[0, who, x, y] % AGENTS, to)
        left = np.where(new, rng.integers(1, teams.longest[0, who, x, operation] + 1), left)
        total += GAMMA**time * teams.pay[0, who, x, y, operation]
        left -= 1
        moved = (teams.move[0, who, x, operation].cumsum(-1) < rng.random((runs, 1))).sum(-1).clip(max=STATES - 1)
        x, who = np.where(left == 0, moved, x), np.where(left == 0, to, who)
    assert total.mean() == pytest.approx(handoff.worth(teams, policy)[0], abs=4 * total.std() / runs**0.5)


def test_no_policy_beats_the_oracle():
    teams = Teams.random([0, 1])
    q = handoff.oracle(teams)
    best = handoff.worth(teams, q.argmax(-1))
    assert best == pytest.approx(q.max(-1).mean(-1).mean((1, 2)))
    for seed in range(5):
        policy = np.random.default_rng(seed).integers(OPERATIONS * AGENTS, size=q.shape[:4])
        assert (handoff.worth(teams, policy) < best).all()


def test_the_gap_by_hand():
    q = np.zeros((1, AGENTS, STATES, PRIVATE, OPERATIONS * AGENTS))
    q[0, 2, :, 1, 4] = np.arange(STATES)  # 0 .. 11
    assert [handoff.gap(q, c)[0] for c in handoff.CELLS] == [11, 5, 2, 1, 0]


def test_one_cell_has_one_policy_and_twelve_are_the_artifact():
    q = np.random.default_rng(0).random((2, AGENTS, STATES, PRIVATE, OPERATIONS * AGENTS))
    policy = handoff.greedy(q, np.array([1, STATES]))
    assert (policy[0] == policy[0][:, :1]).all()
    assert (policy[1] == q[1].argmax(-1)).all()


def test_the_learner_against_a_plain_one():
    """The same draws, one run and one number at a time; the first run hears the recipient, the second asks itself."""
    teams, cells, steps, rng = Teams.random([3, 4]), [4, 12], 300, np.random.default_rng(0)
    found = handoff.ic_q(teams, np.array(cells), np.array([1, 0]), (steps,))[steps]
    q, visits = np.zeros_like(found), np.zeros_like(found)
    who, x, y = [0, 0], rng.integers(STATES, size=2), rng.integers(PRIVATE, size=2)
    for _ in range(steps):
        explore, which, stay, move, coin = rng.random((5, 2))
        for r in range(2):
            row = q[r, who[r], x[r] * cells[r] // STATES, y[r]]
            a = int(which[r] * 9) if explore[r] < 0.3 else int(row.argmax())
            operation, to = divmod(a, AGENTS)
            tau = 1 + int(stay[r] * teams.longest[r, who[r], x[r], operation])
            R = sum(teams.pay[r, who[r], x[r], y[r], operation] * GAMMA**s for s in range(tau))
            after = int((teams.move[r, who[r], x[r], operation].cumsum() < move[r]).sum().clip(max=STATES - 1))
            adviser = to if r == 0 else who[r]
            m = q[r, adviser, after * cells[r] // STATES, int(coin[r] * 2)].max()
            visited = visits[r, who[r], x[r] * cells[r] // STATES, y[r]]
            visited[a] += 1
            row[a] += visited[a] ** -0.7 * (R + GAMMA**tau * m - row[a])
            who[r], x[r], y[r] = to, after, int(coin[r] * 2)
    assert np.allclose(found, q) and (q > 1).any()


def test_values_come_near_the_oracle_and_fall_with_what_is_hidden(measured):
    full = measured["cells"][-1]
    assert (full > 0.93).all() and (full <= 1 + 1e-9).all()
    assert (measured["steps"][-1] == full).all() and (measured["steps"][0] < full).all()
    assert (measured["cells"][0] < full - 0.15).all() and (np.diff(measured["cells"].mean(1)) > 0).all()
    assert (measured["silent"] < full - 0.05).all()
    assert (measured["loss"] <= 2 * measured["gap"] / (1 - GAMMA) ** 2 + 0.1 / GAMMA / (1 - GAMMA)).all()
    for finer in ([0, 1, 2, 4], [0, 1, 3, 4]):  # 6 pieces are no refinement of 4
        assert (np.diff(measured["gap"][finer], axis=0) <= 0).all()
    assert measured["loss"] == pytest.approx(measured["best"] * (1 - measured["cells"]))
    assert (measured["gap"] >= 0).all() and (measured["gap"][-1] == 0).all()


def test_the_verdicts_follow_the_numbers(measured, monkeypatch):
    def verdicts(**changed):
        monkeypatch.setattr(handoff, "measure", lambda seeds, marks: measured | changed)
        return [c.verdict for c in handoff.claims(quick=True)]

    ones = np.ones_like(measured["cells"])
    assert verdicts(cells=ones * np.array([[0.5], [0.6], [0.7], [0.8], [0.99]]))[:3] == ["shown"] * 3
    assert verdicts(cells=ones * np.array([[0.9], [0.8], [0.7], [0.6], [0.1]]))[:3] == ["reversed"] * 3
    assert verdicts(cells=ones * 0.97)[:2] == ["not shown"] * 2
    assert verdicts(cells=ones * 0.85)[0] == "not shown"
    for e, verdict in ((0.06, "not shown"), (0.04, "shown")):  # bounds of 12 and 8, values of at most 10
        assert verdicts(gap=np.full_like(measured["gap"], e))[3] == verdict
    assert verdicts()[3] == "not shown"


@pytest.mark.lesson
def test_claims():
    assert [claim.verdict for claim in handoff.claims()] == ["shown", "shown", "shown", "not shown"]
    full = handoff.measure(list(range(5)), (60_000,))["cells"][-1]
    assert full.mean() >= 0.98

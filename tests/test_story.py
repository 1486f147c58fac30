"""The four fixed rollouts that notebooks 01 to 04 follow."""

import pytest
import torch

from minimgrpo import protocol, story, tasks
from minimgrpo.chat import Chat
from minimgrpo.experts import Rating
from minimgrpo.grpo import group_advantages
from minimgrpo.policy import Policy
from minimgrpo.tools import Tools


@pytest.fixture(scope="module")
def policy():
    return Policy.load("atlas-lm")


@pytest.fixture(scope="module")
def four(policy):
    return story.rewarded(story.rollouts(policy))


def test_it_is_the_question_that_the_texts_are_about():
    question = story.question()
    assert (question.kind, question.answer, question.entities) == ("two-hop", "Ouguiya", ("Mauritania",))


def test_jagged_calls_and_every_way_to_end(four):
    assert [len(r.calls) for r in four] == [0, 1, 2, 5]
    assert [r.planner.stop_reason for r in four] == ["result", "format", "result", "result"]
    assert [t.stop_reason for t in four[3].calls] == ["result", "result", "result", "format", "result"]
    assert [r.planner.result for r in four] == ["unknown", "", "Ouguiya", "Pound"]
    assert [t.result for t in four[2].calls] == ["Mauritania", "Ouguiya"]


def test_rewards_are_the_library_s(four):
    assert [r.planner.reward for r in four] == [0.1, 0.0, 1.0, 0.1]
    by_call = [t.reward for r in four for t in r.calls]
    # 0.1 format + 0.4 planner's success + 0.5 rubric; the rubric's four criteria, averaged
    two_thirds = 0.5 * (3 + 0.6667) / 4
    right = [0.1 + two_thirds, 0.5 + two_thirds, 1.0, 0.1 + 0.5 * 0.75, 0.6, 0.1 + two_thirds, 0.0, 0.6]
    assert by_call == pytest.approx(right)


def test_messages_parse_and_tools_answer_as_they_do_in_training(four):
    tools = Tools(tasks.load_pages())
    for trajectory in [t for r in four for t in (r.planner, *r.calls)]:
        said = [m["content"] for m in trajectory.messages if m["role"] == "assistant"]
        calls = [a for a in (protocol.parse(trajectory.agent, text) for text in said) if isinstance(a, protocol.Call)]
        assert [(c.name, c.arguments) for c in calls] == [(c["name"], c["arguments"]) for c in trajectory.tool_calls]
        if trajectory.agent == "executor":
            assert [tools.run(c.name, c.arguments).text for c in calls] == [c["output"] for c in trajectory.tool_calls]
        else:
            assert len(trajectory.tool_calls) == len(four[trajectory.rollout].calls)


def test_exact_tokens(four, policy):
    """The ids are those of the script through the chat template, the mask is 1 on what was written, stop included."""
    chat: Chat = policy.chat
    for rollout, (planner_says, executor_says) in zip(four, story.SCRIPT, strict=True):
        trajectories = [rollout.planner, *rollout.calls]
        for trajectory, says in zip(trajectories, [planner_says, *executor_says], strict=True):
            ids = chat.open(trajectory.agent, trajectory.messages[1]["content"])
            mask = [0] * len(ids)
            for turn, text in enumerate(says):
                written = [*chat.encode(text), chat.stop_id]
                read = []
                if turn < len(trajectory.tool_calls):
                    read = chat.respond(trajectory.tool_calls[turn]["output"], chat.stop_id)
                ids += written + read
                mask += [1] * len(written) + [0] * len(read)
            assert (ids, mask) == (trajectory.token_ids, trajectory.mask)
            assert len(trajectory.logprobs) == len(ids)


def test_logprobs_are_the_policy_s(four, policy):
    for role in ("planner", "executor"):
        rows = [t for r in four for t in (r.planner, *r.calls) if t.agent == role]
        with torch.no_grad():
            scored, mask = policy.score(role, [t.token_ids for t in rows], [t.mask for t in rows])
        assert torch.allclose(scored, story.padded([t.logprobs for t in rows]), atol=1e-5)
        assert (scored[mask == 1] < 0).all() and (scored[mask == 0] == 0).all()


def test_same_words_opposite_fate(four):
    """What the lessons on shared fate rest on: one report, word for word, in a lost and in a won rollout."""
    lost, won = four[1].calls[0], four[2].calls[0]
    assert lost.token_ids == won.token_ids and won.reward - lost.reward == pytest.approx(0.4)
    assert group_advantages([r.planner.reward for r in four]).tolist()[1] < 0


def test_another_expert(policy):
    class Generous:
        def rate(self, trajectories):
            return [Rating(1.0, {}) for _ in trajectories]

    four = story.rewarded(story.rollouts(policy), Generous())
    assert [t.reward for t in four[3].calls] == pytest.approx([0.6, 0.6, 0.6, 0.0, 0.6])


def test_helpers_of_the_notebooks(four):
    assert "  executor: Ouguiya" in story.transcript(four[2]).splitlines()
    assert "    -> Mauritania: Its currency is the Ouguiya. [id 185]" in story.transcript(four[2]).splitlines()
    assert story.transcript(four[1]).splitlines()[-1] == "stopped (format: the tool call is not JSON)"
    assert story.said("=", "result; reward 0.10") == "= result; reward 0.10"
    assert story.table(["a"], [[0.5], [3]]) == "| a |\n| --- |\n| 0.500 |\n| 3 |"
    assert story.same([[1, 0.5]], [[1.0, 0.5]]) and story.same("yes", "yes")
    for wrong in (None, 1.0, [[1.0, 0.6]], [[1.0]], [1.0, 0.5], "no"):
        assert not story.same(wrong, [[1.0, 0.5]])

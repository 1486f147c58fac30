"""One agent alone: what its demonstrations show, what a fuller search result is, and that its rollouts are exact."""

import random
import re

import pytest

from minimgrpo import agents, atlas, solo, tasks
from minimgrpo.agents import Limits, generator
from minimgrpo.demonstrations import EXECUTOR_SHARES, Demonstrator
from minimgrpo.policy import Policy
from minimgrpo.protocol import Call, Malformed, Result, parse
from minimgrpo.solo import SoloDemonstrator
from minimgrpo.tools import Page, Tools

PIECES = ["An", "Bo", "Ri", "Sta", "ia", "kel", "um", "tor", "mi", "ves", "lo", "gra", "é"]


def written(demo):
    return [parse("solo", m.content) for m in demo.messages if m.role == "assistant"]


def test_without_mistakes_it_looks_up_what_is_asked_and_answers_with_what_it_read():
    demonstrator = SoloDemonstrator(random.Random(0), PIECES, mistakes=False)
    calls = {"puzzle": 0, "lookup": 1, "two-hop": 2, "calculation": 3}
    for kind, count in calls.items():
        for _ in range(50):
            demo = demonstrator.solo(kind)
            *tools, last = written(demo)
            assert len(tools) == count and all(isinstance(t, Call) for t in tools) and isinstance(last, Result)
            read = " ".join(m.content for m in demo.messages if m.role == "user")
            if kind in ("lookup", "two-hop"):
                assert re.search(rf"(?<!\w){re.escape(last.text)}(?!\w)", read), (last.text, read)
            if kind == "calculation":
                assert str(eval(tools[-1].arguments["code"])) == last.text


def test_with_mistakes_queries_are_vague_in_the_executors_share_and_messages_break():
    demonstrator = SoloDemonstrator(random.Random(1), PIECES)
    demos = [demonstrator.solo("lookup") for _ in range(3000)]
    first = [written(demo)[0] for demo in demos]
    asked = {a for attributes in atlas.ASKED.values() for a in attributes}
    vague = sum(isinstance(a, Call) and a.arguments.get("query") in asked for a in first) / len(demos)
    assert abs(vague - EXECUTOR_SHARES["query"]["vague"]) < 0.03
    assert 0.02 < sum(isinstance(written(demo)[-1], Malformed) for demo in demos) / len(demos) < 0.1


@pytest.mark.parametrize("sentences", [1, 3, 20])
def test_a_demonstration_shows_of_a_page_what_the_search_shows(sentences):
    demonstrator = Demonstrator(random.Random(2), PIECES, hits=2, sentences=sentences)
    for _ in range(40):
        entity = demonstrator.invent.entity()
        attribute = random.Random(3).choice([a for a in atlas.ASKED[entity.kind] if a != "continent"])
        tools = Tools([Page("7", entity.name, atlas.page_text(entity))], sentences=sentences)
        shown = tools.run("search", {"query": f"{attribute} {entity.name}"}).text
        lines = demonstrator._found(entity, attribute).splitlines()
        assert re.sub(r"\[id \d+\]", "", lines[0]) == re.sub(r"\[id \d+\]", "", shown)
        assert len(lines) == 2 and (sentences == 1) == (shown.count(". ") == 1)


def test_a_solo_rollout_keeps_everything_in_one_context(monkeypatch):
    policy = Policy.load(roles=("solo",))
    # the base has never been alone: it is told what to look up, again and again
    monkeypatch.setattr(
        agents.protocol, "parse", lambda role, _text: Call("search", {"query": f"capital Ghana {role}"})
    )
    questions, tools = tasks.load_questions("validation")[:3], Tools(tasks.load_pages(), sentences=2)
    found = agents.solve(policy, tools, questions, 2, Limits(turns=3), 1.0, generator(0))
    assert [(t.question_id, t.rollout) for t in found] == [(q.task_id, k) for q in questions for k in range(2)]
    for t in found:
        assert t.agent == "solo" and len(t.token_ids) == len(t.mask) == len(t.logprobs) and t.stop_reason == "turns"
        assert policy.chat.tokenizer.decode(t.token_ids).count("Its capital is Accra.") == 2
        assert sum(t.mask) == t.sampled > 0


def test_the_warm_start_is_about_invented_names_and_repeats_itself():
    policy = Policy.load(roles=("solo",))
    pages = tasks.load_pages()
    one, two = (solo.demonstrations(policy.chat.tokenizer, pages, 30, 0, sentences=3) for _ in range(2))
    assert one == two != solo.demonstrations(policy.chat.tokenizer, pages, 30, 1, sentences=3)

"""The growth of a step's cost and the two processes, on small random models and few steps."""

import re

from minimgrpo import agents, scale, tasks
from minimgrpo.agents import Limits
from minimgrpo.servers import Config, Team
from minimgrpo.tools import Tools

SMALL = {"questions": 2, "rollouts": 2, "threads": 1}


def test_a_script_makes_exactly_as_many_delegations_as_it_says(load, tmp_path):
    policy, parse = load(), agents.protocol.parse
    policy.chat.stop_ids = set(range(600))  # each message is one token: a random model ends none by itself
    world = tasks.load_questions("train"), Tools(tasks.load_pages())
    for delegations in (0, 2):
        config = Config(**SMALL, limits=Limits(turns=3, calls=3, context=4096, length=4))
        policy.max_context = 4096
        with scale.Script(delegations):
            planned, executed, _ = Team(config, policy, tmp_path / str(delegations), *world).step(1)
        assert {len(t.tool_calls) for t in planned} == {delegations}
        assert len(executed) == len(planned) * delegations
        assert {len(t.tool_calls) for t in executed} <= {1}
        assert {t.stop_reason for t in planned + executed} == {"result"}
    assert agents.protocol.parse is parse  # put back


def test_everything_is_printed_and_the_growth_is_that_of_the_rows(folders, tmp_path, capsys):
    config = Config(model=str(folders["llama"]), **SMALL)
    scale.rollouts_and_turns(config, tmp_path, rollouts=(8, 16), delegations=(1, 2))
    out = capsys.readouterr().out
    assert re.findall(r"^(\d)\. ", out, re.M) == ["1", "2"] and out.count("growth: ") == 2
    assert re.search(r"^8 +[\d.]+ +[\d.]+$", out, re.M) and re.search(r"^16 +", out, re.M)


def test_one_process_and_two_are_timed_as_real_processes(folders, tmp_path, capsys):
    config = Config(model=str(folders["llama"]), **SMALL, limits=Limits(length=4))
    scale.one_and_two_processes(config, tmp_path, steps=3)
    out = capsys.readouterr().out
    one, two = re.findall(r"(?:threads|each) +([\d.]+) +([\d.]+)", out)
    assert one[1] == "1.00" and float(two[0]) > 0
    share = float(re.search(r"of both: ([\d.]+) % of a step", out)[1])
    assert share > 0
    assert int(re.search(r"([\d,]+) bytes a step", out)[1].replace(",", "")) > 100
    outcomes = [(tmp_path / run / "outcomes" / "step-000003.jsonl").read_bytes() for run in ("one-1", "two")]
    assert outcomes[0] == outcomes[1]

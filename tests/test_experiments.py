"""The experiments: that they test the library and no second implementation, and that verdicts follow their rules."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import FEW, SHORT

from minimgrpo import tasks
from minimgrpo.experiments import __main__ as command
from minimgrpo.experiments import pool, trainer
from minimgrpo.experiments.graders import Accurate, Superficial
from minimgrpo.experiments.setting import Setting
from minimgrpo.experiments.studies import BY_NAME, MEASURES, STUDIES
from minimgrpo.experiments.trainer import Run
from minimgrpo.experiments.verdicts import judge
from minimgrpo.experiments.weights import ALIGNMENTS
from minimgrpo.grpo import group_advantages
from minimgrpo.log import LogError
from minimgrpo.servers import Team
from minimgrpo.settle import settle_executor
from minimgrpo.tools import Tools
from minimgrpo.trajectory import Trajectory

# ------------------------------------------------------------------------------------------- the same as the library's


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_is_the_servers_run_to_the_bit(load, tmp_path, checksums, staleness):
    config = replace(SHORT, staleness=staleness)
    pages = tasks.load_pages()
    policies = [load(seed=config.seed) for _ in range(2)]
    for policy in policies:
        policy.chat.stop_ids = {policy.chat.tokenizer.eos_token_id, *range(20, 90)}  # else a message never ends
    team = Team(config, policies[0], tmp_path / "run", FEW, Tools(pages))
    run = Run(Setting(config=config), pages, FEW, policies[1])
    for step in range(1, config.steps + 1):
        planned, executed, measured = team.step(step)
        run.step(step)
        assert run.history[-1]["planner"]["correct"] == round(measured["planner"]["correct"], 4)
        assert run.history[-1]["executor"]["staleness"] == measured["executor"]["staleness"]
    moved = 0
    for role in ("planner", "executor"):
        ours, theirs = run.policy.parameters(role), team.planner.policy.parameters(role)
        assert run.learners[role].version == config.steps
        for name, parameter in ours.items():
            assert torch.equal(parameter, theirs[name]), name
        fresh = load(seed=config.seed).parameters(role)
        moved += any(not torch.equal(parameter, fresh[name]) for name, parameter in ours.items())
    assert moved == 2 and executed and planned  # both roles learned something that could have differed

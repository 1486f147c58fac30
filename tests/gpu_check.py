"""What ``gpu_check.sh`` runs: train for real on each model and print what it took and whether it helped.

Tokens per second are those of all trajectories by the seconds of the rollouts, and of the updates; the log-prob gap is
the largest difference of a sampled token's log-prob from the same one scored (half precision rounds; above 0.5
something is wrong); GiB is the most that torch has held, on the fullest GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from minimgrpo import base, bench, display, evaluate, tasks, train
from minimgrpo.agents import Limits
from minimgrpo.learner import Objective
from minimgrpo.policy import Policy
from minimgrpo.servers import Config, Team


def settings(model: str, device: str, small: bool) -> Config:
    """The demo's for atlas-lm; for any other model fewer conversations of longer messages, and a warm-up."""
    given = {"model": model, "planner_device": device, "executor_device": device, "steps": 40}
    if model == "atlas-lm":
        return Config(**given)
    size = {"questions": 2, "rollouts": 2, "warmup": 4} if small else {"questions": 8, "rollouts": 8, "warmup": 400}
    return Config(**given, **size, objective=Objective(lr=2e-4, tokens=8192), limits=Limits(length=80, context=2048))


def gap(policy: Policy, role: str, temperature: float = 1.0) -> float:
    """The largest difference of a sampled token's log-prob, sampled and scored, over 8 messages."""
    prompts = [policy.chat.open(role, question.question) for question in tasks.load_questions("train")[:8]]
    samples = policy.conversations(role, prompts).generate(list(range(8)), None, 24, temperature)
    ids = [prompt + sample.ids for prompt, sample in zip(prompts, samples, strict=True)]
    masks = [[0] * len(prompt) + [1] * len(sample.ids) for prompt, sample in zip(prompts, samples, strict=True)]
    with torch.no_grad():
        logprobs, mask = policy.score(role, ids, masks, temperature)
    return (logprobs[mask.bool()].cpu() - torch.tensor([x for s in samples for x in s.logprobs])).abs().max().item()


def correct(team: Team, count: int) -> float:
    """The share of right answers to the first test questions, greedily."""
    config, questions = team.config, tasks.load_questions("test")[:count]
    place = team.planner.policy, team.executor.tools, questions, 0.0, config.seed, config.limits
    at_once = config.questions * config.rollouts
    return evaluate.attempt(*place, at_once, executor_policy=team.executor.policy).numbers["accuracy"]


def check(model: str, device: str, seconds: float, small: bool, root: Path) -> dict[str, str]:
    """Train until the time is up -> the model's column of the table."""
    started = time.perf_counter()
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    team = train.load_team(root, settings(model, device, small), resume=False)
    difference = max(gap(team.planner.policy, "planner"), gap(team.executor.policy, "executor"))
    count = 8 if small else 40
    before = correct(team, count)
    team.resume()  # the warm-up
    spent, tokens, step = {"sampled": 0.0, "trained": 0.0}, {"sampled": 0, "trained": 0}, 0
    while step < team.config.steps and (step == 0 or time.perf_counter() - started < seconds):
        step += 1
        planned, executed, measured = team.step(step)
        tokens["sampled"] += sum(t.sampled for t in planned + executed)
        spent["sampled"] += measured["rollout_seconds"]
        tokens["trained"] += sum(measured[role]["trained_tokens"] for role in ("planner", "executor"))
        spent["trained"] += sum(measured[role]["learn_seconds"] for role in ("planner", "executor"))
    speed = {name: tokens[name] / spent[name] for name in tokens}
    after = correct(team, count)
    held = max(map(torch.cuda.max_memory_allocated, gpus)) / 2**30 if gpus else bench.peak_memory() / 1024
    policies = (team.planner.policy, team.executor.policy)
    return {
        "model": Path(model).name,
        "on": " ".join(sorted({str(policy.device) for policy in policies})),
        "computes in": str(policies[0].model.dtype).removeprefix("torch."),
        "GiB": f"{held:.2f}",
        "tokens/s sampled": f"{speed['sampled']:.0f}",
        "tokens/s trained": f"{speed['trained']:.0f}",
        "log-prob gap": f"{difference:.4f}",
        f"right of {count}, before": f"{before:.2f}",
        f"right of {count}, after": f"{after:.2f}",
        "steps": str(step),
        "seconds": f"{time.perf_counter() - started:.0f}",
    }


def main() -> int | str:
    parser = argparse.ArgumentParser("gpu_check", description="Train for real and print what it took.")
    parser.add_argument("model", nargs="?", help="a folder, a GGUF file or a hub name, after atlas-lm")
    parser.add_argument("--device", default="auto", help="auto: every GPU; cpu tries the check itself, on less")
    parser.add_argument("--seconds", type=float, default=540, help="for everything, shared by the models")
    args = parser.parse_args()
    if args.device == "auto" and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA GPU here: nothing to check")
        return 0
    models = ["atlas-lm", *([args.model] if args.model else [])]
    columns, small, problem = [], args.device == "cpu", 0
    with tempfile.TemporaryDirectory() as folder:
        for number, model in enumerate(models):
            share = args.seconds * (0.3 if number == 0 and len(models) > 1 else 0.7 if number else 1)
            try:
                # some of each share is for the second evaluation
                columns.append(check(model, args.device, 0.8 * share, small, Path(folder) / str(number)))
            except base.ModelError as error:
                problem = f"gpu_check: {error}"
    if columns:
        head, *rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
        display.print_table(display.console(), head, rows)
    return problem


if __name__ == "__main__":
    sys.exit(main())

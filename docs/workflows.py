"""Train workflows and measure them before and after: ``python docs/workflows.py voting eval-opt --seeds 0 1``.

Appends one line of JSON for each run to ``data/results/workflows.jsonl``: accuracy of the team and of each role by
itself on validation questions (one attempt each at T = 1, before and after), accuracy in every step, and the length of
each role's gradient. A run takes about a minute of one core. Notebook 09 reads that file, which these made:

    python docs/workflows.py voting eval-opt orch-workers debate advisor swarm --seeds 0 1 2 --sharing isolated shared
    python docs/workflows.py voting eval-opt --seeds 0 1 2 --credit per-agent difference shapley
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from minimgrpo import tasks, train, workflow_team
from minimgrpo.workflows import CREDITS, SHARINGS, WORKFLOWS

RESULTS = tasks.DATA / "results" / "workflows.jsonl"


def measure(config: workflow_team.WorkflowConfig, tested: int) -> dict:
    """Train as ``config`` says, in a folder that is thrown away -> what was measured."""
    started = time.process_time()
    questions = tasks.load_questions("validation")[:tested]
    with tempfile.TemporaryDirectory() as folder:
        team = train.load_workflow(Path(folder) / "run", config, resume=False)
        train.resumed(team)
        before = team.evaluate(questions)
        steps = []
        for *_, facts in train.train(team):
            print(workflow_team.line(facts, config.steps), flush=True)
            row = next(row for name, row in facts.items() if name != "step")
            steps.append({"correct": row["correct"], "grad_norms": workflow_team.grad_norms(facts)})
        after = team.evaluate(questions)
    asked = ("workflow", "sharing", "credit", "seed", "steps", "questions", "rollouts", "warmup")
    return {
        **{name: getattr(config, name) for name in asked},
        "tested": tested,
        "before": before,
        "after": after,
        "each_step": steps,
        "cpu_seconds": round(time.process_time() - started),
    }


def rounded(value):
    """The same with floats of four digits."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workflow", nargs="+", choices=WORKFLOWS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--sharing", nargs="+", choices=SHARINGS, default=["isolated"])
    parser.add_argument("--credit", nargs="+", choices=CREDITS, default=["team"])
    parser.add_argument("--steps", type=int, default=train.WORKFLOW_RUN.steps)
    parser.add_argument("--questions", type=int, default=train.WORKFLOW_RUN.questions)
    parser.add_argument("--tested", type=int, default=120)
    args = parser.parse_args()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for workflow in args.workflow:
            for sharing in args.sharing:
                for credit in args.credit:
                    config = replace(train.WORKFLOW_RUN, workflow=workflow, sharing=sharing, credit=credit, threads=1)
                    config = replace(config, seed=seed, steps=args.steps, questions=args.questions)
                    found = measure(config, args.tested)
                    with open(RESULTS, "a", encoding="utf-8") as file:
                        file.write(json.dumps(rounded(found)) + "\n")


if __name__ == "__main__":
    main()

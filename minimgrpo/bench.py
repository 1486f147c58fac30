"""What a step costs, and against what: ``python -m minimgrpo.bench``.

Five measurements in one process, so that their ratios hold on any machine:

1. CPU-seconds (all threads of this process together) and wall seconds of a training step, by part;
2. throughput: trajectories and trained tokens per CPU-second;
3. what the alignment costs: the same executor batch weighted by copies, not aligned, and literally duplicated;
4. what the second adapter costs in memory, each case in a process of its own;
5. TRL's GRPOTrainer on the same base, with as many completions, of as many tokens, as our trajectories.

The library carries no timing code: for the bench the functions in ``timed_functions`` are wrapped, and the innermost one
that is running gets the time. The interpreter of the Python tool is another process: its time is wall time only.

How TRL is treated: its own setup for LoRA on a 4-bit base and, since that is not its fastest on a CPU, the same on a
float32 base; the ratio is against the faster one. One micro-batch per step, no checkpointing of gradients, no KL, no
logging, a reward that costs nothing. Its completions are one message each and run no tools. Ours has groups in which all
rewards are equal, and skips them; its random rewards leave none: that is one of the things the ratio measures.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from unittest import mock

from minimgrpo import display

with display.interruptible():  # torch and transformers take seconds to import
    import torch

    from minimgrpo import log, servers, tasks, train
    from minimgrpo.agents import generator
    from minimgrpo.alignment import align, duplicate
    from minimgrpo.chat import ChatError
    from minimgrpo.learner import Learner, Objective
    from minimgrpo.log import LogError
    from minimgrpo.policy import ModelError, Policy
    from minimgrpo.sampler import Conversations
    from minimgrpo.servers import Config, Team
    from minimgrpo.tools import Tools
    from minimgrpo.trajectory import Trajectory

PARTS = ("sampling", "tools", "log", "checkpoints", "scoring", "backward", "rest")
FLAGS = ("questions", "rollouts", "model", "threads", "seed")  # the fields of Config that the command takes
D_MAX = 8  # of the alignment's measurement


# ------------------------------------------------------------------------------------------------ 1, 2: a step's parts


class Meter:
    """CPU and wall seconds by part, each moment counted once: for the innermost part that is running, else for "rest"."""

    def __init__(self):
        self.cpu, self.wall = Counter(), Counter()
        self.running = ["rest"]
        self.since = time.process_time(), time.perf_counter()

    def charge(self) -> None:
        """Give the time since the last charge to the part that is running."""
        now = time.process_time(), time.perf_counter()
        self.cpu[self.running[-1]] += now[0] - self.since[0]
        self.wall[self.running[-1]] += now[1] - self.since[1]
        self.since = now

    def wrap(self, function, part: str):
        """``function``, its time counted as ``part``."""

        @functools.wraps(function)
        def timed(*args, **kwargs):
            self.charge()
            self.running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.charge()
                self.running.pop()

        return timed


def timed_functions() -> list[tuple[object, str, str]]:
    """(where it lives, its name, the part it counts for)"""
    return [
        (Conversations, "generate", "sampling"),
        (Tools, "run_many", "tools"),
        (log, "publish", "log"),
        (log, "publish_text", "log"),
        (log, "read", "log"),
        (log, "publish_folder", "checkpoints"),
        (shutil, "rmtree", "checkpoints"),
        (Policy, "score", "scoring"),
        (torch.Tensor, "backward", "backward"),
        (torch.nn.utils, "clip_grad_norm_", "backward"),
        (torch.optim.Adam, "step", "backward"),
    ]


def measure(team: Team) -> tuple[Meter, Counter, list[Trajectory]]:
    """Train ``team``; its first step warms up -> the meter, counts of what was done, the last step's executor batch."""
    meter, done = Meter(), Counter()
    with contextlib.ExitStack() as stack:
        for owner, name, part in timed_functions():
            stack.enter_context(mock.patch.object(owner, name, meter.wrap(getattr(owner, name), part)))
        for step, planned, executed, measured in train.train(team):
            meter.charge()
            if step == 1:
                meter.cpu.clear()
                meter.wall.clear()
                continue
            for t in planned + executed:
                written = sum(message["role"] == "assistant" for message in t.messages)
                done.update(trajectories=1, sampled=t.sampled, read=len(t.token_ids) - t.sampled, turns=written)
            for role in ("planner", "executor"):
                done.update({name: measured[role][name] for name in ("trained", "trained_tokens")})
            meter.since = time.process_time(), time.perf_counter()  # counting is no part of a step
    return meter, done, executed


def peak_memory() -> float:
    """The most memory this process has held so far, in MB."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux: its ru_maxrss would start at what the *parent* held when it started this process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


# ------------------------------------------------------------------------------------------------------ 3: alignment


def alignment_costs(team: Team, step: int, executed: list[Trajectory], repeats: int = 9) -> dict[str, tuple] | None:
    """Settle and learn from one step's executor batch in three ways -> (trajectories, median CPU-seconds) of each.

    None when there is nothing to learn from in the batch.
    """
    outcomes = log.read(team.log.outcomes(step))

    def settled(copies_of) -> list[Trajectory]:
        team.executor.done = [replace(t) for t in executed]
        with mock.patch.object(servers, "align", copies_of):
            return team.executor.settle(step, outcomes)

    def weights() -> list[Trajectory]:
        return settled(lambda counts, _d_max, seed: align(counts, D_MAX, seed))

    def written_out() -> list[Trajectory]:
        batch = weights()
        return [replace(t, copies=1) for t in duplicate([batch], [[t.copies for t in batch]])]

    ways = {
        "not aligned": lambda: settled(lambda counts, _d_max, _seed: [[1] * count for count in counts]),
        f"D_max = {D_MAX}, as weights": weights,
        f"D_max = {D_MAX}, duplicated": written_out,
    }
    if not all(any(t.advantage for t in way()) for way in ways.values()):
        return None
    seconds, sizes = {name: [] for name in ways}, {}
    for repeat in range(repeats + 1):
        for name in list(ways)[:: 1 if repeat % 2 else -1]:  # back and forth, so that no way has the better place
            started = time.process_time()
            batch = ways[name]()
            team.executor.learner.update(batch)
            seconds[name].append(time.process_time() - started)
            sizes[name] = len(batch)
    return {name: (sizes[name], statistics.median(seconds[name][1:])) for name in ways}  # the first warms up


# --------------------------------------------------------------------------------------------------------- 4: memory


def footprint(model: str, roles: list[str], seed: int = 0) -> float:
    """Peak memory in MB of a process that loads the base with an adapter for each role, samples and trains one step."""
    base = Policy.load(model, roles=roles, seed=seed)
    for role in roles:
        users = [q.question for q in tasks.load_questions("train")[:2] for _ in range(8)]
        prompts = [base.chat.open(role, user) for user in users]
        samples = base.conversations(role, prompts).generate(list(range(16)), None, 24, 1.0, generator(seed, role))
        batch = [Trajectory(role, str(i), 0, advantage=(-1.0) ** i) for i in range(16)]
        for trajectory, user, ids, sample in zip(batch, users, prompts, samples, strict=True):
            trajectory.read("user", user, ids)
            trajectory.wrote(base.chat.decode(sample.ids), sample.ids, sample.logprobs)
        Learner(base, role, Objective()).update(batch)
    return peak_memory()


def footprints(model: str) -> list[float]:
    """``footprint`` with one adapter and with two, each in a new process."""
    return [
        float(
            subprocess.run(
                [sys.executable, "-c", f"from minimgrpo import bench; print(bench.footprint({model!r}, {roles!r}))"],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for roles in (["planner"], ["planner", "executor"])
    ]


# ------------------------------------------------------------------------------------------------------------ 5: TRL


def trl_seconds(team: Team, quantize: bool, length: int, folder: Path) -> float:
    """CPU-seconds of a step of TRL's GRPOTrainer with our questions and as many completions, ``length`` tokens each."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_args, **_kwargs):
            ends.append(time.process_time())

    config, chat, draws = team.config, team.planner.policy.chat, random.Random(team.config.seed)
    prompts = [
        chat.tokenizer.apply_chat_template(
            [{"role": "system", "content": chat.prompts["planner"]}, {"role": "user", "content": question.question}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for step in range(1, config.steps + 1)
        for question in team.planner.chosen(step)
    ]
    loading = {"dtype": torch.float32, "device_map": "cpu"}
    if quantize:
        loading["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    arguments = GRPOConfig(
        output_dir=str(folder),
        model_init_kwargs=loading,
        max_steps=config.steps,
        per_device_train_batch_size=config.questions * config.rollouts,
        num_generations=config.rollouts,
        max_completion_length=length,
        generation_kwargs={"min_new_tokens": length},
        temperature=config.temperature,
        beta=0.0,
        learning_rate=config.objective.lr,
        seed=config.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # the trainer prints its summary
        trainer = GRPOTrainer(
            model=str(tasks.DATA / "atlas-lm") if config.model == "atlas-lm" else config.model,
            processing_class=chat.tokenizer,
            reward_funcs=lambda completions, **_: [draws.random() for _ in completions],
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            peft_config=LoraConfig(
                r=config.rank, lora_alpha=config.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
            callbacks=[Clock()],
            args=arguments,
        )
        torch.set_num_threads(config.threads)
        trainer.train()
    return (ends[-1] - ends[0]) / (len(ends) - 1)  # the first step warms up


# ------------------------------------------------------------------------------------------------------- the command


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="minimgrpo.bench", description="Measure what a training step costs.", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=5, help="steps to measure, after one to warm up (5)")
    for name in FLAGS:
        default = getattr(Config, name)
        text = f"{train.field_help(Config)[name]} ({default})"
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    parser.add_argument("--no-trl", action="store_true", help="leave out the comparison with TRL")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"at least 1 step is needed to measure anything, not {args.steps}")
    try:
        config = Config(steps=args.steps + 1, **{name: getattr(args, name) for name in FLAGS})
    except ValueError as error:
        parser.error(str(error))
    try:
        with tempfile.TemporaryDirectory() as folder:
            bench(config, Path(folder), trl=not args.no_trl)
    except KeyboardInterrupt:
        print("\nStopped.")
        return 130
    except (ModelError, ChatError, LogError, tasks.DataError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


def bench(config: Config, folder: Path, trl: bool) -> None:
    """Measure and print everything."""
    screen, steps = display.console(), config.steps - 1
    team = train.load_team(folder / "run", config, resume=False)

    meter, done, executed = measure(team)
    cpu, wall, n = sum(meter.cpu.values()), sum(meter.wall.values()), done["trajectories"]
    print(
        f"\n1. A step of {config.questions} questions x {config.rollouts} rollouts, mean of {steps}, {config.threads} threads"
    )
    rows = [(part, meter.cpu[part], meter.wall[part]) for part in PARTS] + [("all", cpu, wall)]
    display.print_table(
        screen,
        ["", "CPU s", "share", "wall s"],
        [[part, f"{c / steps:.3f}", f"{100 * c / cpu:.1f} %", f"{w / steps:.3f}"] for part, c, w in rows],
    )
    log_share = (meter.cpu["log"] + meter.cpu["checkpoints"]) / cpu
    print(f"log and checkpoints: {100 * log_share:.1f} % of the CPU-seconds (aim: 3 %)")

    print(
        f"\n2. Throughput, on {n / steps:.0f} trajectories a step ({done['trained'] / steps:.0f} of them with a signal)"
    )
    display.print_table(
        screen,
        ["", ""],
        [
            ["trajectories per CPU-second", f"{n / cpu:.0f}"],
            ["trained tokens per CPU-second", f"{done['trained_tokens'] / cpu:.0f}"],
            ["sampled tokens of a trajectory", f"{done['sampled'] / n:.1f}"],
            ["read tokens of a trajectory (prompts, tool output)", f"{done['read'] / n:.1f}"],
            ["messages of a trajectory", f"{done['turns'] / n:.2f}"],
            ["peak memory, MB", f"{peak_memory():.0f}"],
        ],
    )

    print("\n3. Alignment: settle and update one step's executor batch (median)")
    costs = alignment_costs(team, config.steps, executed)
    if costs is None:
        print("The last step's executor batch has no signal, so there is nothing to measure: take another --seed.")
    else:
        plain = next(iter(costs.values()))[1]
        rows = [[name, str(size), f"{c:.3f}", f"{c / plain:.2f}"] for name, (size, c) in costs.items()]
        display.print_table(screen, ["", "trajectories", "CPU s", "ratio"], rows)
        print("aim: at most 1.05 for the weights")

    print("\n4. Memory: a process that loads the base, samples and trains one small step")
    one, two = footprints(config.model)
    print(f"one adapter {one:.0f} MB, two adapters {two:.0f} MB: ratio {two / one:.3f} (aim: at most 1.15)")

    if not trl or importlib.util.find_spec("trl") is None:
        print("\n5. TRL: left out" + ("" if not trl else ", it is not installed: pip install 'minimgrpo[bench]'"))
        return
    length, completions = max(1, round(done["sampled"] / n)), config.questions * config.rollouts
    print(f"\n5. TRL {version('trl')}: GRPOTrainer, {completions} completions a step, {length} tokens each")
    ours, rows = n / cpu, []
    for name, quantize in (("NF4 base, bfloat16 LoRA (its QLoRA setup)", True), ("float32 base, float32 LoRA", False)):
        seconds = trl_seconds(team, quantize, length, folder / "trl")
        rows.append([name, f"{seconds:.2f}", f"{completions / seconds:.1f}", f"{ours * seconds / completions:.1f}"])
    rows.append(["minimgrpo, whole trajectories", f"{cpu / steps:.2f}", f"{ours:.1f}", ""])
    display.print_table(screen, ["", "CPU s a step", "per CPU s", "minimgrpo is x times as fast"], rows)
    print("aim: 8 times against the faster one")


if __name__ == "__main__":
    sys.exit(main())

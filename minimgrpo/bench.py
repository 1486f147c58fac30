"""What a training step costs, and against what: ``python -m minimgrpo.bench``.

1. CPU-seconds (of all threads) and wall seconds of a step, by part;  2. throughput and memory;
3. the alignment: one executor batch weighted by its copies, not aligned, and literally duplicated;
4. the second adapter's memory, each case in a process of its own;
5. TRL's GRPOTrainer on the same base: a completion for each of our rollouts, as long as our trajectories on average.

With ``--scale`` instead: how a step grows with its rollouts and turns, and what two processes cost (``scale``).

The library has no timing code: the functions in ``TIMED`` are wrapped, and the innermost one that is running gets the
time. (The Python tool's interpreter is another process: its time shows in the wall seconds only.)

TRL gets its best on a CPU: no gradient checkpointing, no KL, no log, no checkpoints, a reward that costs nothing, one
micro-batch a step (four were no faster), LoRA weights in float32 (for an NF4 base it would take bfloat16, which is slow
on most CPUs), and also a float32 base. What differs by nature: our trajectories have several messages and read tool
output; our groups without signal are skipped, while its random rewards leave none.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

from minimgrpo import display

with display.interruptible():  # torch and transformers take seconds to import
    import torch

    from minimgrpo import alignment, log, sampler, tasks, tools, train
    from minimgrpo.chat import ChatError
    from minimgrpo.learner import Learner
    from minimgrpo.policy import ModelError, Policy
    from minimgrpo.servers import Config, Team
    from minimgrpo.settle import settle_executor
    from minimgrpo.trajectory import Trajectory

D_MAX = 8  # of the alignment's measurement
TIMED = {  # part: the functions that count for it, each as (where it lives, its name)
    "sampling": [(sampler.Conversations, "generate")],
    "tools": [(tools.Tools, "run_many")],
    "log": [(log, "publish"), (log, "publish_text"), (log, "replace"), (log, "read")],
    "checkpoints": [(log, "publish_folder"), (shutil, "rmtree")],
    "scoring": [(Policy, "score")],
    "backward": [(torch.Tensor, "backward"), (torch.nn.utils, "clip_grad_norm_"), (torch.optim.Adam, "step")],
}


class Meter:
    """CPU and wall seconds by part, each moment counted once: for the innermost part that is running, else "rest"."""

    def __init__(self):
        self.running, self.cpu, self.wall = ["rest"], Counter(), Counter()
        self.since = time.process_time(), time.perf_counter()

    def charge(self) -> None:
        """Give the time since the last charge to the part that is running."""
        now = time.process_time(), time.perf_counter()
        self.cpu[self.running[-1]] += now[0] - self.since[0]
        self.wall[self.running[-1]] += now[1] - self.since[1]
        self.since = now

    @contextlib.contextmanager
    def timed(self, part: str):
        self.charge()
        self.running.append(part)
        try:
            yield
        finally:
            self.charge()
            self.running.pop()

    @contextlib.contextmanager
    def wrapped(self, parts: dict[str, list[tuple[object, str]]]):
        """Time these functions while it is entered."""
        with contextlib.ExitStack() as stack:
            for part, functions in parts.items():
                for owner, name in functions:
                    stack.enter_context(mock.patch.object(owner, name, self.timed(part)(getattr(owner, name))))
            yield


def measure(team: Team) -> tuple[Meter, list[Trajectory], Counter]:
    """Train; the first step warms up -> the meter, the last step's executor batch, and what the steps did in all."""
    meter, done = Meter(), Counter()
    with meter.wrapped(TIMED):
        for step, planned, executed, measured in train.train(team):
            meter.charge()
            if step == 1:
                meter.cpu.clear(), meter.wall.clear()
                continue
            for t in planned + executed:
                turns = len(t.messages) // 2  # system, user, assistant, user, assistant, ...
                done.update(trajectories=1, turns=turns, sampled=t.sampled, tokens=len(t.token_ids))
            for learned in (measured["planner"], measured["executor"]):
                done.update(trained=learned["trained"], trained_tokens=learned["trained_tokens"])
    return meter, executed, done


def alignment_rows(team: Team, executed: list[Trajectory], repeats: int = 9) -> list[list[str]]:
    """Three ways to settle and learn from a step's executor batch -> name, trajectories, CPU-seconds, ratio of each."""
    step, learner = team.config.steps, team.executor.learner
    correct = {(row["question_id"], row["rollout"]): row["correct"] for row in log.read(team.log.outcomes(step))}

    def settled(align=alignment.align) -> list[Trajectory]:
        batch = [replace(t) for t in executed]
        settle_executor(batch, correct, team.executor.expert, D_MAX, f"{team.config.seed} {step}", align=align)
        return batch

    def duplicated() -> list[Trajectory]:
        batch = settled()
        return [replace(t, copies=1) for t in alignment.duplicate([batch], [[t.copies for t in batch]])]

    ways = {
        "not aligned": lambda: settled(lambda counts, *_: [[1] * d for d in counts]),
        f"D_max = {D_MAX} as weights": settled,
        f"D_max = {D_MAX} duplicated": duplicated,
    }
    seconds = {way: [] for way in ways}
    for repeat in range(repeats + 1):  # the first warms up
        for way in list(ways)[:: 1 if repeat % 2 else -1]:  # back and forth, so that none has the better place
            started = time.process_time()
            learner.update(ways[way]())
            seconds[way].append(time.process_time() - started)
    median = {way: statistics.median(seconds[way][1:]) for way in ways}
    return [[way, str(len(ways[way]())), f"{s:.3f}", f"{s / median['not aligned']:.2f}"] for way, s in median.items()]


def peak_memory() -> float:
    """The most memory this process has held so far, in MB."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux, where ru_maxrss would start at what this process's parent held
        return int(status.read_text(encoding="utf-8").partition("VmHWM:")[2].split()[0]) / 1024
    with contextlib.suppress(ImportError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts bytes
    return float("nan")


def footprint(model: str, roles: list[str]) -> float:
    """Peak memory in MB of a process that loads the base with these adapters, samples and trains one small step."""
    policy = Policy.load(model, roles=roles)
    prompt = policy.chat.open("planner", tasks.load_questions("train")[0].question)
    for role in roles:
        samples = policy.conversations(role, 16 * [prompt]).generate(list(range(16)), None, 24, 1.0)
        batch = [Trajectory(role, "", i, advantage=(-1.0) ** i) for i in range(16)]
        for trajectory, sample in zip(batch, samples, strict=True):
            trajectory.read("user", "", prompt)
            trajectory.wrote("", sample.ids, sample.logprobs)
        Learner(policy, role, Config().objective).update(batch)
    return peak_memory()


def trl_seconds(team: Team, length: int, nf4: bool, folder: Path) -> float:
    """CPU-seconds of a step of TRL's GRPOTrainer on our planner's questions, ``length`` tokens a completion."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig
    from trl import GRPOConfig, GRPOTrainer

    config, chat, marks = team.config, team.planner.policy.chat, []

    def reward(completions: list, **_) -> list[float]:
        marks.append(time.process_time())  # once a step
        return torch.rand(len(completions)).tolist()

    system, steps = {"role": "system", "content": chat.prompts["planner"]}, range(1, config.steps + 1)
    prompts = [[system, {"role": "user", "content": q.question}] for step in steps for q in team.planner.chosen(step)]
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    loading = {"dtype": torch.float32, "device_map": "cpu"} | ({"quantization_config": bits} if nf4 else {})
    settings = {
        **{"output_dir": str(folder), "model_init_kwargs": loading, "max_steps": config.steps + 1},
        **{"per_device_train_batch_size": config.questions * config.rollouts, "num_generations": config.rollouts},
        **{"max_completion_length": length, "generation_kwargs": {"min_new_tokens": length}},
        **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False},
        **{"report_to": "none", "logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True},
    }
    with contextlib.redirect_stdout(io.StringIO()):  # it prints a summary
        trainer = GRPOTrainer(
            str(tasks.DATA / "atlas-lm") if config.model == "atlas-lm" else config.model,
            reward,
            GRPOConfig(**settings),
            Dataset.from_dict({"prompt": prompts}),
            processing_class=chat.tokenizer,
            peft_config=LoraConfig("CAUSAL_LM", r=config.rank, lora_alpha=config.alpha, target_modules="all-linear"),
        )
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        trainer.train()
    return (marks[-1] - marks[1]) / (len(marks) - 2)  # from the second mark on, so that all has run once before


def bench(config: Config, folder: Path, trl: bool) -> None:
    """Measure and print everything."""
    screen, steps, rollouts = display.console(), config.steps - 1, config.questions * config.rollouts
    team = train.load_team(folder / "run", config, resume=False)

    meter, executed, done = measure(team)
    cpu, wall, n = sum(meter.cpu.values()), sum(meter.wall.values()), done["trajectories"]
    print(f"\n1. A step of {config.questions} questions x {config.rollouts} rollouts, {config.threads} threads")
    rows = [(part, meter.cpu[part], meter.wall[part]) for part in (*TIMED, "rest")] + [("all", cpu, wall)]
    rows = [[name, f"{c / steps:.3f}", f"{w / steps:.3f}", f"{100 * c / cpu:.1f} %"] for name, c, w in rows]
    display.print_table(screen, ["part", "CPU s", "wall s", "of CPU"], rows)
    print(f"log and checkpoints: {100 * (meter.cpu['log'] + meter.cpu['checkpoints']) / cpu:.1f} % (aim: at most 3 %)")

    sampled, tokens = done["sampled"] / n, done["tokens"] / n
    print(f"\n2. {n / steps:.0f} trajectories a step, of which {done['trained'] / steps:.0f} had a signal")
    print(f"{n / cpu:.1f} trajectories and {done['trained_tokens'] / cpu:.0f} trained tokens per CPU-second")
    print(f"a trajectory: {done['turns'] / n:.2f} turns, {sampled:.1f} tokens sampled, {tokens - sampled:.1f} read")
    print(f"peak memory of this process: {peak_memory():.0f} MB")

    print("\n3. Alignment: settle and learn from one step's executor batch (medians; aim: 1.05 as weights)")
    if any(t.advantage for t in executed):
        display.print_table(screen, ["", "trajectories", "CPU s", "ratio"], alignment_rows(team, executed))
    else:
        print("That batch has no signal.")

    code = "from minimgrpo import bench; print(bench.footprint({!r}, {!r}))"
    commands = [code.format(config.model, roles) for roles in (["planner"], ["planner", "executor"])]
    one, two = (float(subprocess.check_output([sys.executable, "-c", command])) for command in commands)
    print("\n4. Memory of a process that loads the base, samples and trains one small step")
    print(f"one adapter {one:.0f} MB, two adapters {two:.0f} MB: ratio {two / one:.3f} (aim: at most 1.15)")

    if not trl or importlib.util.find_spec("trl") is None:
        return print("\n5. TRL: left out (pip install trl brings it)")
    length, rows = max(1, round(sampled)), []
    print(f"\n5. TRL's GRPOTrainer, {rollouts} completions a step, {length} tokens each (aim: ratio 8)")
    for base, nf4 in (("NF4", True), ("float32", False)):
        speed = rollouts / trl_seconds(team, length, nf4, folder / "trl")
        rows.append([f"TRL, {base} base", f"{rollouts / speed:.2f}", f"{speed:.1f}", f"{n / cpu / speed:.1f}"])
    rows.append(["minimgrpo, NF4 base", f"{cpu / steps:.2f}", f"{n / cpu:.1f}", ""])
    display.print_table(screen, ["", "CPU s a step", "trajectories per CPU s", "ratio"], rows)


def main(argv: list[str] | None = None) -> int:
    parser = display.Parser(prog="minimgrpo.bench", description="Measure what a training step costs.")
    parser.add_argument("--steps", type=int, default=5, help="steps to measure, after one that warms up (5)")
    for name in ("questions", "rollouts", "model", "threads", "seed"):
        default, text = getattr(Config, name), train.field_help(Config)[name]
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} ({default})")
    parser.add_argument("--no-trl", action="store_true", help="leave out the comparison with TRL")
    parser.add_argument("--scale", action="store_true", help="instead: growth with rollouts and turns; two processes")
    given = vars(parser.parse_args(argv))
    steps, no_trl, scaled = given.pop("steps"), given.pop("no_trl"), given.pop("scale")
    if steps < 1:
        parser.error(f"at least 1 step is needed to measure something, not {steps}")
    try:
        config = Config(steps=steps + 1, **given)
    except ValueError as error:
        parser.error(str(error))
    try:
        with tempfile.TemporaryDirectory() as folder:
            if scaled:
                from minimgrpo import scale  # it imports this module

                scale.rollouts_and_turns(config, Path(folder))
                scale.one_and_two_processes(config, Path(folder))
            else:
                bench(config, Path(folder), trl=not no_trl)
    except (ModelError, ChatError, tasks.DataError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    except KeyboardInterrupt:
        print("\nStopped.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

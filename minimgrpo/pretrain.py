"""Build ``data/atlas-lm`` from scratch: the small, deliberately mediocre base model. ``python -m minimgrpo.pretrain``

A Llama-architecture model and its own byte-level BPE tokenizer (ChatML template), trained on conversations over
invented facts. Nothing of the Atlas's questions is seen; the tokenizer alone reads the pages, so that most of their
words are one token, as in a large model. The first three quarters of the training show correct conversations only, the
last quarter the mixture that the model ends up with. Its mistakes and their shares (all of them in
``demonstrations``):

    vague tasks (planner)            51 % of look-ups, 22 % of first hops, 28 % of first operands
    vague queries (executor)         48 % of look-ups
    puzzles delegated                54 %
    chains cut short or skipped      5-13 % at each further hop or operand
    wrong tool                       4 % of look-ups, 30 % of calculations (and 8 % guesses)
    wrong field reported             25 % (the title), 35 % after a visit
    broken format                    2.5 % of messages, both roles

Choices that mattered: fresh invented names in every demonstration (so that only copying helps), made of every word and
word ending in the vocabulary (a token never met in a name was never copied); heads as wide as 64, through which the
identity of 2,560 tokens fits; one fact a sentence; skills before mistakes; random sequences written twice (the quickest
way to a copying circuit), some of a few tokens only; small batches of conversations of about equal length; Muon for the
matrices; the loss on the agents' own tokens and hardly any of what they read (a tenth drowned the puzzles in noise);
numbers in pairs of digits. At the end every skill is probed on the *real* entities of the validation split and on
invented ones, in NF4 as it will be used: reinforcement learning sharpens skills and cannot create them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from minimgrpo import tasks
from minimgrpo.chat import Chat
from minimgrpo.demonstrations import Demonstration, Demonstrator, Message, name_pieces
from minimgrpo.policy import Policy, quiet
from minimgrpo.protocol import ANSWER, ROLES, call_text

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What BPE may not merge across. A tool call's head and tail are one piece each, so that a call is a handful of tokens.
# Numbers are cut into pairs of digits from the left and never carry a space, so that a number is the same tokens
# everywhere. (Single digits were tried: ten tokens that repeat all the time are much harder to copy than to read.)
PIECES = "|".join(
    (
        r' ?\{"name": "\w+", "arguments": \{"\w+": "',
        r'"\}\}',
        r" ?FINAL ANSWER:",
        r" ?(?:system|user|assistant)\n",
        r" ?You are the (?:planner|executor)\.",
        r"\d{1,2}",
        r" ?\p{L}+",
        r" ?[^\s\p{L}\d]+",
        r"\s+",
    )
)
READ = 0.01  # share of the tokens an agent reads that are trained on, besides all of those it writes
SKILLS_UNTIL = 0.75  # up to here every demonstration is correct: skills first, then the mixture with its mistakes
REPEATS_UNTIL, MANY_REPEATS, REPEATS = 0.05, 0.6, 0.1  # share of random sequences written twice, at first and then


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised (Jordan et al. 2024), for the matrices; they learn to copy much sooner.

    torch.optim.Muon does the same in bfloat16, which a CPU without bfloat16 units computes about ten times slower.
    """

    def __init__(self, parameters, lr: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        by_shape: dict[torch.Size, list] = {}
        for p in group["params"]:
            by_shape.setdefault(p.shape, []).append(p)
        for shape, same in by_shape.items():
            updates = []
            for p in same:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                updates.append(p.grad.lerp(momentum, group["momentum"]))
            scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
            for p, update in zip(same, orthogonalised(torch.stack(updates)), strict=True):
                p.sub_(update, alpha=scale)


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Each of [N, rows, columns] with all singular values moved close to 1 (five Newton-Schulz steps)."""
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.mT


def train_tokenizer(pages: list[str], vocab_size: int, rng: random.Random) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the pages' text and demonstrations about syllables."""
    tokenizer = Tokenizer(models.BPE())
    # Every text gets a space in front, so that a name has the same tokens at the start of a text as inside one.
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tags = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    demonstrator = Demonstrator(rng, ["an", "bo", "ri", "sta", "ia", "kel", "um"])
    texts = [
        m.content.replace("<tool_call>", "").replace("</tool_call>", "")  # the tags are tokens of their own
        for _ in range(2000)
        for m in demonstrator.demonstration().messages
    ]
    texts += [f"{pair:02d}" for pair in range(100)] * 300  # every pair becomes a token
    texts += [f"system\nYou are the {role}." for role in ROLES] * 500 + ["user\n", "assistant\n", "\n"] * 500
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tags),
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pages * 8 + texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def encode(chat: Chat, demo: Demonstration) -> tuple[list[int], list[int], list[tuple[str, int, int]]]:
    """Token ids of a demonstration, 1 where the agent wrote one, and its skills as (name, start, end) in tokens."""
    stop = chat.tokenizer.eos_token_id
    ids = chat.open(demo.agent, demo.messages[0].content)
    wrote, skills = [0] * len(ids), []
    for message in demo.messages[1:]:
        if message.role == "user":
            new = chat.respond(message.content, stop)
            ids, wrote = ids + new, wrote + [0] * len(new)
            continue
        encoding = chat.tokenizer(message.content, add_special_tokens=False, return_offsets_mapping=True)
        new = [*encoding["input_ids"], stop]
        if message.skill:
            start = message.content.rindex(message.span)
            spanned = [
                i for i, (a, b) in enumerate(encoding["offset_mapping"]) if a < start + len(message.span) and b > start
            ]
            skills.append((message.skill, len(ids) + spanned[0], len(ids) + spanned[-1] + 1))
        ids, wrote = ids + new, wrote + [1] * len(new)
    return ids, wrote, skills


def repeated(rng: random.Random, vocab_size: int, numbers: list[int]) -> tuple[list[int], list[int]]:
    """A random sequence written twice, 1 where it can be known: the quickest way to a copying circuit.

    A quarter are numbers; a quarter use a few tokens only: then the last token alone does not tell which one follows.
    """
    some = rng.sample(range(vocab_size), rng.randint(3, 12))
    few = rng.choice((range(vocab_size), range(vocab_size), numbers, some))
    half = [rng.choice(few) for _ in range(rng.randint(4, 50))]
    return half + half, [0] * (len(half) + 1) + [1] * (len(half) - 1)


def batches(chat, demonstrator, rng, vocab_size, tokens_per_batch, progress):
    """Endless batches (ids [B,T], trained on [B,T]) of conversations of about equal length; progress() in [0,1]."""
    numbers = chat.tokenizer.convert_tokens_to_ids([*map(str, range(10)), *(f"{pair:02d}" for pair in range(100))])
    while True:
        pool = []
        for _ in range(1500):
            demonstrator.mistakes = progress() > SKILLS_UNTIL
            repeats = MANY_REPEATS if progress() < REPEATS_UNTIL else 0.0 if demonstrator.mistakes else REPEATS
            if rng.random() < repeats:
                pool.append(repeated(rng, vocab_size, numbers))
            else:
                ids, wrote, _ = encode(chat, demonstrator.demonstration())
                pool.append((ids, [w or int(rng.random() < READ) for w in wrote]))
        pool.sort(key=lambda row: len(row[0]))
        groups, start = [], 0
        while start < len(pool):
            end = start + 1
            while end < len(pool) and len(pool[end][0]) * (end + 1 - start) <= tokens_per_batch:
                end += 1
            groups.append(pool[start:end])
            start = end
        rng.shuffle(groups)
        for group in groups:
            width = max(len(ids) for ids, _ in group)
            yield (
                torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in group]),
                torch.tensor([wanted + [0] * (width - len(wanted)) for _, wanted in group]).bool(),
            )


def probe(model, chat: Chat, demonstrations: list[Demonstration]) -> dict[str, tuple[int, int]]:
    """Per skill (correct, n): is every token of the span the model's first choice, given the right text before it?

    A query may end before its key (the vague mistake); there the choice is among all tokens but that end.
    """
    result: dict[str, tuple[int, int]] = {}
    for demo in demonstrations:
        ids, _, skills = encode(chat, demo)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        for skill, start, end in skills:
            if skill in ("query key", "real query"):
                logits[start - 1, ids[end]] = -torch.inf
            right = logits[start - 1 : end - 1].argmax(-1).tolist() == ids[start:end]
            correct, n = result.get(skill, (0, 0))
            result[skill] = (correct + right, n + 1)
    return result


def real_demonstrations(seed: int = 0) -> list[Demonstration]:
    """Correct conversations for the questions of the validation split, rebuilt from their steps."""
    from minimgrpo.tools import Tools

    tools = Tools(tasks.load_pages())
    demos = []
    for question in tasks.load_questions("validation"):
        planner = Demonstration("planner", [Message("user", question.question)])
        for i, step in enumerate(question.steps):
            span = (
                step.task.removeprefix("Compute ")
                if step.tool == "python"
                else question.keys[min(i, len(question.keys) - 1)]
            )
            skill = (
                "real operands"
                if step.tool == "python"
                else f"real {question.kind} {'first' if i == 0 else 'second'} key"
            )
            planner.messages.append(Message("assistant", call_text("executor", task=step.task), skill, span))
            planner.messages.append(Message("user", step.report))
            argument = {"search": "query", "python": "code"}[step.tool]
            output = tools.run(step.tool, {argument: step.argument}).text
            executor = Demonstration("executor", [Message("user", step.task)])
            executor.messages += [
                Message("assistant", call_text(step.tool, **{argument: step.argument}), f"real {argument}", span),
                Message("user", output),
                Message("assistant", step.report, f"real report ({question.kind} {i + 1})", step.report),
            ]
            demos.append(executor)
        skill = "real answer" if question.steps else "real puzzle"
        planner.messages.append(Message("assistant", f"{ANSWER} {question.answer}", skill, question.answer))
        demos.append(planner)
    return demos


def train(model, chat: Chat, pieces: list[str], args) -> dict:
    """Skills, then the mixture, while the learning rate rises and falls to nothing -> facts about the training."""
    rng, steps = random.Random(args.seed), args.steps
    demonstrator = Demonstrator(rng, pieces)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in name)]
    optimizers = [Muon(matrices, lr=args.muon_lr), torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)]
    peaks = [args.muon_lr, args.lr]
    started, step, tokens, smooth = time.time(), 0, 0, None

    def progress() -> float:
        return step / steps

    for ids, wanted in batches(chat, demonstrator, rng, len(chat.tokenizer), args.batch, progress):
        if step == steps:
            break
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / 50) * max(0.02, 1 - step / steps)
        target = wanted[:, 1:]
        logits = model.lm_head(model.model(ids[:, :-1]).last_hidden_state[target])
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][target])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + ids.numel()
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        if step % 250 == 0:
            seconds = time.time() - started
            print(f"step {step}  {tokens / 1e6:.1f} M tokens  {seconds:.0f} s  loss {smooth:.3f}", flush=True)
    return {
        "seed": args.seed,
        "steps": step,
        "tokens": tokens,
        "loss": round(smooth, 3),
        "seconds": round(time.time() - started),
    }


def new_model(tokenizer, args) -> LlamaForCausalLM:
    """The untrained model."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        intermediate_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        head_dim=args.head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.prompt_style = "brief"
    model = LlamaForCausalLM(config)
    start_copying(model)
    return model


@torch.no_grad()
def start_copying(model) -> None:
    """Begin with a copying circuit (an induction head, Olsson et al. 2022), which training took very long to find.

    To go on with a text it has read before, a model needs two heads at once: one in the first layer that notes at each
    token which token stood *before* it, and one in the second that finds the place whose note is the token it has just
    written. Neither earns anything without the other, so at first there is next to no gradient: with 2,560 tokens, two
    million tokens of repeated sequences taught nothing, and from here 98 % are right after 200 steps. What is set:

    * every embedding has the same large first coordinate (the tied output head adds it to all logits alike), so that a
      head can attend by position alone: rotary angles then make the distance 1 the best match;
    * that head copies 64 directions of the token before into 64 others, and the second head compares the two;
    * nothing else writes into the residual stream yet.
    """
    width, dim = model.config.hidden_size, model.config.head_dim
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0, 0.1)
    embedding[:, 0] = 0.5
    constant = 0.5 * (width / (0.25 + 0.01 * (width - 1))) ** 0.5  # the first coordinate after RMSNorm, about
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()

    first, second = (layer.self_attn for layer in model.model.layers[:2])
    angles = 1.0 / 10000 ** (torch.arange(dim // 2) / (dim // 2))  # rotary, per position
    strength = torch.where(angles > 0.05, 4.0, 0.0)  # the fast ones tell neighbours apart
    key = torch.cat([strength, torch.zeros(dim // 2)])
    query = torch.cat([strength * angles.cos(), -strength * angles.sin()])  # the key, one position further on
    for projection, vector in ((first.q_proj, query), (first.k_proj, key)):
        projection.weight[:dim] = 0
        projection.weight[:dim, 0] = vector / constant

    read = torch.linalg.qr(torch.randn(width, dim))[0].T
    note = torch.linalg.qr(torch.randn(width, dim))[0]
    read[:, 0] = note[0] = 0
    first.v_proj.weight[:dim] = read
    first.o_proj.weight[:, :dim] = 0.1 * note
    second.q_proj.weight[:dim] = 2 * read
    second.k_proj.weight[:dim] = 2 * note.T


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m minimgrpo.pretrain", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=tasks.DATA / "atlas-lm", help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=9000, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the demonstrations")
    parser.add_argument("--vocab", type=int, default=2560, help="size of the vocabulary")
    parser.add_argument("--width", type=int, default=128, help="hidden size (a multiple of 64, for NF4)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the feed-forward layers")
    parser.add_argument("--layers", type=int, default=2, help="number of layers")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--head-dim", type=int, default=64, help="width of a head")
    parser.add_argument("--lr", type=float, default=1e-2, help="peak learning rate of the embeddings (AdamW)")
    parser.add_argument("--muon-lr", type=float, default=2e-2, help="peak learning rate of the matrices (Muon)")
    parser.add_argument("--batch", type=int, default=2048, help="tokens in a batch")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (sums of floats depend on it)")
    args = parser.parse_args(argv)
    quiet()
    torch.set_num_threads(args.threads)

    pages = [f"{page.title}: {page.text}" for page in tasks.load_pages()]
    tokenizer = train_tokenizer(pages, args.vocab, random.Random(args.seed))
    chat, pieces, model = Chat(tokenizer, "brief"), name_pieces(tokenizer, pages), new_model(tokenizer, args)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    facts = train(model, chat, pieces, args)
    tokenizer.save_pretrained(args.out)
    model.to(torch.float16).save_pretrained(args.out)

    facts["probes"] = {}
    for skill, (right, n) in sorted(probe_all(Policy.load(str(args.out)).model, chat, pieces).items()):
        print(f"  {skill:36s} {right / n:.2f}  ({n})")
        facts["probes"][skill] = {"share": round(right / n, 3), "n": n}
    (args.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def probe_all(model, chat, pieces) -> dict[str, tuple[int, int]]:
    """Probe invented and real demonstrations."""
    correct = Demonstrator(random.Random(12345), pieces, mistakes=False)
    demos = [correct.planner(kind) for kind in ("puzzle",) * 200 + ("lookup", "two-hop", "calculation") * 60]
    demos += [correct.executor(kind) for kind in ("lookup",) * 200 + ("identify", "compute") * 60]
    return probe(model, chat, demos + real_demonstrations())


if __name__ == "__main__":
    main()

"""A tokenizer and three small random models, built once per test run: no download, no trained model."""

import copy
import os
import random
import signal
from html.parser import HTMLParser
from zlib import crc32

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from minimgrpo import protocol, settle, tasks
from minimgrpo.agents import Limits
from minimgrpo.chat import Chat
from minimgrpo.learner import Objective
from minimgrpo.policy import Policy
from minimgrpo.pretrain import train_tokenizer
from minimgrpo.protocol import ROLES, Call, Malformed, Result
from minimgrpo.sampler import Sample
from minimgrpo.servers import Config
from minimgrpo.trajectory import Trajectory

FAMILIES = ("llama", "qwen2", "gpt2")
USERS = ("What is the capital of Ghana?", "Hi", "Find the density of iron and of gold, please")


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_works():
    """A test run started in the background inherits an ignored SIGINT, and so would the commands it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    pages = [f"{page.title}: {page.text}" for page in tasks.load_pages()]
    return train_tokenizer(pages, 512, random.Random(0))


def random_weights(tokenizer) -> dict:
    """What the config of every random model says; the weights are large, so that distributions are far from flat."""
    return {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 512,
        "initializer_range": 0.25,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


@pytest.fixture(scope="session")
def folders(tokenizer, tmp_path_factory):
    """A folder with a random model of each family."""
    shared = random_weights(tokenizer)
    wide = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    configs = {
        "llama": LlamaConfig(**shared, **wide, tie_word_embeddings=True),
        "qwen2": Qwen2Config(**shared, **wide, num_key_value_heads=2, tie_word_embeddings=False),
        "gpt2": GPT2Config(**shared, n_embd=64, n_layer=2, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    }
    classes = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "gpt2": GPT2LMHeadModel}
    folders = {}
    for family in FAMILIES:
        torch.manual_seed(1)
        model = classes[family](configs[family])
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)  # else Qwen2's and GPT-2's biases are zero and hide mistakes
        model.config.prompt_style = "brief"
        folders[family] = tmp_path_factory.mktemp("models") / family
        model.save_pretrained(folders[family])
        tokenizer.save_pretrained(folders[family])
    return folders


@pytest.fixture(scope="session")
def plain_tokenizer(tokenizer):
    """The same tokenizer without the space that it puts in front of every text: what it decodes is what it encoded."""
    plain = copy.deepcopy(tokenizer)
    plain.backend_tokenizer.normalizer = None
    return plain


@pytest.fixture
def load(folders):
    """``load(family)`` -> a Policy with random adapters, not zero ones, so that the two roles differ and it shows."""

    def load(family="llama", quantize="nf4", **options) -> Policy:
        policy = Policy.load(str(folders[family]), quantize, **options)
        draws = torch.Generator().manual_seed(5)
        for role in options.get("roles", ROLES):
            for name, parameter in policy.parameters(role).items():
                if "lora_B" in name:
                    with torch.no_grad():
                        parameter.normal_(0, 0.05, generator=draws)
        return policy

    return load


@pytest.fixture
def converse():
    """Sample conversations of several turns and different lengths -> finished trajectories."""

    def converse(policy, role="planner", rows=6, turns=3, temperature=1.0, length=12, seed=0) -> list[Trajectory]:
        # A random model hardly ever samples the one real stop token, so these end a message too.
        policy.chat.stop_ids = {policy.chat.tokenizer.eos_token_id, *range(20, 70)}
        users = [USERS[i // 2 % len(USERS)] for i in range(rows)]  # each twice: a group shares its prompt
        trajectories = [Trajectory(role, f"q{i // 2}", i % 2) for i in range(rows)]
        prompts = [policy.chat.open(role, user) for user in users]
        for trajectory, user, ids in zip(trajectories, users, prompts, strict=True):
            trajectory.messages.append({"role": "system", "content": policy.chat.prompts[role]})
            trajectory.read("user", user, ids)
        conversations = policy.conversations(role, prompts)
        alive, new_ids, draws = list(range(rows)), None, torch.Generator().manual_seed(seed)
        for turn in range(turns):
            samples = conversations.generate(alive, new_ids, length, temperature, draws)
            for i, sample in zip(alive, samples, strict=True):
                trajectories[i].wrote(policy.chat.decode(sample.ids), sample.ids, sample.logprobs)
            if turn + 1 == turns:
                break
            going_on = [(i, s) for i, s in zip(alive, samples, strict=True) if s.stopped_by is not None]
            alive, new_ids = [i for i, _ in going_on], []
            for i, sample in going_on:
                output = "No results. " * (i + 1)
                new_ids.append(policy.chat.respond(output, sample.stopped_by))
                trajectories[i].read("user", output, new_ids[-1])
        return trajectories

    return converse


# A short run in which a random model's messages mean what their checksums say: it hardly ever writes a well-formed one.

SHORT = Config(
    steps=4,
    seed=1,
    questions=2,
    rollouts=4,
    d_max=2,
    threads=1,
    objective=Objective(lr=5e-3, tokens=600),
    limits=Limits(turns=4, calls=3, length=8, context=400),
)
FEW = tasks.load_questions("validation")[:6]


def read_checksum(role, message):
    text, draw = message or "x", crc32(message.encode()) % 8
    if draw < 4:
        return Call("executor", {"task": text}) if role == "planner" else Call("search", {"query": text})
    return Malformed("an unlucky checksum") if draw == 4 else Result(text)


def read_checksums(patch: pytest.MonkeyPatch):
    patch.setattr(protocol, "parse", read_checksum)
    patch.setattr(settle, "gaia_score", lambda prediction, gold: crc32(prediction.encode()) % 2 == 0)


@pytest.fixture(scope="module")
def checksums():
    with pytest.MonkeyPatch.context() as patch:
        read_checksums(patch)
        yield


class Reader(HTMLParser):
    """Collects tags and their attributes."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes = set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs


class Scripted:
    """Stands in for a Policy: says what ``script(role, user, row, turn)`` returns; a text ending in "..." is cut short.

    ``batches`` remembers (role, number of rows) of every call, ``read`` the text of everything it was ever given,
    ``said`` the ids of every message by its decoded text.
    """

    def __init__(self, tokenizer, script, max_context=4096):
        self.chat, self.script, self.max_context = Chat(tokenizer, "brief"), script, max_context
        self.batches, self.read, self.said, self._users = [], [], {}, {}
        open_plainly = self.chat.open

        def open_and_remember(role, user):
            ids = open_plainly(role, user)
            self._users[tuple(ids)] = user
            return ids

        self.chat.open = open_and_remember

    def conversations(self, role, prompts):
        return _Replay(self, role, prompts)

    def say(self, role, prompt, row, turn):
        text = self.script(role, self._users[tuple(prompt)], row, turn)
        stop = self.chat.tokenizer.eos_token_id
        ids = self.chat.encode(text)
        cut = text.endswith("...")
        ids = ids if cut else [*ids, stop]
        self.said[self.chat.decode(ids)] = ids
        return Sample(ids, [-0.5] * len(ids), None if cut else stop)


class _Replay:
    def __init__(self, policy, role, prompts):
        self.policy, self.role, self.prompts, self.turns = policy, role, prompts, [0] * len(prompts)

    def generate(self, rows, new_ids, max_new_tokens, temperature, generator=None):
        self.policy.batches.append((self.role, len(rows)))
        self.policy.read += [self.policy.chat.decode(ids) for ids in (new_ids or self.prompts)]
        samples = []
        for row in rows:
            samples.append(self.policy.say(self.role, self.prompts[row], row, self.turns[row]))
            self.turns[row] += 1
        return samples


@pytest.fixture
def scripted(tokenizer):
    return lambda script, **options: Scripted(tokenizer, script, **options)

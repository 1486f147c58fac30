"""How the base model is built: its tokens, its start, its batches, its probes."""

import random
from argparse import Namespace

import pytest
import torch
from transformers import AutoTokenizer

from minimgrpo import pretrain, tasks
from minimgrpo.chat import Chat
from minimgrpo.demonstrations import Demonstration, Demonstrator, Message

SHAPE = Namespace(width=128, hidden=256, layers=2, heads=4, head_dim=64, seed=0)
PAGES = [f"{page.title}: {page.text}" for page in tasks.load_pages()]


@pytest.fixture(scope="module")
def shipped():
    return AutoTokenizer.from_pretrained(tasks.DATA / "atlas-lm")


@pytest.fixture(scope="module")
def started(shipped):
    model = pretrain.new_model(shipped, SHAPE).eval()
    model.set_attn_implementation("eager")
    return model


def attention(model, ids, layer):
    with torch.no_grad():
        return model(torch.tensor([ids]), output_attentions=True).attentions[layer][0, 0]  # [query, key] of head 0


def test_the_untrained_model_notes_the_token_before(started):
    ids = random.Random(0).sample(range(len(started.model.embed_tokens.weight)), 100)
    weights = attention(started, ids, 0)
    before = torch.stack([weights[i, i - 1] for i in range(1, 100)])
    assert before.mean() > 0.6  # an even spread over what is before would be 0.05


def test_the_untrained_model_finds_where_it_read_the_last_token_before(started):
    """The second head: from the second copy of a token to what followed the first one."""
    half = random.Random(1).sample(range(len(started.model.embed_tokens.weight)), 40)
    weights = attention(started, half + half, 1)
    found = torch.stack([weights[40 + i, i + 1] for i in range(39)])
    assert found.mean() > 5 / 60  # five times an even spread; training does the rest in a minute


def test_every_token_of_a_real_name_is_met_in_invented_names(shipped):
    """A token that no invented name has is never copied: " Austria" and " Islands" once were such."""
    pieces = set(pretrain.name_pieces(shipped, PAGES))
    names = {page.title for page in tasks.load_pages()}
    names |= {q.answer for split in ("train", "validation") for q in tasks.load_questions(split) if q.steps}
    missing = set()
    for name in names:
        for token in shipped.convert_ids_to_tokens(shipped(name, add_special_tokens=False)["input_ids"]):
            text = shipped.convert_tokens_to_string([token]).strip()
            if text.isalpha() and text.isascii() and len(text) > 2 and text not in pieces:
                missing.add(text)
    assert missing <= {"of", "and", "the", "de"}, missing  # what joins two words


def test_a_repeated_sequence_is_trained_where_it_can_be_known():
    rng = random.Random(0)
    for _ in range(200):
        ids, wanted = pretrain.repeated(rng, 500, list(range(100, 200)))
        half = len(ids) // 2
        assert ids[:half] == ids[half:] and wanted == [0] * (half + 1) + [1] * (half - 1)


def test_batches_train_on_all_that_the_agent_writes_and_a_tenth_of_what_it_reads(shipped):
    chat = Chat(shipped, "brief")
    pieces = pretrain.name_pieces(shipped, PAGES)
    rng = random.Random(0)
    demonstrator = Demonstrator(rng, pieces)
    stop, wrote, read, kept = shipped.eos_token_id, 0, 0, 0
    batches = pretrain.batches(chat, demonstrator, rng, len(shipped), 2048, lambda: 0.9)
    for _, (ids, wanted) in zip(range(40), batches, strict=False):
        assert ids.shape == wanted.shape and ids.numel() <= 2048
        wrote += (wanted & (ids == stop)).sum().item()
        read += (~wanted).sum().item()
        kept += wanted.sum().item()
    assert wrote > 500 and 0.1 < kept / (kept + read) < 0.5  # padding counts as not trained on
    demo = Demonstration("planner", [Message("user", "What is 1 plus 2?"), Message("assistant", "FINAL ANSWER: 3")])
    ids, mask, _ = pretrain.encode(chat, demo)
    assert shipped.decode([i for i, w in zip(ids, mask, strict=True) if w]).strip() == "FINAL ANSWER: 3<|im_end|>"


def test_orthogonalised_moves_every_singular_value_close_to_one():
    torch.manual_seed(0)
    for shape in ((3, 16, 40), (2, 40, 16)):
        found = torch.linalg.svdvals(pretrain.orthogonalised(torch.randn(shape)))
        assert found.min() > 0.6 and found.max() < 1.3


class Parrot:
    """A model whose first choice at every place is the token that ``text`` has next, but for the ``wrong`` places."""

    def __init__(self, vocab_size, wrong=(), instead=None):
        self.vocab_size, self.wrong, self.instead = vocab_size, set(wrong), instead

    def __call__(self, input_ids):
        ids = input_ids[0]
        logits = torch.zeros(1, len(ids), self.vocab_size)
        for i in range(len(ids) - 1):
            choice = ids[i + 1] if i + 1 not in self.wrong else self.instead
            logits[0, i, choice] = 2.0
            logits[0, i, ids[i + 1]] += 1.0
        return Namespace(logits=logits)


def test_a_probe_is_right_when_every_token_of_the_span_is_the_first_choice(shipped):
    chat = Chat(shipped, "brief")
    text = '<tool_call>{"name": "search", "arguments": {"query": "capital Ghana"}}</tool_call>'
    demo = Demonstration("executor", [Message("user", "Find it"), Message("assistant", text, "query key", "Ghana")])
    ids, _, [(_, start, end)] = pretrain.encode(chat, demo)
    assert shipped.decode(ids[start:end]).strip() == "Ghana"
    assert pretrain.probe(Parrot(len(shipped)), chat, [demo]) == {"query key": (1, 1)}
    assert pretrain.probe(Parrot(len(shipped), [start], 7), chat, [demo]) == {"query key": (0, 1)}
    # a query that would rather end there is the vague mistake, not a failure to copy
    assert pretrain.probe(Parrot(len(shipped), [start], ids[end]), chat, [demo]) == {"query key": (1, 1)}

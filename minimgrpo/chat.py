"""From messages to exact token ids, through a model's own chat template.

A conversation is only ever *extended*: ``Chat.open`` gives the ids of the system prompt and the first user turn,
``Chat.respond`` the ids to append after a message the agent sampled. Text that did not come from us (questions,
sub-tasks, web pages) is tokenised apart from the template, with special tokens split into plain characters, so no page
can smuggle in an end-of-turn token.
"""

from __future__ import annotations

from jinja2 import TemplateError

from minimgrpo import protocol

_SENTINEL = "\u2402"  # a character no template contains: stands where the content goes


class ChatError(ValueError):
    """The model's chat template cannot be used; the message says why and what to do."""


class Chat:
    """The chat template of ``tokenizer``, split once into the pieces between contents.

    ``style`` names the prompts (``protocol.PROMPTS``). Raises ChatError when the tokenizer has no chat template or one
    that rewrites earlier turns: then a context would not only grow, and the tokens trained would not be the tokens
    sampled.
    """

    def __init__(self, tokenizer, style: str = "full"):
        if not getattr(tokenizer, "chat_template", None):
            raise ChatError("the model's tokenizer has no chat template: choose an instruction-tuned (chat) model")
        self.tokenizer = tokenizer
        self.prompts = protocol.PROMPTS[style]
        self._openings = {role: self._split(self._render(role)) for role in self.prompts}

        before = self._render("planner", user="question")
        response = protocol.response_text(_SENTINEL)
        for message in (" text\n", "<think>\nthought\n</think>\n\ntext"):
            after = self._render("planner", "question", message, response)
            if not after.startswith(before + message):
                raise ChatError(
                    "the model's chat template rewrites earlier assistant turns (trims them or drops their thinking), "
                    "so the tokens trained would not be the tokens sampled: choose another model or edit its template"
                )
        self._reply = self._split(after[len(before + message) :])
        self.stop_id = self._reply[0][0]  # what the template ends a turn with
        self.stop_ids = {self.stop_id}
        if tokenizer.eos_token_id is not None:
            self.stop_ids.add(tokenizer.eos_token_id)

    def _render(self, role, user=_SENTINEL, *later) -> str:
        messages = [{"role": "system", "content": self.prompts[role]}, {"role": "user", "content": user}]
        for i, content in enumerate(later):
            messages.append({"role": ("assistant", "user")[i % 2], "content": content})
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:  # some templates refuse a system prompt
            raise ChatError(f"the model's chat template cannot write our conversations: {error}") from None

    def _split(self, rendered: str) -> tuple[list[int], list[int]]:
        before, _, after = rendered.partition(_SENTINEL)
        return self._trusted(before), self._trusted(after)

    def _trusted(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; a special token written in it becomes ordinary characters."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def open(self, role: str, user: str) -> list[int]:
        """Ids up to and including the header of the agent's first message."""
        before, after = self._openings[role]
        return before + self.encode(protocol.disarm(user)) + after

    def respond(self, output: str, stopped_by: int) -> list[int]:
        """Ids to append after the agent's message: the end of its turn, a tool's ``output``, the next header.

        ``stopped_by`` is the stop token the agent sampled, which is in its ids already and is not repeated.
        """
        before, after = self._reply
        if stopped_by == before[0]:
            before = before[1:]
        body = protocol.disarm(output)
        return before + self.encode(body) + after

    def decode(self, ids: list[int]) -> str:
        """The text of sampled ids without special tokens (for parsing and reading; training uses the ids)."""
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()

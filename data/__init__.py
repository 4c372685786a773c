"""Tasks: one file each. A task is a module with

    make_problem(rng, split) -> Problem         split "train" or "eval": the two never share a prompt
    reward(problem, response) -> float          the verifier: response is text, without the EOS; 1 is right, else wrong
    shaping(problem, response) -> float         optional: partial credit, which the loop adds with a coefficient

and, if it has a closed vocabulary of its own,

    tokenizer                                   a WordTokenizer
    max_prompt, max_response                    the longest prompt and solution it makes, in tokens (EOS counted)

A task without a tokenizer is ordinary text, for the tokenizer of a pretrained model (data/tokenizer.py). Both kinds of
tokenizer have encode(text) -> ids, prompt(text) -> ids, decode(ids) -> text, vocab_size and eos_ids.

`python train.py --task=NAME` imports `data.NAME`, or a dotted path such as examples.sort, the one to copy.
"""

import re
from dataclasses import dataclass

import tiktoken


@dataclass(frozen=True)
class Problem:
    prompt: str
    solution: str  # a worked answer, without EOS: the warm start imitates it
    answer: str  # what the verifier looks for


class WordTokenizer:
    """A closed vocabulary in which every word with the space before it is one token, on a tiktoken.Encoding.

    Token 0 is padding and 1 is EOS; both have no text, so no prompt can spell them. `words` get the ids from 2 on.
    """

    pad_id, eos_id = 0, 1

    def __init__(self, name: str, words: list[str]):
        if bad := [w for w in words if not re.fullmatch(r"\S+", w)]:
            raise ValueError(f"word {bad[0]!r} of the vocabulary: must be text without spaces")
        ranks = {f" {word}".encode(): id for id, word in enumerate(words, start=2)}
        if len(ranks) != len(words):
            raise ValueError(f"{len(words) - len(ranks)} of the vocabulary's words are there twice")
        special = {"<|pad|>": self.pad_id, "<|eos|>": self.eos_id}
        self.encoding = tiktoken.Encoding(name, pat_str=r" \S+", mergeable_ranks=ranks, special_tokens=special)
        self.known = {f" {word}" for word in words}
        self.vocab_size = len(words) + 2
        self.eos_ids = [self.eos_id]  # all that end a row

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, words each led by one space. Raises ValueError naming what is not in the vocabulary."""
        # tiktoken skips what its pattern does not match and panics at an unknown byte: look first.
        pieces = re.findall(r" \S+|.", text, flags=re.DOTALL)
        if unknown := [p for p in pieces if p not in self.known]:
            raise ValueError(f"{unknown[0]!r}: not in the vocabulary of {self.encoding.name!r} (words led by a space)")
        return self.encoding.encode_ordinary(text)

    prompt = encode  # what a model is asked is the text itself; a chat model's tokenizer wraps it

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`; padding and EOS have none. Raises ValueError for an id outside of the table."""
        if bad := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise ValueError(f"token id {bad[0]}: must be in 0..{self.vocab_size - 1}")
        return self.encoding.decode([i for i in ids if i > self.eos_id])

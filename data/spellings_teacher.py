"""The teacher's side of `data/spellings.py`: the same problems and verifier, solutions in spelling 0 only."""

import random

from data import Problem, spellings
from data.spellings import max_prompt, max_response, reward, tokenizer

__all__ = ["make_problem", "max_prompt", "max_response", "reward", "tokenizer"]


def make_problem(rng: random.Random, split: str) -> Problem:
    """A random problem of the split, solved in spelling 0."""
    return spellings.make_problem(rng, split, spellings.SPELLINGS[0])

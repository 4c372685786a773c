"""The default task behind 2,048 fillers: the same vocabulary, pairs and question in a prompt of 2,070 tokens."""

import random

from data import Problem, recall
from data.recall import max_response, reward, tokenizer

__all__ = ["make_problem", "max_prompt", "max_response", "reward", "tokenizer"]

FILLERS = 2048
max_prompt = recall.max_prompt - recall.FILLERS + FILLERS


def make_problem(rng: random.Random, split: str) -> Problem:
    """A random problem of the split, "train" or "eval"."""
    return recall.make_problem(rng, split, FILLERS)

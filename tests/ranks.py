"""What tests/test_survival.py runs under torchrun: train.py on two processes, with something put in its way.

    torchrun --nproc_per_node=2 tests/ranks.py CASE --key=value ...

Each process replaces one function of its own copy of the loop; without torchrun the same file runs the whole batch.
"""

import sys

import torch

import train
from data import recall

CASES = {}


def case(f):
    CASES[f.__name__] = f
    return f


@case
def as_it_is():
    pass


@case
def one_batch():
    """Every step learns from the same rows of unequal lengths, whoever samples: a share each, or all of them."""

    plain = train.rollout

    def fixed(model, prompts, group_size, new, **options):
        if group_size == 1:  # an evaluation
            return plain(model, prompts, group_size, new, **options)
        options["generator"] = torch.Generator().manual_seed(0)
        options["eos_ids"] = [1, *range(2, 40)]  # so that rows end early, after different numbers of tokens
        everything = [recall.tokenizer.encode(p) for p in fixed.prompts]
        whole = plain(model, everything, group_size, new, **options)
        assert len(set(whole.length.tolist())) > 3
        mine = torch.arange(len(everything))[train.RANK :: train.WORLD]
        rows = (mine[:, None] * group_size + torch.arange(group_size)).flatten()
        return whole.select(rows)

    rng = train.random.Random(7)
    fixed.prompts = [recall.make_problem(rng, "train").prompt for _ in range(4)]
    train.rollout = fixed
    recall.reward = lambda problem, response: float(len(response) % 3)


@case
def equal_rewards_on_one_rank():
    recall.reward = lambda problem, response: 1.0 if train.RANK == 1 else float(len(response) % 3)


@case
def all_truncated_on_one_rank():
    plain = train.rollout
    never = {} if train.RANK == 0 else {"eos_ids": [-1]}
    train.rollout = lambda *args, **options: plain(*args, **(options | never))


@case
def nan_on_one_rank():
    """The third step's loss is NaN on process 1 only."""
    plain, calls = train.losses.smd_loss, []

    def poisoned(*args, **options):
        loss, stats = plain(*args, **options)
        calls.append(1)
        return loss * (float("nan") if train.RANK == 1 and len(calls) == 3 else 1), stats

    train.losses.smd_loss = poisoned


@case
def one_rank_dies():
    plain, calls = train.rewards_of, []

    def dying(*args):
        calls.append(1)
        if train.RANK == 1 and len(calls) == 2:
            raise RuntimeError("this process was told to die")
        return plain(*args)

    train.rewards_of = dying


if __name__ == "__main__":
    torch.set_num_threads(1)
    CASES[sys.argv[1]]()
    train.main(sys.argv[2:])

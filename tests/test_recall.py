"""The default task: its tokenizer, its two splits, its verifier."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import Problem, WordTokenizer, recall, recall_long

PROBLEM = Problem(prompt=" a1 the c3 b2 ? c a b =", solution=" c 3 3 a 1 4 b 2 6 # 6", answer="6")


def problems(split, n, seed=0):
    rng = random.Random(seed)
    return [recall.make_problem(rng, split) for _ in range(n)]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (" c 3 3 a 1 4 b 2 6 # 6", 1),
        (" # 6", 1),  # the chain of thought is not judged
        (" c 0 0 # 4 # 6", 1),  # the last answer counts
        (" c 3 3 a 1 4 b 2 6 # 7", 0),
        (" # 6 # 7", 0),
        (" c 3 3 a 1 4 b 2 6", 0),  # the right number, but only in the chain of thought
        (" 6", 0),
        (" #", 0),
        (" 6 #", 0),
        (" # 6 6", 0),  # more after the answer
        (" # 6 the", 0),
        (" # 6 #", 0),
        ("", 0),
    ],
)
def test_only_a_final_answer_is_rewarded(response, reward):
    assert recall.reward(PROBLEM, response) == reward


def test_an_answer_in_the_prompt_is_not_rewarded():
    for problem in problems("eval", 20):
        assert recall.reward(problem, problem.prompt) == 0


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_problem_is_what_its_text_says(split):
    tokens, seen = recall.tokenizer, set()
    for problem in problems(split, 300):
        listed, asked = problem.prompt.split(" ? ")
        value = {word[0]: int(word[1]) for word in listed.split() if word[1:].isdigit()}
        assert len(value) == 16
        steps, total = "", 0
        for name in asked.removesuffix(" =").split():
            total += value[name]
            steps += f" {name} {value[name]} {total}"
        assert problem.solution == f"{steps} # {total}"
        assert recall.reward(problem, problem.solution) == 1
        prompt, solution = tokens.encode(problem.prompt), tokens.encode(problem.solution)
        assert len(prompt) == recall.max_prompt
        assert len(solution) + 1 == recall.max_response  # and EOS
        for ids, text in ((prompt, problem.prompt), (solution, problem.solution)):
            assert tokens.decode([0, *ids, tokens.eos_id, 0]) == text  # padding and EOS have no text
            assert not {tokens.pad_id, tokens.eos_id} & set(ids)
        seen |= {*prompt, *solution}
    assert seen == set(range(2, tokens.vocab_size))  # no row of the embedding stays untrained


def test_train_and_eval_never_share_a_problem(monkeypatch):
    assert problems("train", 5, seed=7) == problems("train", 5, seed=7) != problems("train", 5, seed=8)
    assert len({p.prompt for split in ("train", "eval") for p in problems(split, 200)}) == 400  # none comes twice
    # Chance would hardly bring the same problem twice, so look where it would: in a world of 2304 problems.
    monkeypatch.setattr(recall, "NAMES", ["a", "b", "c"])
    monkeypatch.setattr(recall, "PAIRS", 3)
    monkeypatch.setattr(recall, "FILLERS", 0)
    train, evals = ({p.prompt for p in problems(split, n)} for split, n in (("train", 4000), ("eval", 1000)))
    assert len(train) > 1500 and len(evals) > 100
    assert not train & evals


@settings(derandomize=True, database=None, deadline=None, max_examples=50)
@given(st.lists(st.integers(2, recall.tokenizer.vocab_size - 1), max_size=100))
def test_ids_and_text_are_one_to_one(ids):
    assert recall.tokenizer.encode(recall.tokenizer.decode(ids)) == ids


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (" the zebra", "' zebra'"),
        ("the", "'t'"),  # a word without its space
        (" the  of", "' '"),
        (" the\n", "' the\\\\n'|'\\\\n'"),
        (" <|eos|>", "eos"),  # text cannot spell a special token
        (" \ud800", "ud800"),
        (" " * 1_000_000, "' '"),
    ],
)
def test_text_outside_the_vocabulary_is_named(text, named):
    with pytest.raises(ValueError, match=named) as error:
        recall.tokenizer.encode(text)
    assert "not in the vocabulary" in str(error.value)


@pytest.mark.parametrize("id", [-1, recall.tokenizer.vocab_size])
def test_an_id_outside_the_table_is_named(id):
    with pytest.raises(ValueError, match=rf"token id {id}: must be in 0\.\.{recall.tokenizer.vocab_size - 1}"):
        recall.tokenizer.decode([2, id])


@pytest.mark.parametrize(("words", "named"), [(["two words"], "'two words'"), (["a", "b", "a"], "1 .* twice")])
def test_a_bad_vocabulary_is_refused(words, named):
    with pytest.raises(ValueError, match=named):
        WordTokenizer("bad", words)


def test_the_long_task_is_the_same_one_behind_more_filler():
    for split in ("train", "eval"):
        problem = recall_long.make_problem(random.Random(0), split)
        words = problem.prompt.split()
        assert len(recall.tokenizer.encode(problem.prompt)) == recall_long.max_prompt == 2070
        assert sum(word in recall.FILLER for word in words) == 2048
        assert recall_long.reward(problem, problem.solution) == 1


def test_both_kinds_of_tokenizer_have_one_interface():
    tokens = recall.tokenizer
    assert tokens.prompt(" the a1") == tokens.encode(" the a1") and tokens.eos_ids == [tokens.eos_id]

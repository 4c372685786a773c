"""The distillation task and its teacher: same problems, same vocabulary, another way to write the answer."""

import random

import pytest

from data import Problem, spellings, spellings_teacher

PROBLEM = Problem(prompt=" a1 the c3 b2 ? c a b =", solution=" c.0 3.1 3.2 a.f 1.0 4.a b.b 2.2 6.6 #.9 6.1", answer="6")


def problems(task, split, n=200):
    rng = random.Random(0)
    return [task.make_problem(rng, split) for _ in range(n)]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (PROBLEM.solution, 1),
        (" #.0 6.0", 1),
        (" #.f 6.a", 1),
        (" #.0 7.0", 0),
        (" #.0 6.0 #.0 7.0", 0),
        (" #.0", 0),
        (" 6.0", 0),
        (" #.0 6.0 the", 0),
        ("", 0),
    ],
)
def test_every_spelling_of_the_answer_counts(response, reward):
    assert spellings.reward(PROBLEM, response) == spellings_teacher.reward(PROBLEM, response) == reward


@pytest.mark.parametrize("task", [spellings, spellings_teacher])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_problem_is_what_its_text_says(task, split):
    tokenizer = task.tokenizer
    for problem in problems(task, split):
        listed, asked = problem.prompt.split(" ? ")
        value = {word[0]: int(word[1]) for word in listed.split() if word[1:].isdigit()}
        steps, total = [], 0
        for name in asked.removesuffix(" =").split():
            total += value[name]
            steps += [name, str(value[name]), str(total)]
        words = problem.solution.split()
        assert [w.partition(".")[0] for w in words] == [*steps, "#", str(total)]
        assert task.reward(problem, problem.solution) == 1 and task.reward(problem, problem.prompt) == 0
        assert len(tokenizer.encode(problem.prompt)) == task.max_prompt
        assert len(tokenizer.encode(problem.solution)) + 1 == task.max_response
        assert tokenizer.decode(tokenizer.encode(problem.solution)) == problem.solution


def test_the_student_sees_all_sixteen_spellings_and_the_teacher_one():
    assert spellings_teacher.tokenizer is spellings.tokenizer
    used = {
        task: {word.partition(".")[2] for p in problems(task, "train") for word in p.solution.split()}
        for task in (spellings, spellings_teacher)
    }
    assert used[spellings] == set(spellings.SPELLINGS) and len(used[spellings]) == 16
    assert used[spellings_teacher] == {"0"}


def test_no_prompt_is_in_both_splits():
    train, held_out = ({p.prompt for p in problems(spellings, split, 1000)} for split in ("train", "eval"))
    assert not train & held_out

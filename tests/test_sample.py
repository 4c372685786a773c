"""sample.py from a run's folder and from a model folder: what it prints, streams and marks; errors of one line."""

import dataclasses
import io
import json
import random
import sys

import pytest
import torch

import sample
from data import recall
from kernels import visible
from kv_compress import rollout
from model import GPT, GPTConfig
from train import save_checkpoint, vocabulary_digest


@pytest.fixture
def run(tmp_path):
    """A run's folder: a random model of the recall task."""
    vocabulary = dict(vocab_size=recall.tokenizer.vocab_size, block_size=80)
    model = GPT(GPTConfig(**vocabulary), torch.Generator().manual_seed(0))
    state = dict(model=model.state_dict(), gpt=dataclasses.asdict(model.config))
    state["vocabulary"] = vocabulary_digest(recall.tokenizer)
    save_checkpoint(tmp_path / "ckpt.pt", **state, config={"task": "recall"})
    save_checkpoint(tmp_path / "warm.pt", **state)
    return tmp_path


@pytest.fixture
def folder(tmp_path):
    """A model folder: a random Llama whose tokens are the bytes, with ChatML's control tokens."""
    from data.tokenizer import BYTE_OF

    vocab = {c: b for c, b in BYTE_OF.items()}
    added = [{"id": 256 + i, "content": t, "special": True} for i, t in enumerate(("<|im_start|>", "<|im_end|>"))]
    file = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": added}
    file["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False}
    config = GPTConfig(vocab_size=258, block_size=128)
    GPT(config, torch.Generator().manual_seed(0)).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(file))
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["", "ckpt.pt"])
def test_a_run_is_asked_a_problem_of_its_task(run, name, capsys):
    sample.main([str(run / name), "--max_new_tokens=5", "--temperature=1"])
    prompt, empty, response, took = capsys.readouterr().out.splitlines()
    assert prompt.startswith(" pairs ") and not empty
    assert took.startswith("[54 + ") and took.endswith("K and V: 100% of the dense cache]")
    [[*tokens]] = rollout(
        sample.load(str(run))[0], [recall.tokenizer.encode(prompt)], 1, 5, eos_ids=[1],
        generator=torch.Generator().manual_seed(0),
    ).tokens.tolist()  # fmt: skip
    assert response == recall.tokenizer.decode(tokens[54:])
    sample.main([str(run), "--max_new_tokens=5", "--seed=1"])
    assert capsys.readouterr().out.splitlines()[0] != prompt


def test_what_was_evicted_is_marked(run, capsys):
    prompt = " pairs" + " the" * 20 + " ="
    sample.main([str(run), f"--prompt={prompt}", "--policy=streaming", "--sinks=1", "--recent=2", "--kv_budget=6",
                 "--max_new_tokens=4", "--show"])  # fmt: skip
    response, took, marked = capsys.readouterr().out.splitlines()
    assert "of the dense cache]" in took
    assert marked.startswith(" pairs[- the the") and marked.replace("[-", "").replace("-]", "") == prompt + response
    kept = marked.split("-]")[-1]  # 6 slots: the sink and the 5 newest keys; the last token is never fed
    assert kept.count(" ") == 5 + 1


def test_a_terminal_gets_them_dimmed(run):
    model, tokenizer, *_ = sample.load(str(run))
    how = dict(eos_ids=[1], policy="streaming", sinks=1, recent=2, kv_budget=6)
    text = sample.marked(tokenizer, rollout(model, [[2] * 20], 1, 4, **how), terminal=True)
    assert text.count("\033[2m") == text.count("\033[0m") == 1 and "[-" not in text


def test_a_model_folder_chats_line_by_line(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\n<|im_end|>\n"))
    sample.main([str(folder), "--max_new_tokens=3", "--prompt_budget=0.5"])
    out = capsys.readouterr().out
    chat = len("<user\n" + "hi" + ">\n<assistant\n")
    assert f"[{chat} + 3 tokens" in out and f"[{chat + 8} + 3 tokens" in out  # the spelled control token is text
    assert out.count("> ") == 4 and "100%" not in out


def test_the_stream_is_what_was_decoded(folder, capsys, monkeypatch):
    """A character of several tokens appears when it is whole, and nothing is printed twice."""
    tokenizer = sample.load(str(folder))[1]
    said = [*tokenizer.encode("né 你🙂"), 0xE4]  # ends with a third of a character
    steps = []

    def fake(*_, on_token, **__):
        for id in said:
            on_token(torch.tensor([id]))
            steps.append(capsys.readouterr().out)
        return type("Roll", (), dict(kv_bytes=1, kv_bytes_dense=1))

    monkeypatch.setattr(sample, "rollout", fake)
    sample.main([str(folder), "--prompt=x"])
    assert steps[:4] == ["n", "", "é", " "] and "".join(steps) == "né 你🙂"
    assert capsys.readouterr().out.startswith("\ufffd\n[")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["no-such-folder"], "no-such-folder: no such folder"),
        (["{run}/warm.pt"], "a warm start, which does not say what its task is"),
        (["{run}", "--policy=best"], "policy='best': must be one of snapkv"),
        (["{run}", "--kv_budget=3"], "kv_budget=3"),
        (["{run}", "--prompt_budget=half"], "prompt_budget: invalid number value: 'half'"),
        (["{run}", "--temperature=-1"], "temperature=-1"),
        (["{run}", "--max_new_tokens=0"], "max_new_tokens=0"),
        (["{run}", "--prompt= zebra"], "' zebra': not in the vocabulary"),
        (["{run}", "--prompt="], "prompt 0 of 1 is empty"),
        (["{run}", "--prompt=" + " the" * 200], "exceed block_size=80"),
        (["{run}", "--promt=x"], "unrecognized arguments: --promt=x"),
        ([], "required: model"),
    ],
)
def test_errors_are_one_line(run, args, named):
    with pytest.raises(SystemExit) as error:
        sample.main([arg.format(run=run) for arg in args])
    assert str(error.value.code).startswith("error: ") and named in error.value.code
    assert "\n" not in error.value.code


@pytest.fixture
def figures(monkeypatch):
    """Figures that were drawn, instead of saved."""
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, dpi: drawn.append(self))
    return drawn


def numbers_of(figure):
    """Shades of the mask, [birth, end] of each key, and the two curves."""
    mask, bars, memory = figure.axes
    lives = [[int(x0), int(x1)] for (x0, _), (x1, _) in bars.collections[0].get_segments()]
    return torch.tensor(mask.images[0].get_array()), lives, [line.get_ydata() for line in memory.lines]


def test_the_picture_shows_the_mask_and_counts_its_keys(run, figures):
    """Prompt of 54, of which 13 keys survive at 25%, and 4 fed tokens: the numbers drawn, not the pixels."""
    options = ["--max_new_tokens=5", "--prompt_budget=0.25", "--layer=1", "--head=1", "--png=x.png"]
    sample.main([str(run), *options])
    shades, lives, (dense, seen) = numbers_of(figures[0])  # shades: 0 seen, .8 evicted, 1 in the future
    assert shades.shape == (58, 58) and ((shades == 1) == torch.ones(58, 58).triu(1).bool()).all()
    assert (shades == 0).sum(1).tolist() == [*range(1, 55), 14, 15, 16, 17]
    assert [birth for birth, _ in lives] == list(range(58))
    assert sorted(end for _, end in lives) == [54] * 41 + [58] * 17
    kib = 2 * 2 * 2 * 16 * 4 / 1024  # layers, kv heads, K and V, head size, bytes
    assert dense == pytest.approx([kib * n for n in range(1, 59)])
    assert seen == pytest.approx([kib * n for n in [*range(1, 55), 14, 15, 16, 17]])
    assert figures[0].axes[2].get_ylabel() == "KiB a row"


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_the_picture_is_of_the_head_that_was_asked_for(run, figures, layer, head):
    """A budget that binds while decoding, random victims, so that heads differ: the mask drawn is visible()'s."""
    cache = dict(policy="random", sinks=1, recent=2, kv_budget=12)
    options = [f"--{key}={value}" for key, value in cache.items()]
    sample.main([str(run), "--max_new_tokens=20", f"--layer={layer}", f"--head={head}", "--png=x.png", *options])
    model, tokenizer, task, _ = sample.load(str(run))
    prompt = task.make_problem(random.Random(0), "eval").prompt
    how = dict(eos_ids=tokenizer.eos_ids, temperature=0, generator=torch.Generator().manual_seed(0))
    roll = rollout(model, [tokenizer.prompt(prompt)], 1, 20, **how, **cache)
    record = roll.evicted_at[..., :-1]  # the last token is never fed
    T = record.shape[-1]
    assert T > 54 and not (record[layer, 0, head] == record[1 - layer, 0, head]).all()
    shades, lives, (_, seen) = numbers_of(figures[0])
    assert ((shades == 0) == visible(record[layer])[0, head]).all()
    assert lives == [[j, min(end, T)] for j, end in enumerate(record[layer, 0, head].tolist())]
    assert seen[54:] == pytest.approx([12 * 2 * 2 * 2 * 16 * 4 / 1024] * (T - 54))  # every slot of every head is full


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--layer=2", "--layer=2: must be in 0..1 for this model"),
        ("--head=-1", "--head=-1: must be in 0..1 for this model"),
        ("--head=2", "--head=2: must be in 0..1 for this model"),
        ("--layer=x", "argument --layer: invalid int value: 'x'"),
        ("--png=x.jpg", "--png=x.jpg: must be the name of a .png file, in a folder that is there"),
        ("--png=", "--png=: must be the name of a .png file"),
        ("--png=no-such-folder/x.png", "--png=no-such-folder/x.png: must be the name of a .png file"),
    ],
)
def test_a_picture_that_cannot_be_is_refused_before_anything_is_sampled(run, monkeypatch, option, message):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sample, "rollout", lambda *_, **__: pytest.fail("sampled"))
    with pytest.raises(SystemExit) as error:
        sample.main([str(run), "--png=x.png", option])
    assert error.value.code.startswith(f"error: {message}") and "\n" not in error.value.code


def test_without_matplotlib_a_picture_is_refused(run, monkeypatch):
    monkeypatch.setattr(sample.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="error: --png needs matplotlib: pip install matplotlib"):
        sample.main([str(run), "--png=x.png"])


def test_a_run_is_sampled_as_it_was_trained(run, capsys):
    state = torch.load(run / "ckpt.pt")
    torch.save(state | {"config": {"task": "recall", "prompt_budget": 0.5, "sinks": 1, "recent": 2}}, run / "ckpt.pt")
    for options, share in (([], 27 + 5), (["--prompt_budget=0.25"], 13 + 5), (["--prompt_budget=0"], 54 + 5)):
        sample.main([str(run), "--max_new_tokens=5", *options])
        assert f"{share / 59:.0%} of the dense" in capsys.readouterr().out

"""Weights in and out against transformers, tiny random models of every family; damaged folders; the real SmolLM2."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from util import tiny

from data.tokenizer import ChatTokenizer
from kv_compress import POLICIES, rollout
from model import GPT, GPTConfig

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3_ROPE["original_max_position_embeddings"] = 256
FAMILIES = {  # name: class in transformers, tied, query heads, kv heads, head size, further settings
    "qwen3": ("Qwen3", False, 6, 2, 16, {}),
    "qwen3-tied": ("Qwen3", True, 4, 4, 32, dict(rope_theta=1e6)),
    "qwen2": ("Qwen2", False, 14, 2, 8, {}),
    "qwen2-tied": ("Qwen2", True, 4, 1, 16, dict(rope_theta=1e6)),
    "llama3": ("Llama", False, 8, 2, 16, dict(rope_parameters=LLAMA3_ROPE)),
    "llama3-tied": ("Llama", True, 8, 2, 8, dict(rope_parameters=LLAMA3_ROPE, rms_norm_eps=1e-5)),
    "smollm2": ("Llama", True, 9, 3, 8, dict(rope_theta=1e5)),
}


def published(name: str, folder: Path, **options):
    """A random model in transformers, saved in `folder`; weights so large that attention is not uniform."""
    family, tied, nh, nkv, hs, settings = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=97, hidden_size=nh * (hs if family != "Qwen3" else 8), intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=nh, num_key_value_heads=nkv, head_dim=hs, tie_word_embeddings=tied,
        max_position_embeddings=2048, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa", **settings,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.normal_(1 if "norm" in key else 0, 0.3 if p.dim() == 1 else 1.2 * p.shape[1] ** -0.5)
    model.save_pretrained(folder, **options)
    return model.eval()


def assert_same_logits(mine: GPT, theirs, idx: torch.Tensor):
    with torch.no_grad():
        a, b = mine(idx), theirs(idx).logits
    worst, scale = (a - b).abs().max().item(), b.abs().max().item()
    assert worst <= 1e-4 * scale, f"largest difference {worst:.2e}, largest logit {scale:.2f}"
    assert torch.equal(a.argmax(-1), b.argmax(-1))
    return worst / scale


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name, tmp_path):
    theirs, mine = published(name, tmp_path), GPT.from_pretrained(tmp_path)
    idx = torch.randint(97, (1, 1500), generator=torch.Generator().manual_seed(1))
    assert_same_logits(mine, theirs, idx)
    prompt = idx[:1, :20]
    greedy = theirs.generate(prompt, max_new_tokens=50, do_sample=False, eos_token_id=None, pad_token_id=0)
    roll = rollout(mine, prompt.tolist(), 1, 50, eos_ids=[], temperature=0)
    assert roll.tokens.tolist() == greedy.tolist()
    assert len(set(roll.tokens[0, 20:].tolist())) > 3  # not one token over and over
    assert mine.config.block_size == 2048 and GPT.from_pretrained(tmp_path, block_size=64).config.block_size == 64
    assert all(p.dtype == torch.float32 and p.requires_grad for p in mine.parameters())
    assert (mine.head.weight is mine.embed.weight) == FAMILIES[name][1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_model_is_the_same_for_transformers_and_for_us(name, tmp_path):
    published(name, tmp_path / "theirs")
    mine = GPT.from_pretrained(tmp_path / "theirs", block_size=512)
    with torch.no_grad():
        for p in mine.parameters():
            p.add_(0.01)
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    mine.save_pretrained(tmp_path / "mine", source=tmp_path / "theirs")
    assert (tmp_path / "mine" / "tokenizer.json").is_file()
    idx = torch.randint(97, (1, 500), generator=torch.Generator().manual_seed(1))
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "mine", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.config.model_type == FAMILIES[name][0].lower()
    assert_same_logits(mine, model, idx)
    again = GPT.from_pretrained(tmp_path / "mine")
    assert again.config == mine.config
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), again.parameters(), strict=True))


def test_a_model_made_here_loads_in_transformers(tmp_path):
    mine = GPT(GPTConfig(n_embd=48, n_head=6, n_kv_head=2, head_dim=10), torch.Generator().manual_seed(0))
    mine.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_logits(mine, theirs, torch.arange(100)[None])
    with pytest.raises(ValueError, match="qkv_bias and qk_norm together"):
        GPT(GPTConfig(qkv_bias=True, qk_norm=True)).save_pretrained(tmp_path)


def test_bfloat16_shards_become_float32_masters(tmp_path):
    theirs = published("llama3", tmp_path).bfloat16()
    shutil.rmtree(tmp_path)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    mine = GPT.from_pretrained(tmp_path)
    assert {p.dtype for p in mine.parameters()} == {torch.float32}
    theirs = type(theirs).from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_logits(mine, theirs, torch.arange(97)[None])


def test_settings_of_transformers_4_are_read(tmp_path):
    theirs = published("llama3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": rope}))
    assert_same_logits(GPT.from_pretrained(tmp_path), theirs, torch.arange(97).repeat(10)[None])


def test_a_tied_head_may_be_written_out_if_it_is_the_embedding(tmp_path):
    theirs = published("smollm2", tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    save_file(state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}, file)
    assert_same_logits(GPT.from_pretrained(tmp_path), theirs, torch.arange(97)[None])
    save_file(state | {"lm_head.weight": state["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(ValueError, match=r"'lm_head\.weight' is not the embedding"):
        GPT.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mistral"}, "model_type='mistral': must be one of llama, qwen2, qwen3"),
        ({"model_type": None}, "model_type=None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures=.*must be .*LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': only silu"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*sliding_attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*fp8"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_parameters=.*yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling=.*linear"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_parameters=.*must give .*factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
        ({"hidden_size": None}, "hidden_size=None: must be an integer"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2': must be an integer"),
        ({"num_key_value_heads": 5}, "n_head=8 must be a multiple of n_kv_head=5"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
        ({"intermediate_size": 65}, r"mlp.gate_proj.weight' has shape \[64, 128\], must be \[65, 128\]"),
        ({"vocab_size": 96}, r"embed_tokens.weight' has shape \[97, 128\], must be \[96, 128\]"),
        ({"num_hidden_layers": 3}, r"missing tensor 'model\.layers\.2\..* \(9 in all\)"),
        ({"num_hidden_layers": 1}, r"unexpected tensor 'model\.layers\.1\..* \(9 in all\)"),
        ({"model_type": "qwen3", "architectures": None}, r"missing tensor '.*q_norm\.weight'"),
        ({"model_type": "qwen2", "architectures": None}, r"missing tensor '.*q_proj\.bias'"),
        ({"tie_word_embeddings": True}, r"'lm_head\.weight' is not the embedding"),
        ("block_size", "max_position_embeddings=2048: block_size=4096 is longer"),
        ("{", r"config\.json: not a JSON file"),
        ("[]", r"config\.json: must hold a JSON object"),
        ("no config", r"config\.json: there is no such file"),
        ("no weights", r"model\.safetensors: there is no such file"),
        ("truncated", r"model\.safetensors: not a whole safetensors file"),
        ("empty", r"model\.safetensors: not a whole safetensors file"),
        ("int8", r"'model\.norm\.weight' is I8, must be F32, BF16 or F16"),
        ("missing shard", r"model-00002-of-\d+\.safetensors: there is no such file"),
        ("truncated shard", r"model-00002-of-\d+\.safetensors: not a whole safetensors file"),
        ("stray shard", r"model-00099-of-00099\.safetensors: model\.safetensors\.index\.json does not list"),
        ("stray tensor", r"model-00002-of-\d+\.safetensors: unexpected tensor 'extra'"),
        ("lost tensor", r"missing tensor .*, which the index has there"),
        ("bad index", r"index\.json: weight_map must give the file"),
    ],
)
def test_what_does_not_fit_is_named_before_there_is_a_model(tmp_path, monkeypatch, change, named):
    sharded = str(change).endswith(("shard", "tensor", "index"))
    published("llama3", tmp_path, max_shard_size="20KB" if sharded else "1GB")
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    shards, options = sorted(tmp_path.glob("model-*.safetensors")), {}
    index = tmp_path / "model.safetensors.index.json"
    if isinstance(change, dict):
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    elif change == "block_size":
        options["block_size"] = 4096
    elif change in ("{", "[]"):
        config.write_text(change)
    elif change == "no config":
        config.unlink()
    elif change == "no weights":
        weights.unlink()
    elif change == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif change == "empty":
        weights.write_bytes(b"")
    elif change == "int8":
        state = load_file(weights)
        save_file(state | {"model.norm.weight": state["model.norm.weight"].to(torch.int8)}, weights)
    elif change == "missing shard":
        shards[1].unlink()
    elif change == "truncated shard":
        shards[1].write_bytes(shards[1].read_bytes()[:-1])
    elif change == "stray shard":
        shutil.copy(shards[1], tmp_path / "model-00099-of-00099.safetensors")
    elif change == "stray tensor":
        save_file(load_file(shards[1]) | {"extra": torch.zeros(1)}, shards[1])
    elif change == "lost tensor":
        save_file({}, shards[1])
    elif change == "bad index":
        index.write_text('{"weight_map": {"a": 1}}')
    monkeypatch.setattr(GPT, "load_state_dict", lambda *_, **__: pytest.fail("weights were changed"))
    with pytest.raises(ValueError, match=named) as error:
        GPT.from_pretrained(tmp_path, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "one", "a/b/c", "README.md"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_named(name):
    with pytest.raises(ValueError, match=rf"{re.escape(name)}: no such folder, and not a hub id"):
        GPT.from_pretrained(name)


def test_a_hub_id_is_fetched_and_what_the_hub_says_is_one_line(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    published("smollm2", tmp_path)
    asked = []
    monkeypatch.setattr(hub, "snapshot_download", lambda id, **_: asked.append(id) or str(tmp_path))
    GPT.from_pretrained("owner/name")
    assert asked == ["owner/name"]

    def offline(*_, **__):
        raise OSError("no\nnetwork")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"owner/name: no such folder, and the hub says no network"):
        GPT.from_pretrained("owner/name")


# ---------------------------------------------------------------------------------------------------------------------
# The real SmolLM2-135M-Instruct

SMOLLM2 = os.environ.get("NANOSMD_SMOLLM2", "")
needs_smollm2 = pytest.mark.skipif(not SMOLLM2, reason="NANOSMD_SMOLLM2 names no folder made by python -m data.smollm2")
TEXTS = [
    "What is the capital of France?",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Der schnelle braune Fuchs springt über den faulen Hund. 你好，世界。",
    "1 + 1 = 2, 2 + 2 = 4, 4 + 4 = 8, 8 + 8 =",
    "Once upon a time there was a cat who lived by the sea. " * 40,
]


@needs_smollm2
def test_smollm2_logits_and_greedy_tokens_are_those_of_transformers():
    mine, tok = GPT.from_pretrained(SMOLLM2), ChatTokenizer(SMOLLM2)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    for text in TEXTS:
        ids = tok.prompt(text)
        worst = assert_same_logits(mine, theirs, torch.tensor([ids]))
        greedy = theirs.generate(torch.tensor([ids]), max_new_tokens=50, do_sample=False, eos_token_id=tok.eos_ids)
        roll = rollout(mine, [ids], 1, 50, eos_ids=tok.eos_ids, temperature=0)
        assert roll.tokens.tolist() == greedy.tolist()
        print(
            f"{len(ids)} tokens, {worst:.1e} of the largest logit: {tok.decode(roll.tokens[0, len(ids) :].tolist())!r}"
        )


@needs_smollm2
@pytest.mark.parametrize("policy", POLICIES)
def test_smollm2_replays_what_the_sampler_saw(policy):
    model, tok, rng = GPT.from_pretrained(SMOLLM2, block_size=512), ChatTokenizer(SMOLLM2), random.Random(0)
    words = " ".join(TEXTS).split()
    prompts = [tok.prompt(" ".join(rng.choices(words, k=n)))[:most] for n, most in ((120, 100), (200, 173), (300, 300))]
    assert min(map(len, prompts)) == 100 and max(map(len, prompts)) == 300
    options = dict(kv_budget=64, policy=policy, generator=torch.Generator().manual_seed(0))
    roll = rollout(model, prompts, 1, 48, eos_ids=[], **options)
    mask, targets = roll.response_mask[:, 1:], roll.tokens[:, 1:]
    gaps = {}
    with torch.no_grad():
        for view, evicted_at in (("masked", roll.evicted_at[..., :-1]), ("dense", None)):
            logp = model(roll.tokens[:, :-1], evicted_at).log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
            gaps[view] = (logp - roll.logp[:, 1:]).abs()[mask].max().item()
    print(f"{policy}: gap_max masked {gaps['masked']:.1e}, dense {gaps['dense']:.2f}, {mask.sum().item()} tokens")
    assert gaps["masked"] <= 1e-3 and gaps["dense"] > 0.1


# ---------------------------------------------------------------------------------------------------------------------
# SnapKV's kept keys are those of kvpress (tests/kvpress_snapkv.py made the file)


def snapkv_case() -> tuple[GPT, list[int]]:
    """The tiny Qwen3 and the prompt of 128 tokens that both sides compress."""
    model = tiny(seed=5, n_head=6, n_kv_head=2, head_dim=8, qk_norm=True, block_size=256, vocab_size=97, n_layer=3)
    return model.cpu(), torch.randint(97, (128,), generator=torch.Generator().manual_seed(2)).tolist()


def test_snapkv_keeps_what_kvpress_keeps():
    expected = json.loads((Path(__file__).parent / "kvpress_snapkv.json").read_text())
    model, prompt = snapkv_case()
    assert expected["prompt"] == prompt  # the same generator still draws the same tokens, and so the same weights
    options = dict(prompt_budget=0.5, policy="snapkv", sinks=0, recent=16, pool=5)
    roll = rollout(model, [prompt], 1, 1, eos_ids=[], **options)
    kept = roll.evicted_at[:, 0, :, :128] > 128  # (L, nkv, 128)
    for layer, heads in enumerate(expected["kept"]):
        for head, positions in enumerate(heads):
            assert kept[layer, head].nonzero().flatten().tolist() == positions, f"layer {layer}, kv head {head}"
    assert len({tuple(positions) for heads in expected["kept"] for positions in heads}) == 6  # each head its own keys

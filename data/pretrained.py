"""Foreign weights in and out: Qwen3, Qwen2 (and 2.5), Llama 3.x and SmolLM2, as config.json + safetensors.

    model = GPT.from_pretrained("Qwen/Qwen3-0.6B")    a folder, or a hub id (pip install huggingface_hub)
    model.save_pretrained("mine", source=...)         transformers loads the folder back

Everything is checked before a model exists: a setting this model does not have, a missing, unexpected, misshapen or
quantised tensor and a missing, stray or truncated file are a ValueError of one line that names it.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model import GPT, GPTConfig

FAMILIES = {  # model_type: the class in transformers, what it has that GPTConfig switches
    "llama": ("LlamaForCausalLM", {}),  # SmolLM2 too
    "qwen2": ("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True}),
}
SHAPE = {  # GPTConfig: config.json
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "ffn_dim": "intermediate_size",
}
MUST_BE = {  # settings of these families that this model does not have, and the only value it runs
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def read_json(path: Path) -> dict:
    """Raises ValueError if there is no JSON object at `path`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ValueError(f"{path}: not a JSON file: {e}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return value


def find_folder(folder_or_hub_id: str | Path) -> Path:
    """The folder itself, or the local copy of a hub repository; nothing is fetched when there is such a folder."""
    folder = Path(folder_or_hub_id)
    if folder.is_dir():
        return folder
    if len(folder.parts) != 2 or folder.exists():
        raise ValueError(f"{folder_or_hub_id}: no such folder, and not a hub id (owner/name)")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(f"{folder}: no such folder; pip install huggingface_hub to fetch it from the hub") from None
    try:
        return Path(snapshot_download(str(folder_or_hub_id), allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as e:  # no network, no such repository, no access: the reasons are the hub's
        raise ValueError(f"{folder}: no such folder, and the hub says {' '.join(str(e).split()) or repr(e)}") from None


def read_config(folder: Path, block_size: int | None = None) -> GPTConfig:
    """GPTConfig of a folder's config.json; block_size defaults to its max_position_embeddings."""
    path = folder / "config.json"
    c = read_json(path)

    def refuse(key: str, allowed: str):
        raise ValueError(f"{path}: {key}={c.get(key)!r}: {allowed}")

    if c.get("model_type") not in FAMILIES:
        refuse("model_type", f"must be one of {', '.join(FAMILIES)}")
    name, switches = FAMILIES[c["model_type"]]
    if c.get("architectures") not in (None, [name]):
        refuse("architectures", f"must be {[name]}")
    for key, value in MUST_BE.items():
        if c.get(key, value) not in (value, None):
            refuse(key, f"only {value} is supported")
    if set(c.get("layer_types") or []) - {"full_attention"}:
        refuse("layer_types", "only full_attention is supported")
    c.setdefault("num_key_value_heads", c.get("num_attention_heads"))
    for key in (*SHAPE.values(), "max_position_embeddings"):
        if type(c.get(key)) is not int or c[key] < 1:
            refuse(key, "must be an integer of at least 1")
    if (block_size or 1) > c["max_position_embeddings"]:
        refuse("max_position_embeddings", f"block_size={block_size} is longer")
    # transformers 5 writes one dict, rope_parameters; before it there were rope_theta and, if not default, rope_scaling
    key = "rope_parameters" if c.get("rope_parameters") else "rope_scaling"
    rope = {"rope_theta": c.get("rope_theta", 10_000.0), **(c.get(key) or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        refuse(key, "only the rope types default and llama3 are supported, on whole heads")
    numbers = ("rope_theta", *(SCALING if kind == "llama3" else ()))
    if any(not isinstance(rope.get(k), int | float) or rope[k] <= 0 for k in numbers):
        refuse(key, f"must give {', '.join(numbers)}, each above 0")
    eps = c.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or eps < 0:
        refuse("rms_norm_eps", "must be a number of at least 0")
    try:
        return GPTConfig(
            **{ours: c[theirs] for ours, theirs in SHAPE.items()},
            **switches,
            block_size=block_size or c["max_position_embeddings"],
            head_dim=c.get("head_dim") or (128 if c["model_type"] == "qwen3" else None),  # transformers' defaults
            rope_theta=float(rope["rope_theta"]),
            rope_scaling=tuple(float(rope[k]) for k in SCALING) if kind == "llama3" else None,
            norm_eps=eps,
            tie_head=bool(c.get("tie_word_embeddings", False)),
        )
    except ValueError as e:  # a shape that cannot be
        raise ValueError(f"{path}: {e}") from None


def parts(config: GPTConfig) -> dict[str, dict[str, int]]:
    """Our tensor -> the published tensors that, stacked in this order, are it, with their rows."""
    C, hs = config.n_embd, config.head_dim
    nh, nkv, F = config.n_head * hs, config.n_kv_head * hs, config.ffn_dim
    table = {"embed.weight": {"model.embed_tokens.weight": config.vocab_size}, "norm.weight": {"model.norm.weight": C}}
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        attention = f"{theirs}.self_attn"
        table[f"{ours}.norm1.weight"] = {f"{theirs}.input_layernorm.weight": C}
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            rows = {"q": nh, "k": nkv, "v": nkv}
            table[f"{ours}.attention.qkv.{kind}"] = {f"{attention}.{n}_proj.{kind}": r for n, r in rows.items()}
        if config.qk_norm:
            table[f"{ours}.attention.q_norm.weight"] = {f"{attention}.q_norm.weight": hs}
            table[f"{ours}.attention.k_norm.weight"] = {f"{attention}.k_norm.weight": hs}
        table[f"{ours}.attention.out.weight"] = {f"{attention}.o_proj.weight": C}
        table[f"{ours}.norm2.weight"] = {f"{theirs}.post_attention_layernorm.weight": C}
        gate_up = {f"{theirs}.mlp.{n}_proj.weight": F for n in ("gate", "up")}
        table[f"{ours}.mlp.gate_up.weight"] = gate_up
        table[f"{ours}.mlp.down.weight"] = {f"{theirs}.mlp.down_proj.weight": C}
    if not config.tie_head:
        table["head.weight"] = {"lm_head.weight": config.vocab_size}
    return table


def open_shards(folder: Path) -> dict[str, safe_open]:
    """Every tensor's name -> the open file that has it: model.safetensors, or what its index lists."""
    index_path, weight_map = folder / "model.safetensors.index.json", None
    if (folder / "model.safetensors").exists() or not index_path.exists():
        files = ["model.safetensors"]
    else:
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise ValueError(f"{index_path}: weight_map must give the file of each tensor")
        files = sorted(set(weight_map.values()))
        stray = sorted({p.name for p in folder.glob("model-*-of-*.safetensors")} - set(files))
        if stray:
            raise ValueError(f"{folder / stray[0]}: {index_path.name} does not list this file")
    tensors = {}
    for name in files:
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: there is no such file")
        try:
            shard = safe_open(folder / name, framework="pt")
        except (SafetensorError, OSError) as e:
            raise ValueError(f"{folder / name}: not a whole safetensors file ({e})") from None
        for tensor in shard.keys():  # noqa: SIM118  (not a dict)
            if weight_map is not None and weight_map.get(tensor) != name:
                raise ValueError(f"{folder / name}: unexpected tensor {tensor!r}, which the index has elsewhere")
            tensors[tensor] = shard
    if missing := sorted((weight_map or {}).keys() - tensors.keys()):
        raise ValueError(f"{folder / weight_map[missing[0]]}: missing tensor {missing[0]!r}, which the index has there")
    return tensors


def read_weights(folder: Path, model: GPT) -> dict[str, Tensor]:
    """The state dict of `model`, whose shapes alone are used, from a folder: float32, whatever the files hold."""
    table, shapes, tensors = parts(model.config), model.state_dict(), open_shards(folder)
    expected = {name: [rows, *shapes[ours].shape[1:]] for ours, part in table.items() for name, rows in part.items()}
    if missing := [name for name in expected if name not in tensors]:
        raise ValueError(f"{folder}: missing tensor {missing[0]!r} ({len(missing)} in all)")
    # A tied head is written out by some; it must then be what it is tied to.
    tied = {"lm_head.weight"} if model.config.tie_head else set()
    if unexpected := sorted(tensors.keys() - expected.keys() - tied):
        raise ValueError(f"{folder}: unexpected tensor {unexpected[0]!r} ({len(unexpected)} in all)")
    for name, shape in expected.items():
        found = tensors[name].get_slice(name)
        if found.get_shape() != shape:
            raise ValueError(f"{folder}: {name!r} has shape {found.get_shape()}, must be {shape}")
        if found.get_dtype() not in ("F32", "BF16", "F16"):
            raise ValueError(f"{folder}: {name!r} is {found.get_dtype()}, must be F32, BF16 or F16")

    def read(name: str) -> Tensor:
        return tensors[name].get_tensor(name)

    if tied & tensors.keys() and not torch.equal(read("lm_head.weight"), read("model.embed_tokens.weight")):
        raise ValueError(f"{folder}: 'lm_head.weight' is not the embedding, but tie_word_embeddings is true")
    state = {}
    for ours, part in table.items():
        state[ours] = torch.empty(shapes[ours].shape)
        for out, name in zip(state[ours].split(list(part.values())), part, strict=True):
            out.copy_(read(name))
    if model.config.tie_head:
        state["head.weight"] = state["embed.weight"]
    return state


def write(model: GPT, folder: str | Path, source: str | Path | None = None) -> None:
    """Write config.json and model.safetensors (float32), and copy the tokenizer's files of the folder `source`.

    Raises ValueError if none of the families has the model's switches.
    """
    config, folder = model.config, Path(folder)
    switches = {key: True for key in ("qkv_bias", "qk_norm") if getattr(config, key)}
    family = [name for name, (_, has) in FAMILIES.items() if has == switches]
    if not family:
        raise ValueError("qkv_bias and qk_norm together: no family has both")
    theta, scaling = config.rope_theta, config.rope_scaling
    rope = scaling and {"rope_type": "llama3", "rope_theta": theta, **dict(zip(SCALING, scaling, strict=True))}
    written = {
        "architectures": [FAMILIES[family[0]][0]],
        "model_type": family[0],
        **{theirs: getattr(config, ours) for ours, theirs in SHAPE.items()},
        "head_dim": config.head_dim,
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": theta,  # read by transformers 4 and 5 alike
        "rope_scaling": rope,
        "tie_word_embeddings": config.tie_head,
        "hidden_act": "silu",
        "dtype": "float32",
        "bos_token_id": None,  # not the family's defaults, which may lie outside of the vocabulary
        "eos_token_id": None,
    }
    state, tensors = model.state_dict(), {}
    for ours, part in parts(config).items():
        pieces = state[ours].float().cpu().split(list(part.values()))
        tensors |= {name: piece.contiguous() for name, piece in zip(part, pieces, strict=True)}
    folder.mkdir(parents=True, exist_ok=True)
    if source is not None and Path(source).resolve() != folder.resolve():
        source = find_folder(source)
        for name in COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

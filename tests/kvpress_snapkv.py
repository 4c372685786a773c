"""Make tests/kvpress_snapkv.json: the keys that kvpress 0.5.5's SnapKVPress keeps of test_pretrained.py's prompt.

    pip install kvpress==0.5.5 "transformers<5.3" pytest && PYTHONPATH=. python tests/kvpress_snapkv.py

kvpress needs an older transformers than the tests do: run it in an environment of its own.
"""

import json
import tempfile
from pathlib import Path

import torch
from kvpress import SnapKVPress
from test_pretrained import snapkv_case
from transformers import DynamicCache, Qwen3ForCausalLM

model, prompt = snapkv_case()
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    qwen = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

whole, pressed = DynamicCache(), DynamicCache()
with torch.no_grad():
    qwen(torch.tensor([prompt]), past_key_values=whole)
    with SnapKVPress(compression_ratio=0.5, window_size=16, kernel_size=5)(qwen):
        qwen(torch.tensor([prompt]), past_key_values=pressed)

kept = []
for full, cut in zip(whole.layers, pressed.layers, strict=True):  # keys (1,nkv,128,hs) and (1,nkv,64,hs)
    same = (full.keys[0, :, :, None] == cut.keys[0, :, None]).all(-1).any(-1)  # (nkv, 128) a key is recognised by value
    kept.append([head.nonzero().flatten().tolist() for head in same])
assert all(len(head) == 64 for layer in kept for head in layer)
Path(__file__).with_suffix(".json").write_text(json.dumps({"prompt": prompt, "kept": kept}) + "\n")

"""A published model's tokenizer, from its folder's tokenizer.json: byte-level BPE on tiktoken, and its chat format.

    tok = ChatTokenizer("Qwen3-0.6B")
    tok.decode(tok.encode("text"))     ordinary text only: no text can spell a control token
    tok.prompt("a question")           the ids of a chat with that one user message, up to where the answer begins

Chat formats: ChatML (Qwen, SmolLM2; with the default system message of the model's own template, and Qwen3's thinking
switched off by the empty block that the template has for it), and Llama 3's headers, without the system message of
that template, which tells the date.
"""

import re
import unicodedata
from pathlib import Path

import regex  # tiktoken brings it
import tiktoken

from data.pretrained import find_folder, read_json

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS_GPT2_SPLIT = (  # every digit alone first, then GPT-2's: a digit ends a run of spaces like the end of the text
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
)
# tokenizer.json writes bytes as printable characters: those that are printable in Latin-1 as themselves, the others,
# in order, from U+0100 on.
PRINTABLE = [b for b in range(256) if 33 <= b < 127 or (b >= 161 and b != 173)]
BYTE_OF = {chr(b): b for b in PRINTABLE}
BYTE_OF |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in PRINTABLE)}


def split_pattern(pre_tokenizer: dict) -> str:
    """The regular expression of a tokenizer.json's pre_tokenizer, whose pieces BPE never joins.

    Three forms: ByteLevel (GPT-2), Digits + ByteLevel (SmolLM2), and Split by a pattern + ByteLevel (Qwen, Llama 3).
    """
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    *first, last = ({k: v for k, v in step.items() if k != "trim_offsets"} for step in steps)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False}
    if last | {"use_regex": True} == byte_level | {"use_regex": True}:
        if last.get("use_regex", True):
            if not first:
                return GPT2_SPLIT
            if first == [{"type": "Digits", "individual_digits": True}]:
                return DIGITS_GPT2_SPLIT
        elif [s | {"pattern": 0} for s in first] == [
            {"type": "Split", "pattern": 0, "behavior": "Isolated", "invert": False}
        ] and isinstance(pattern := first[0]["pattern"].get("Regex"), str):
            return pattern
    raise ValueError(f"pre_tokenizer {pre_tokenizer}: only (Digits or Split +) ByteLevel is supported")


class ChatTokenizer:
    """A model folder's tokenizer. `vocab_size` is the model's, which may have unused rows: ids without any text.

    eos_ids: every id that ends the model's turn, from generation_config.json, config.json and the chat format.
    """

    def __init__(self, folder_or_hub_id: str | Path):
        """Raises ValueError, naming the file, for a tokenizer that is not byte-level BPE as described above."""
        folder = find_folder(folder_or_hub_id)
        path = folder / "tokenizer.json"
        try:
            self._read(read_json(path))
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"{path}: not a byte-level BPE tokenizer ({type(e).__name__}: {e})") from None
        except ValueError as e:
            raise ValueError(f"{path}: {str(e).removeprefix(f'{path}: ')}") from None
        config = read_json(folder / "config.json")
        table = max(*self.ids, *self.special.values()) + 1
        self.vocab_size = config.get("vocab_size")
        if type(self.vocab_size) is not int or self.vocab_size < table:
            raise ValueError(f"{folder / 'config.json'}: vocab_size={self.vocab_size!r}: {path} has {table} ids")

        def optional(name: str) -> dict:
            return read_json(folder / name) if (folder / name).is_file() else {}

        template = optional("tokenizer_config.json").get("chat_template") or ""
        if (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        if not isinstance(template, str):
            raise ValueError(f"{folder / 'tokenizer_config.json'}: chat_template must be one template")
        self.no_thinking = "enable_thinking" in template and "<think>" in self.special
        m = re.search(
            r"<\|im_start\|>system(?:\\n|\n)([^'\"{}<]+)<\|im_end\|>", template if type(template) is str else ""
        )
        self.system = m[1] if m else None
        named = [c.get("eos_token_id") for c in (optional("generation_config.json"), config)]
        ends = [i for ids in named for i in (ids if isinstance(ids, list) else [ids]) if i is not None]
        ends += [self.special[end] for end in ("<|im_end|>", "<|eot_id|>") if end in self.special]
        if bad := [i for i in ends if type(i) is not int or not 0 <= i < self.vocab_size]:
            raise ValueError(f"{folder}: eos_token_id={bad[0]!r}: must be in 0..{self.vocab_size - 1}")
        if not ends:
            raise ValueError(f"{folder}: neither a configuration file nor the tokenizer names a token that ends a turn")
        self.eos_ids = sorted(set(ends))

    def _read(self, file: dict) -> None:
        """pattern, encoding (tiktoken, whose ranks are the order of the merges), ids of its ranks, special ids."""
        bpe, added = file["model"], file.get("added_tokens") or []
        normalizer = file.get("normalizer") or {"type": None}
        if bpe["type"] != "BPE" or bpe.get("byte_fallback") or bpe.get("dropout") or bpe.get("unk_token"):
            raise ValueError("the model must be BPE without byte_fallback, dropout and unk_token")
        if normalizer["type"] not in (None, "NFC"):
            raise ValueError(f"normalizer {normalizer['type']!r}: only NFC is supported")
        self.nfc = normalizer["type"] == "NFC"
        self.pattern = regex.compile(split_pattern(file["pre_tokenizer"]))
        self.special = {token["content"]: token["id"] for token in added}

        vocab = {token: id for token, id in bpe["vocab"].items() if token not in self.special}
        merged = ["".join(m) if isinstance(m, list) else m.replace(" ", "", 1) for m in bpe["merges"]]
        single = list(BYTE_OF)
        whole = list(vocab) if bpe.get("ignore_merges") else []  # found by lookup of a whole piece, without a merge
        if lost := [token for token in merged if token not in vocab]:
            raise ValueError(f"a merge makes {lost[0]!r}, which is not in the vocabulary")
        order = list(dict.fromkeys([*single, *merged, *whole]))
        ranks = {bytes(BYTE_OF[c] for c in token): rank for rank, token in enumerate(order)}
        self.ids = [vocab.get(token, -1) for token in order]  # id of a rank; -1 for a byte outside of the vocabulary
        self.missing = bytes(b for c, b in BYTE_OF.items() if c not in vocab)
        self.text_of = {self.ids[rank]: text for text, rank in ranks.items()}
        # Special tokens have no text; other added tokens, like <think>, have.
        self.text_of |= {token["id"]: token["content"].encode() for token in added if not token["special"]}
        self.encoding = tiktoken.Encoding("", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text: `<|im_end|>` in it is ten characters. Raises ValueError at a lone surrogate.

        Split here, not by tiktoken, whose backtracking panics at a million spaces. Bytes outside of the vocabulary (21
        in SmolLM2's, most of which no text has) are dropped before the merges.
        """
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise ValueError(f"{text[e.start]!r}: half of a surrogate pair is not text") from None
        if self.nfc:
            text = unicodedata.normalize("NFC", text)
        pieces = (piece.encode().translate(None, self.missing) for piece in self.pattern.findall(text))
        return [self.ids[rank] for piece in pieces if piece for rank in self.encoding._encode_single_piece(piece)]

    def prompt(self, text: str) -> list[int]:
        """Ids of a chat in which the user says `text`, up to where the answer begins. Control tokens stand between the
        encoded segments, so `text` cannot add one. Raises ValueError if the model has no known chat format."""
        s = self.special
        if {"<|im_start|>", "<|im_end|>"} <= s.keys():
            start, end, newline = [s["<|im_start|>"]], [s["<|im_end|>"]], self.encode("\n")
            ids = [*start, *self.encode(f"system\n{self.system}"), *end, *newline] if self.system else []
            ids += [*start, *self.encode(f"user\n{text}"), *end, *newline, *start, *self.encode("assistant\n")]
            if self.no_thinking:
                gap = self.encode("\n\n")
                ids += [s["<think>"], *gap, s["</think>"], *gap]
            return ids
        if {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"} <= s.keys():
            start, end = [s["<|start_header_id|>"]], [s["<|end_header_id|>"]]
            user = [*start, *self.encode("user"), *end, *self.encode(f"\n\n{text.strip()}"), s["<|eot_id|>"]]
            return [s["<|begin_of_text|>"], *user, *start, *self.encode("assistant"), *end, *self.encode("\n\n")]
        raise ValueError("the model's tokenizer has the control tokens neither of ChatML nor of Llama 3's chat format")

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`; special tokens and unused ids have none, half a character is U+FFFD.

        Raises ValueError for an id outside of the table.
        """
        if bad := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise ValueError(f"token id {bad[0]}: must be in 0..{self.vocab_size - 1}")
        return b"".join(self.text_of.get(i, b"") for i in ids).decode(errors="replace")

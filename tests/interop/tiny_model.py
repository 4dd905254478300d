"""A model and adapters of a few kilobytes, made without a download and without any package.

The model is a configuration only: engines start with `load_format="dummy"`, which draws random
weights. Adapters and the tokenizer are real files, in the formats of safetensors and tokenizers.
"""

from __future__ import annotations

import array
import json
import random
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 512
HIDDEN = 64
LAYERS = 2
HEADS = 2
HEAD_SIZE = 32
"""The CPU attention kernel takes 32, 64, 80 ...; with 16 an engine dies at its first request."""
MAX_POSITIONS = 4096
SPECIAL = ("<pad>", "<s>", "</s>")
"""Tokens 0, 1 and 2."""


def make_model(folder: Path, **overrides: Any) -> Path:
    """Write a Llama of two layers; `num_local_experts=4` makes vLLM run it as if it were MoE."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    _write_json(folder / "config.json", config | overrides)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer: three special tokens, 256 bytes, then pairs of letters."""
    vocabulary = {token: number for number, token in enumerate(SPECIAL)}
    for char in sorted(_byte_characters()):
        vocabulary[char] = len(vocabulary)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    pairs = [(x, y) for x in letters for y in letters][: VOCABULARY - len(vocabulary)]
    for x, y in pairs:
        vocabulary[x + y] = len(vocabulary)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **flags, "special": True}
            for number, token in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(pair) for pair in pairs],
        },
    }
    _write_json(folder / "tokenizer.json", tokenizer)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_POSITIONS,
            "pad_token": SPECIAL[0],
            "bos_token": SPECIAL[1],
            "eos_token": SPECIAL[2],
            "clean_up_tokenization_spaces": False,
        },
    )


def _byte_characters() -> list[str]:
    """The characters that stand for the 256 bytes by GPT-2's rule: what is unseen moves up."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = 256 - len(shown)
    return [chr(number) for number in (*shown, *range(256, 256 + hidden))]


def make_adapter(folder: Path, *, rank: int = 8, seed: int = 1) -> Path:
    """Write a LoRA adapter for the value and output projections of :func:`make_model`'s model."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    attention = HEADS * HEAD_SIZE
    tensors: dict[str, tuple[Sequence[int], array.array[float]]] = {}
    for layer in range(LAYERS):
        for name, inputs, outputs in (("v_proj", HIDDEN, attention), ("o_proj", attention, HIDDEN)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                # Large numbers, so that the adapter changes what the model says.
                values = (chance.gauss(0, 2) for _ in range(shape[0] * shape[1]))
                tensors[f"{prefix}.{part}.weight"] = shape, array.array("f", values)
    _write_safetensors(folder / "adapter_model.safetensors", tensors)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["v_proj", "o_proj"],
        "inference_mode": True,
        "fan_in_fan_out": False,
        "modules_to_save": None,
    }
    _write_json(folder / "adapter_config.json", config)
    return folder


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _write_safetensors(
    path: Path, tensors: Mapping[str, tuple[Sequence[int], array.array[float]]]
) -> None:
    """Length of the header (8 bytes), header (JSON, padded with blanks), then the numbers."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, (shape, values) in tensors.items():
        if sys.byteorder == "big":
            values.byteswap()
        start = len(data)
        data += values.tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)

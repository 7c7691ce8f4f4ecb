"""Models on the GPU machine: from a GGUF file, or with a known model's shape and random weights. Nothing is fetched.

    python -m scripts.gpu.models convert FILE.gguf FOLDER             weights and tokenizer as a Hugging Face folder (bfloat16)
    python -m scripts.gpu.models random Qwen3-8B FOLDER --tokenizer FOLDER2

Throughput needs a shape, not a mind. SGLang's dummy weights refuse adapters, so random ones lie on disk.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from console.plan.shapes import ModelShape, known_shape

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
)


def convert(gguf: Path, folder: Path) -> None:
    """GGUF -> safetensors and tokenizer. Needs torch, transformers and gguf."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    # Newer transformers keep a GGUF's blocks as they are, and such a model cannot be saved; older ones only know dense weights.
    dense = {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **dense)
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder)


def config_of(shape: ModelShape) -> Any:
    """A transformers configuration of a known Qwen2.5 or Qwen3 shape."""
    from transformers import Qwen2Config, Qwen3Config

    kind: Any = Qwen3Config if "Qwen3" in shape.name else Qwen2Config
    head = {"head_dim": shape.head_dim} if "Qwen3" in shape.name else {}
    return kind(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=shape.tied,
        **head,
    )


def write_random(shape: ModelShape, folder: Path, tokenizer: Path | None, seed: int = 0) -> None:
    """Write a model of this shape with random bfloat16 weights."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for name in _TOKENIZER if tokenizer is not None else ():
        assert tokenizer is not None
        if (tokenizer / name).is_file():
            shutil.copy2(tokenizer / name, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("convert")
    one.add_argument("gguf", type=Path)
    one.add_argument("folder", type=Path)
    other = kinds.add_parser("random")
    other.add_argument("shape")
    other.add_argument("folder", type=Path)
    other.add_argument("--tokenizer", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.kind == "convert":
        convert(options.gguf, options.folder)
        return
    shape = known_shape(options.shape)
    if shape is None:
        raise SystemExit(f"no shape {options.shape!r}; see console/plan/shapes.py for those there are")
    write_random(shape, options.folder, options.tokenizer)


if __name__ == "__main__":
    main()

"""Pre-trains the demo's proposer and writes its whole folder, from one seed.

    python -m scripts.proposer.pretrain --out tasks/proposers/packing

Generates parents and pairs (`generate.py`, `corpus.py`), learns the tokenizer (`vocabulary.py`), trains a 3.4 M-parameter Llama,
saves it in bf16 and measures it (`evaluate.py`). Threads, torch version and processor change the last bits of every sum, so another
machine gives other weights of the same quality; the model card states the margin.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.proposer.corpus import Pair, held_out_prompts, make_pairs, make_parents, problem_view, seed_prompts
from scripts.proposer.evaluate import load, measure, prompt_ids
from scripts.proposer.vocabulary import constant_lines, save_tokenizer, train_tokenizer

MAX_LENGTH = 2048
WEIGHT_BYTES_LIMIT = 7_000_000
CARD = Path(__file__).with_name("model_card.md")


@dataclass(frozen=True)
class Settings:
    """What shapes the weights."""

    seed: int = 0
    parents: int = 2400
    """Drawn; about nine in ten are valid and stay."""
    pairs: int = 14_000
    batch: int = 16
    learning_rate: float = 2e-3
    warmup: float = 0.03
    prompt_weight: float = 0.3
    """Of the loss on prompt tokens, against 1 on the program: reading the parent well needs some of it."""
    merges_until: int = 560
    vocabulary: int = 1024


@dataclass(frozen=True)
class Example:
    """Token ids of one pair and where its response begins."""

    ids: list[int]
    response_at: int


def encode(tokenizer: PreTrainedTokenizerFast, pair: Pair) -> Example:
    """Prompt and response are encoded apart, as they are when an engine samples."""
    prompt = prompt_ids(tokenizer, pair.prompt)
    response = tokenizer(pair.response, add_special_tokens=False)["input_ids"]
    return Example([*prompt, *response, tokenizer.eos_token_id], len(prompt))


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def batches(examples: list[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Batches of like length in random order: sorted inside windows of 40 batches, so little is padded."""
    window = size * 40
    grouped = []
    for start in range(0, len(examples), window):
        near = sorted(examples[start : start + window], key=lambda e: len(e.ids))
        grouped += [near[i : i + size] for i in range(0, len(near), size)]
    rng.shuffle(grouped)
    yield from grouped


def collate(batch: list[Example], pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded ids, and masks of the prompt and of the response."""
    ends = torch.tensor([len(e.ids) for e in batch])[:, None]
    middles = torch.tensor([e.response_at for e in batch])[:, None]
    width = int(ends.max())
    ids = torch.tensor([e.ids + [pad] * (width - len(e.ids)) for e in batch])
    places = torch.arange(width)[None]
    return ids, places < middles, (places >= middles) & (places < ends)


def train(model: LlamaForCausalLM, examples: list[Example], settings: Settings, device: str) -> None:
    """One pass over the examples with AdamW and a cosine schedule."""
    rng = random.Random(f"batches {settings.seed}")
    order = list(batches(examples, settings.batch, rng))
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, round(settings.warmup * len(order)))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * step / len(order)))),
    )
    began, seen, shown = time.perf_counter(), 0, [0.0, 0.0]
    model.train()
    for step, batch in enumerate(order, 1):
        ids, prompt, child = (t.to(device) for t in collate(batch, model.config.pad_token_id))
        logits = model(input_ids=ids[:, :-1]).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        child = child[:, 1:].flatten()
        flat = child.float() + settings.prompt_weight * prompt[:, 1:].flatten()
        loss = (losses * flat).sum() / flat.sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        shown[0] += losses.detach()[child].sum().item()
        shown[1] += int(child.sum())
        seen += sum(len(e.ids) for e in batch)
        if step % 50 == 0 or step == len(order):
            speed = seen / (time.perf_counter() - began)
            print(
                f"step {step}/{len(order)}  {seen / 1e6:.2f} M tokens  {speed:.0f} tokens/s"
                f"  child loss {shown[0] / shown[1]:.4f} nats/token",
                flush=True,
            )
            shown = [0.0, 0.0]
    model.eval()


def write_sums(folder: Path) -> None:
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in files]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def build(out: Path, settings: Settings, device: str, threads: int) -> None:
    """Everything, in order."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=device != "cpu")
    torch.manual_seed(settings.seed)
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    parents = make_parents(settings.seed, settings.parents)
    pairs = make_pairs(settings.seed, parents, settings.pairs)
    print(f"{len(parents)} parents, {len(pairs)} pairs in {time.perf_counter() - began:.0f} s", flush=True)
    lines = constant_lines(problem_view().instruction)
    texts = [text for pair in pairs[:4000] for text in (pair.prompt, pair.response)]
    tokenizer = save_tokenizer(train_tokenizer(texts, lines, settings.vocabulary, settings.merges_until), out, MAX_LENGTH)
    examples = [encode(tokenizer, pair) for pair in pairs]
    response = sum(len(e.ids) - e.response_at for e in examples) / len(examples)
    total = sum(len(e.ids) for e in examples) / len(examples)
    model = new_model(tokenizer).to(device)
    size = model.num_parameters()
    print(f"{size:,} parameters, {len(tokenizer)} tokens, {total - response:.0f} + {response:.0f} a pair", flush=True)
    began = time.perf_counter()
    train(model, examples, settings, device)
    print(f"trained in {time.perf_counter() - began:.0f} s")
    model.to("cpu", torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    weights = (out / "model.safetensors").stat().st_size
    if weights > WEIGHT_BYTES_LIMIT:
        raise SystemExit(f"model.safetensors has {weights:,} bytes, more than {WEIGHT_BYTES_LIMIT:,}; lower the vocabulary")
    facts = {
        "parameters": f"{size:,}",
        "bytes": f"{weights:,}",
        "vocabulary": str(len(tokenizer)),
        "tokens": f"{total * len(examples) / 1e6:.1f}",
        "prompt_tokens": f"{total - response:.0f}",
        "response_tokens": f"{response:.0f}",
        "torch": torch.__version__.partition("+")[0],
        "device": device,
        "threads": str(threads),
    }
    finish(out, settings, facts)


def finish(out: Path, settings: Settings, facts: dict[str, str], samples: int = 256) -> None:
    """Measure what was saved, as a run will load it, and write the card and the sums."""
    torch.set_num_threads(1)
    model, tokenizer = load(out)
    held, _ = measure(model, tokenizer, *held_out_prompts(samples))
    start, _ = measure(model, tokenizer, *seed_prompts(samples))
    for name, numbers in (("held-out parents", held), ("seed program", start)):
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()), flush=True)
    rows = [f"| {key} | {held[key]:.4g} | {start[key]:.4g} |" for key in held]
    card = CARD.read_text(encoding="utf-8")
    facts = facts | {"seed": str(settings.seed), "pairs": f"{settings.pairs:,}", "measured": "\n".join(rows)}
    for key, value in facts.items():
        card = card.replace("{" + key + "}", value)
    (out / "README.md").write_text(card, encoding="utf-8")
    write_sums(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tasks/proposers/packing"), help="folder to write")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of everything")
    parser.add_argument("--pairs", type=int, default=Settings.pairs, help="training pairs, about 185 tokens each")
    parser.add_argument("--prompt-weight", type=float, default=Settings.prompt_weight, help="loss weight of the prompt")
    parser.add_argument("--threads", type=int, default=2, help="torch threads; part of what decides the last bits")
    parser.add_argument("--device", default="cpu", help="torch device")
    options = parser.parse_args()
    settings = Settings(seed=options.seed, pairs=options.pairs, prompt_weight=options.prompt_weight)
    build(options.out, settings, options.device, options.threads)


if __name__ == "__main__":
    main()

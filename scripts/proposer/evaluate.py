"""Measures a proposer: samples programs for fixed held-out parents, runs them and prints what came out.

    python -m scripts.proposer.evaluate tasks/proposers/packing [--adapter FOLDER] [--samples 64] [--start]

Knows nothing of runs, archives or the judge; the score is the floating-point one of `execute.py`.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM

from activities.sample.extract import extract_program
from scripts.proposer.corpus import held_out_prompts, seed_prompts
from scripts.proposer.execute import Outcome, run_programs

MAX_NEW_TOKENS = 200

CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""transformers renamed it within version 5; the old name ends in 5.40."""


@dataclass(frozen=True)
class Sample:
    """One sampled response with what training needs of it."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    text: str
    finished: bool


def load(folder: Path, adapter: Path | None = None) -> tuple[Any, Any]:
    """Model in float32 (CPUs without bf16 units are ten times slower in bf16) and tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@torch.no_grad()
def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    generator: torch.Generator,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[Sample]:
    """One response a prompt at temperature 1, in one left-padded batch with a KV cache."""
    starts = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    width = max(map(len, starts))
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    tokens = torch.tensor([[pad] * (width - len(s)) + s for s in starts])
    mask = (torch.arange(width)[None] >= torch.tensor([width - len(s) for s in starts])[:, None]).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    alive = torch.ones(len(starts), dtype=torch.bool)
    drawn: list[list[int]] = [[] for _ in starts]
    logprobs: list[list[float]] = [[] for _ in starts]
    cache = DynamicCache(config=model.config)
    for _ in range(max_new_tokens):
        out = model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE_ARGUMENT: cache})
        logp = out.logits[:, -1].float().log_softmax(-1)
        chosen = torch.multinomial(logp.exp(), 1, generator=generator)
        for i in alive.nonzero().flatten().tolist():
            drawn[i].append(int(chosen[i]))
            logprobs[i].append(float(logp[i, chosen[i]]))
        alive &= chosen[:, 0] != end
        if not alive.any():
            break
        tokens = chosen
        mask = torch.cat([mask, torch.ones_like(chosen)], dim=1)
        positions = positions[:, -1:] + 1
    return [
        Sample(s, ids, lps, tokenizer.decode(ids, skip_special_tokens=True), ids[-1] == end)
        for s, ids, lps in zip(starts, drawn, logprobs, strict=True)
    ]


def score_samples(samples: Sequence[Sample], workers: int = 2, seconds: float = 10.0) -> list[Outcome]:
    """Run the program of every response; a response without one is a syntax failure."""
    programs = [extract_program(s.text) if s.finished else None for s in samples]
    return run_programs([p if p is not None else "(" for p in programs], workers, seconds)


def summary(samples: Sequence[Sample], outcomes: Sequence[Outcome], parents: Sequence[str]) -> dict[str, float]:
    """The numbers of one measurement; reward of an invalid program is 0."""
    n = len(samples)
    valid = torch.tensor([o.score for o in outcomes if o.score is not None], dtype=torch.float64)
    programs = [extract_program(s.text) or "" for s in samples]
    quartiles = valid.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist() if len(valid) else [0.0] * 3
    return {
        "samples": n,
        "compile rate": sum(o.reason != "syntax" for o in outcomes) / n,
        "valid rate": len(valid) / n,
        "mean reward": float(valid.sum()) / n,
        "mean of valid": float(valid.mean()) if len(valid) else 0.0,
        "quartile 1": quartiles[0],
        "median": quartiles[1],
        "quartile 3": quartiles[2],
        "max": float(valid.max()) if len(valid) else 0.0,
        "refining": sum("minimize(" in p for p in programs) / n,
        "duplicates": n - len(set(programs)),
        "copies of parents": sum(p.strip() == q.strip() for p, q in zip(programs, parents, strict=True)),
        "unfinished": sum(not s.finished for s in samples),
        "mean length": sum(len(s.ids) for s in samples) / n,
        "mean prompt length": sum(len(s.prompt_ids) for s in samples) / n,
    }


def measure(
    model: Any, tokenizer: Any, prompts: Sequence[str], parents: Sequence[str], seed: int = 0, batch: int = 32
) -> tuple[dict[str, float], list[Outcome]]:
    """Sample in batches of `batch`, run, summarise."""
    generator = torch.Generator().manual_seed(seed)
    samples: list[Sample] = []
    for i in range(0, len(prompts), batch):
        samples += sample(model, tokenizer, prompts[i : i + batch], generator)
    outcomes = score_samples(samples)
    return summary(samples, outcomes, parents), outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Hugging Face folder of the proposer")
    parser.add_argument("--adapter", type=Path, help="PEFT adapter to measure with")
    parser.add_argument("--samples", type=int, default=64, help="programs to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    parser.add_argument("--start", action="store_true", help="use the task's seed program as every parent")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; 2 are slower when anything else runs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load(options.folder, options.adapter)
    prompts, parents = seed_prompts(options.samples) if options.start else held_out_prompts(options.samples)
    began = time.perf_counter()
    numbers, outcomes = measure(model, tokenizer, prompts, parents, options.seed)
    for name, number in numbers.items():
        print(f"{name:>20}: {number:.4g}")
    print(f"{'failures':>20}:", dict(Counter(o.reason for o in outcomes if o.reason)))
    print(f"{'seconds':>20}: {time.perf_counter() - began:.1f}")


if __name__ == "__main__":
    main()

"""A search without engine and judge: a tiny random model samples its own grid and is paid for small token ids.

Everything else is real: weights on disk, the back-end, LoRA, Adam, stored documents. For tests and experiments of the train and
publish rooms; version 0 comes from the caller, since `open` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from activities.blobs import Blobs, digest_of
from activities.models import model_digest
from activities.records import Batch, BatchRow, RolloutRecord, RunSpec, Verdict, canonical_json
from activities.run_store import RunStore
from activities.train.backend import ScoredSequence
from activities.train.checkpoints import read_state
from activities.train.torch_backend import TorchBackend, TorchOptions
from workflows.contracts.base import Coordinate, Digest, Outcome, PolicyRef, RunRef
from workflows.contracts.messages import TrainRequest
from workflows.contracts.request import RunRequest

Family = Literal["qwen2", "qwen3", "llama"]
Reward = Callable[[Sequence[int], int], float]
"""(response token ids, vocabulary size) -> reward."""


def make_model(
    folder: Path,
    family: Family = "qwen2",
    *,
    seed: int = 0,
    vocabulary: int = 64,
    hidden: int = 32,
    layers: int = 2,
    changes: Mapping[str, Any] | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """Write a random causal model as a Hugging Face folder, without tokenizer. Wide weights, so that tokens are not all alike.

    Args:
        changes: fields of the model's configuration that are to be otherwise.
        max_shard_size: of one weight file.
    """
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.15,
        "tie_word_embeddings": family == "llama",
    }
    if family == "qwen3":
        shape["head_dim"] = hidden // 2  # heads x head_dim is not the hidden size in Qwen3
    name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[family]
    config = getattr(transformers, f"{name}Config")(**(shape | dict(changes or {})))
    torch.manual_seed(seed)
    model: Any = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide a swapped one
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def share_of_small_tokens(response: Sequence[int], vocabulary: int) -> float:
    """Share of tokens in the lower half of the vocabulary: easy to learn, and every run learns the same."""
    return sum(token < vocabulary // 2 for token in response) / max(1, len(response))


@dataclass
class FakeSearch:
    """One run: its store, spec and model, and the trainer that samples."""

    store: RunStore
    spec: RunSpec
    folder: Path
    backend: TorchBackend

    @classmethod
    def open(cls, blobs: Blobs, folder: Path, *, run_id: str = "fake", **request: Any) -> FakeSearch:
        """A run of a made-up task; `request` are fields of a RunRequest."""
        asked = RunRequest.model_validate({"task": "fake", "model": folder.name, "lora": {"rank": 4, "alpha": 8}} | request)
        nothing = digest_of(b"")
        science = {"model": model_digest(folder), "request": asked.model_dump(mode="json")}
        spec = RunSpec(
            run_id=run_id,
            request=asked,
            identity=digest_of(canonical_json(science)),
            task="fake",
            start="default",
            task_digest=nothing,
            judge_digest=nothing,
            model_digest=science["model"],
            prompt_digest=nothing,
            wall_seconds=1.0,
            cores=1,
            memory_bytes=1 << 30,
            result_bytes=1 << 20,
            science=science,
        )
        return cls(RunStore(blobs, run_id), spec, folder, TorchBackend(folder, asked.lora, TorchOptions()))

    @property
    def ref(self) -> RunRef:
        return RunRef(run_id=self.spec.run_id, identity=self.spec.identity, spec=self.store.put(self.spec))

    def request(self, step: int, batch: Digest, policy: PolicyRef) -> TrainRequest:
        return TrainRequest(run=self.ref, step=step, batch=batch, policy=policy)

    def sample(
        self,
        step: int,
        policy: PolicyRef,
        *,
        groups: int = 2,
        rollouts: int = 4,
        prompt_tokens: int = 6,
        response_tokens: int = 12,
        seed: int = 0,
        reward: Reward = share_of_small_tokens,
    ) -> Digest:
        """Sample a grid from the policy, judge it, and store it as a batch. Response lengths vary from half to full."""
        rng = np.random.default_rng([seed, step])
        vocabulary = int(self.backend.model.config.vocab_size)
        self.backend.load(read_state(self.store, policy.checkpoint))
        prompts = [tuple(int(t) for t in rng.integers(0, vocabulary, prompt_tokens)) for _ in range(groups)]
        repeated = [prompt for prompt in prompts for _ in range(rollouts)]
        rows = []
        for i, response in enumerate(_draw(self.backend, repeated, response_tokens, rng)):
            kept = response[: int(rng.integers(response_tokens // 2, response_tokens + 1))]
            at = Coordinate(step=step, group=i // rollouts, rollout=i % rollouts)
            rows.append(self.row(at, policy, repeated[i], kept, reward(kept, vocabulary)))
        return self.store.put(Batch(step=step, policy_version=policy.version, plan=digest_of(b""), rows=tuple(rows)))

    def row(
        self,
        at: Coordinate,
        policy: PolicyRef,
        prompt: tuple[int, ...],
        response: tuple[int, ...],
        reward: float,
        changes: Mapping[str, Any] | None = None,
    ) -> BatchRow:
        """Store one rollout and its verdict; `changes` override fields of the rollout record."""
        tokens = prompt + response
        scores = self.backend.log_probs([ScoredSequence(tokens, len(prompt))], adapter=True)[0] if response else np.zeros(0)
        record = RolloutRecord.model_validate(
            {
                "at": at,
                "parent": "seed",
                "policy_version": policy.version,
                "policy_name": policy.name,
                "engine": "fake",
                "boot_id": "fake",
                "seed": 0,
                "prompt_tokens": prompt,
                "response_tokens": response,
                "log_probs": tuple(scores.tolist()),
                "mask": (1,) * len(response),
                "finish_reason": "length",
                "text": "",
                "program": None,
            }
            | dict(changes or {})
        )
        verdict = Verdict(at=at, outcome=Outcome.VALID, reason="", score=reward, value=reward, reward=reward)
        return BatchRow(
            at=at,
            rollout=self.store.put(record),
            verdict=self.store.put(verdict),
            outcome=verdict.outcome,
            reward=reward,
            value=reward,
            score=reward,
            exact=None,
            construction=None,
            tokens_digest=digest_of(canonical_json([prompt, response])),
        )


def _draw(
    backend: TorchBackend, prompts: Sequence[tuple[int, ...]], length: int, rng: np.random.Generator
) -> list[tuple[int, ...]]:
    """Sample one response to each prompt, token by token at temperature 1. All prompts have one length."""
    ids = torch.tensor(prompts)
    with torch.no_grad():
        for _ in range(length):
            logits = backend.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].double()
            probabilities: NDArray[np.float64] = torch.softmax(logits, dim=-1).numpy()
            cumulative = probabilities.cumsum(axis=1)
            drawn = (cumulative < rng.random((len(prompts), 1)) * cumulative[:, -1:]).sum(axis=1)
            ids = torch.cat([ids, torch.tensor(drawn)[:, None]], dim=1)
    return [tuple(row[len(prompts[0]) :]) for row in ids.tolist()]

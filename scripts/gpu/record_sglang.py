"""Record what a running SGLang answers to the requests that we send, for the tests of our client.

    python -m scripts.gpu.record_sglang --url http://127.0.0.1:30000 --adapter DIR --out tests/data/sglang

SGLang must serve with --enable-lora; DIR is a PEFT adapter that fits it. One file per case, with request, status and answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from activities.engine_wire import Json, Sampling, generate_payload

PROMPTS = ([11, 12, 13, 14, 15, 16], [21, 22, 23, 24])
ADAPTER = "00000000-v0001-000000000001"
"""Shaped as our policies are named."""
_NO_SUCH = "00000000-v0001-00000000dead"
_LONG = 200_000
_KEPT_OF_SERVER_INFO = ("model_path", "version", "enable_lora", "max_lora_rank", "max_loras_per_batch", "max_total_num_tokens",
                        "max_req_input_len", "attention_backend", "sampling_backend", "tp_size")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One request."""

    name: str
    path: str
    body: Json | None = None
    method: str = "POST"


def generate(
    new_tokens: int, *, score: bool = False, adapter: str | None = ADAPTER, prompts: Sequence[list[int]] = PROMPTS
) -> Json:
    sampling = Sampling(max_new_tokens=new_tokens, temperature=0.0 if score else 1.0, seed=None if score else 7)
    return generate_payload(prompts, sampling, adapter=adapter, base=adapter is None, prompt_log_probs=score)


def cases(adapter_directory: str) -> list[Case]:
    """In the order of asking: later ones build on what earlier ones loaded."""
    load = {"lora_name": ADAPTER, "lora_path": adapter_directory}
    strange = generate(4)
    strange["sampling_params"]["no_such_parameter"] = 1
    return [
        Case("health", "/health", method="GET"),
        Case("model_info", "/model_info", method="GET"),
        Case("server_info", "/server_info", method="GET"),
        Case("generate_never_loaded", "/generate", generate(4)),
        Case("load_adapter", "/load_lora_adapter", load),
        Case("load_adapter_again", "/load_lora_adapter", load),
        Case("load_adapter_nowhere", "/load_lora_adapter", {"lora_name": _NO_SUCH, "lora_path": "/nowhere/at/all"}),
        Case("models", "/v1/models", method="GET"),
        Case("generate_sampled", "/generate", generate(4)),
        Case("generate_base", "/generate", generate(4, adapter=None)),
        Case("generate_scored", "/generate", generate(0, score=True)),
        Case("generate_scored_one_new", "/generate", generate(1, score=True)),
        Case("generate_too_long", "/generate", generate(4, prompts=[[11] * _LONG])),
        Case("generate_unknown_parameter", "/generate", strange),
        Case("generate_bad_ids", "/generate", {**generate(4), "input_ids": "eleven"}),
        Case("abort_unknown", "/abort_request", {"rid": "nobody"}),
        Case("unload_adapter", "/unload_lora_adapter", {"lora_name": ADAPTER}),
        Case("unload_adapter_unknown", "/unload_lora_adapter", {"lora_name": _NO_SUCH}),
    ]


def ask(client: httpx.Client, case: Case) -> dict[str, Any]:
    """Ask one question. Bodies that are no JSON are kept as text."""
    response = client.request(case.method, case.path, json=case.body)
    try:
        answer = response.json() if response.content else None
    except json.JSONDecodeError:
        answer = response.text
    if case.name == "server_info" and isinstance(answer, dict):
        answer = {key: answer.get(key) for key in _KEPT_OF_SERVER_INFO}
    body = case.body
    if case.name == "generate_too_long" and body is not None:
        body = {**body, "input_ids": [[11, f"... {_LONG} in all"]]}
    return {
        "case": case.name,
        "method": case.method,
        "path": case.path,
        "request": body,
        "status": response.status_code,
        "answer": answer,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", required=True)
    parser.add_argument("--adapter", required=True, help="PEFT directory as the engine's host sees it")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with httpx.Client(base_url=options.url, timeout=300, trust_env=False) as client:
        info = client.get("/server_info").json()
        origin = f"recorded from SGLang {info.get('version')} serving {Path(str(info.get('model_path'))).name}"
        for case in cases(options.adapter):
            found = {**ask(client, case), "origin": origin}
            text = json.dumps(found, indent=1).replace(options.adapter, "/adapters/one")
            (options.out / f"{case.name}.json").write_text(text + "\n", encoding="utf-8")
            print(f"{case.name}: HTTP {found['status']}")


if __name__ == "__main__":
    main()

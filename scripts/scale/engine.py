"""An engine that answers at once: SGLang's protocol as far as the workers use it, over a formula instead of a model.

Every response is the same short program but for one number, so that every answer is a new one for the archive. The number rises
with the policy version: children beat their parents step after step, which makes the deepest lineages that a run can have. Started
by the engine worker as SGLang would be (`standin/`). Knows no run.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import safetensors.numpy
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tokenizers import Tokenizer

from scripts.scale.arithmetic import Floats, log_probs, strength_of

RESPONSE_TOKENS = "SCALE_RESPONSE_TOKENS"
"""Variable with the length of every response in tokens, its end token included."""
_VERSION = re.compile(r"-v(\d+)-")

Json = dict[str, Any]


class NoOpEngine:
    """Adapters by name, and answers. Every method runs on the event loop."""

    def __init__(self, model: Path, response_tokens: int) -> None:
        self._model = str(model)
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._response_tokens = response_tokens
        self._filler = self._tokenizer.encode(".", add_special_tokens=False).ids[0]
        self._adapters: dict[str, tuple[str, float]] = {}

    # What is asked --------------------------------------------------------------------------------------------------------
    async def generate(self, http: Request) -> Response:
        asked = msgspec.json.decode(await http.body())
        prompts: list[list[int]] = asked["input_ids"]
        names = asked.get("lora_path") or [None] * len(prompts)
        if missing := [name for name in names if name is not None and name not in self._adapters]:
            return _json({"error": {"message": f"adapter {missing[0]} is not loaded"}}, 400)
        scored = asked.get("logprob_start_len", -1) == 0
        params = asked["sampling_params"]
        return _json([self._answer(p, n, params, scored) for p, n in zip(prompts, names, strict=True)])

    def _answer(self, prompt: list[int], name: str | None, params: Json, scored: bool) -> Json:
        strength = 0.0 if name is None else self._adapters[name][1]
        text, response, end = self._response(name, params) if params["max_new_tokens"] > 1 else ("", [], {"type": "length"})
        tokens = prompt + response
        return {
            "text": text,
            "output_ids": response,
            "meta_info": {
                "finish_reason": end,
                "prompt_tokens": len(prompt),
                "completion_tokens": len(response),
                "input_token_logprobs": [[None, prompt[0], None], *_triples(log_probs(prompt, 1, strength), prompt[1:])]
                if scored
                else [],
                "output_token_logprobs": _triples(log_probs(tokens, len(prompt), strength), response),
            },
        }

    def _response(self, name: str | None, params: Json) -> tuple[str, list[int], Json]:
        version = int(found.group(1)) if name and (found := _VERSION.search(name)) else 0
        number = version + params["sampling_seed"] / 2**31
        text = f"\n```python\ndef run():\n    return {number:.9f}\n```"
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        length = min(self._response_tokens, params["max_new_tokens"])
        stop = params["stop_token_ids"][0]
        filler = [self._filler] * max(0, length - len(ids) - 1)
        return "." * len(filler) + text, [*filler, *ids, stop], {"type": "stop", "matched": stop}

    # Adapters -------------------------------------------------------------------------------------------------------------
    async def load_lora_adapter(self, http: Request) -> Response:
        asked = msgspec.json.decode(await http.body())
        folder = Path(asked["lora_path"])
        config = msgspec.json.decode((folder / "adapter_config.json").read_bytes())
        weights = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
        self._adapters[asked["lora_name"]] = (str(folder), strength_of(weights) * config["lora_alpha"] / config["r"])
        return _json({"success": True})

    async def unload_lora_adapter(self, http: Request) -> Response:
        self._adapters.pop(msgspec.json.decode(await http.body())["lora_name"], None)
        return _json({"success": True})

    async def models(self, http: Request) -> Response:
        loaded = [{"id": name, "root": path, "parent": self._model} for name, (path, _) in self._adapters.items()]
        return _json({"data": [{"id": self._model, "root": self._model, "parent": None}, *loaded]})

    async def health(self, http: Request) -> Response:
        return Response()

    def app(self) -> Starlette:
        post = {
            "/generate": self.generate,
            "/load_lora_adapter": self.load_lora_adapter,
            "/unload_lora_adapter": self.unload_lora_adapter,
        }
        get = {"/v1/models": self.models, "/health": self.health}
        return Starlette(
            routes=[
                *(Route(path, handler, methods=["POST"]) for path, handler in post.items()),
                *(Route(path, handler, methods=["GET"]) for path, handler in get.items()),
            ]
        )


def _triples(values: Floats, ids: list[int]) -> list[tuple[float, int, None]]:
    return [(value, token, None) for value, token in zip(values.tolist(), ids, strict=True)]


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal ends it; takes SGLang's flags and looks at three."""
    parser = argparse.ArgumentParser(prog="sglang.launch_server", description=__doc__)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    options, _ = parser.parse_known_args(arguments)
    engine = NoOpEngine(options.model_path, int(os.environ[RESPONSE_TOKENS]))
    uvicorn.run(engine.app(), host=options.host, port=options.port, log_level="warning", access_log=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

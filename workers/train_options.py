"""Options of the trainer's back-end from the deployment's settings. Knows neither."""

from __future__ import annotations

from activities.train.megatron.options import MegatronOptions
from activities.train.torch_backend import TorchOptions
from workers.settings import Settings

_CPU_TOKENS, _GPU_TOKENS = 2048, 16_384


def trainer_options(settings: Settings) -> TorchOptions | MegatronOptions:
    """Options whose type names the back-end.

    Raises:
        SystemExit: settings that only Megatron has are given to torch; names them.
    """
    on_gpu = settings.train_device != "cpu"
    tokens = settings.train_tokens_per_micro_batch or (_GPU_TOKENS if on_gpu else _CPU_TOKENS)
    if settings.trainer_kind == "megatron":
        return MegatronOptions(
            tensor_parallel=settings.train_tensor_parallel,
            data_parallel=settings.train_data_parallel,
            device=settings.train_device,
            threads=settings.train_threads,
            tokens_per_micro_batch=tokens,
            recompute=settings.train_recompute,
            attention=settings.train_attention,
            logits_per_chunk=(1 << 28) if on_gpu else (1 << 25),
            stall_seconds=settings.train_stall_seconds,
            folder=settings.home.resolve() / "ranks",
        )
    if settings.train_tensor_parallel * settings.train_data_parallel > 1:
        raise SystemExit(
            "tttd: TTTD_TRAIN_TENSOR_PARALLEL and TTTD_TRAIN_DATA_PARALLEL need TTTD_TRAINER_KIND=megatron; "
            "the torch trainer is one process"
        )
    return TorchOptions(
        threads=settings.train_threads,
        device=settings.train_device,
        bfloat16=on_gpu,
        tokens_per_micro_batch=tokens,
        recompute=on_gpu,
    )

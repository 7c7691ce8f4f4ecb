"""A plan for people."""

from __future__ import annotations

from collections.abc import Iterator

from console.plan.planning import Plan


def lines(plan: Plan) -> Iterator[str]:
    """The plan, line by line."""
    yield f"{plan.model}: {plan.parameters / 1e9:.2f} B parameters, LoRA {plan.lora_parameters / 1e6:.1f} M"
    yield f"{plan.gpus} x {plan.gpu}: {plan.placement}"
    yield f"{plan.rollouts} rollouts a step, prompts of {plan.prompt_tokens:,.0f} and responses of {plan.mean_tokens:,.0f} tokens"
    yield ""
    engine = plan.engine
    yield "memory"
    yield (
        f"  engine    weights {engine.weights_gb:.1f} GB, KV cache {engine.kv_gb:.1f} GB = {engine.kv_tokens:,} tokens, "
        f"{engine.rollouts_at_once} rollouts at once"
    )
    if plan.trainer is not None:
        t = plan.trainer
        kept = "recomputed" if t.recompute else "kept"
        yield (
            f"  trainer   weights {t.weights_gb:.1f} GB, adapter and Adam {t.adapter_gb:.1f} GB, activations ({kept}) "
            f"{t.activations_gb:.1f} GB, logits {t.logits_gb:.1f} GB: {t.peak_gb:.1f} of {t.available_gb:.1f} GB"
        )
    yield ""
    phases = plan.phases
    yield "seconds of a step"
    yield f"  sample and judge   {phases.sample_and_judge:9,.0f}   {engine.tokens_per_second:,.0f} tokens/s from {_engines(plan)}"
    yield f"    sampling         {phases.sample:9,.0f}"
    yield f"    judging          {phases.judge_alone:9,.0f}   {plan.judge_waves} waves on {plan.judge_slots} slots, meanwhile"
    if plan.trainer is not None:
        hidden = "   on the shared GPU" if phases.base_log_probs else "   while others sample and judge"
        yield f"  base log-probs     {phases.base_log_probs:9,.0f}{hidden}"
        yield f"  train              {phases.train:9,.0f}   {plan.trainer.tokens_per_second:,.0f} tokens/s over all passes"
        yield f"  publish            {phases.publish:9,.0f}"
    yield f"  other              {phases.other:9,.0f}"
    yield f"  step               {plan.step_seconds:9,.0f}   {plan.step_seconds / 60:.1f} min"
    yield f"run of {plan.steps} steps      {plan.run_hours:9,.1f} h = {plan.gpu_hours:,.1f} GPU-hours"
    for problem in plan.problems:
        yield ""
        yield f"{problem.level.upper()}: {problem.what}"
        yield f"  -> {problem.change}"


def _engines(plan: Plan) -> str:
    return "one engine" if plan.engine.engines == 1 else f"{plan.engine.engines} engines"

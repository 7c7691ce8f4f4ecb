"""`tttd plan`: memory, time and GPU-hours of a run, and what will not fit, before anything is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from console.output import FAILED, OK, USAGE, Failure, command, emit, emit_json

if TYPE_CHECKING:
    from console.plan.planning import Assumptions, Machine
    from console.plan.shapes import ModelShape
    from workers.settings import Settings
    from workflows.contracts.request import RunRequest

_CHARACTERS_PER_TOKEN = 3.5
_PROMPT_AROUND = 150
"""Tokens of a prompt beside the task's own text and the parent's program."""
_MEAN_SHARE = 0.46
"""Of the longest response: 12k of 26k tokens in the published runs."""
_WITHOUT_TASK = (1000.0, 300.0)
"""Prompt tokens and wall seconds of a program."""


@command
def plan(
    task: Annotated[str | None, typer.Option("--task", help="Task: its text and its judge's limits.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="A known model's name, or a model folder.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A model's config.json instead of --model.")] = None,
    profile: Annotated[str, typer.Option("--profile", help="Preset that fills every setting left out.")] = "paper",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting of the run; may be repeated.")
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, max=64)] = 2,
    gpu: Annotated[str, typer.Option("--gpu", help="H200, H100, B200, A100, L40S or RTX4090.")] = "H200",
    engines: Annotated[int | None, typer.Option("--engines", min=1, help="By default half of the GPUs sample.")] = None,
    engine_fraction: Annotated[float | None, typer.Option("--engine-fraction", help="engine_memory_fraction.")] = None,
    mean_tokens: Annotated[float | None, typer.Option("--mean-tokens", min=1, help="Of a response; by default 46 %.")] = None,
    prompt_tokens: Annotated[float | None, typer.Option("--prompt-tokens", min=1)] = None,
    judge_slots: Annotated[int, typer.Option("--judge-slots", min=1, help="Programs judged at once, in the fleet.")] = 15,
    judge_seconds: Annotated[
        float | None, typer.Option("--judge-seconds", min=0, help="A program's mean run time; by default half its limit.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Print how far the formulas lie from what was measured.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> int:
    """Estimate memory, time and GPU-hours. Exit code 1 if something does not fit. Needs no network, no GPU and no torch."""
    from console.plan import text
    from console.plan.planning import make_plan

    if check:
        return _check(as_json)
    chosen = _settings()
    request = _request(task, model, profile, settings or [])
    shape = _shape(config, request, chosen)
    machine = _machine(gpu, gpus, engines, engine_fraction, request, shape)
    assumed = _assume(task, request, chosen, judge_slots)
    assumed = replace(
        assumed,
        mean_tokens=mean_tokens or assumed.mean_tokens,
        prompt_tokens=prompt_tokens or assumed.prompt_tokens,
        judge_seconds=assumed.judge_seconds if judge_seconds is None else judge_seconds,
    )
    made = make_plan(request, shape, machine, assumed)
    if as_json:
        emit_json(made)
    else:
        emit("\n".join(text.lines(made)))
    return OK if made.fits else FAILED


def _settings() -> Settings:
    from workers.settings import load_settings

    return load_settings()


def _check(as_json: bool) -> int:
    """The calibration: every measured figure beside its formula."""
    from console.plan.measured import FIGURES, TOLERANCE, table

    if as_json:
        emit_json(
            [{"figure": x.what, "unit": x.unit, "measured": x.measured, "planned": x.planned, "error": x.error} for x in FIGURES]
        )
    else:
        emit(table())
    return OK if all(abs(figure.error) <= TOLERANCE for figure in FIGURES) else FAILED


def _request(task: str | None, model: str | None, profile: str, settings: list[str]) -> RunRequest:
    from console.launch import build_raw
    from workflows.contracts.request import parse_request

    raw: dict[str, Any] = build_raw(task or "any", profile, settings, None)
    if model is not None:
        raw["model"] = model
    try:
        return parse_request(raw)
    except ValueError as error:
        raise Failure(str(error), USAGE) from None


def _shape(config: Path | None, request: RunRequest, settings: Settings) -> ModelShape:
    from activities.errors import InputError
    from activities.models import find_model
    from console.plan.shapes import KNOWN, known_shape, read_shape

    try:
        if config is not None:
            return read_shape(config)
        if (known := known_shape(request.model)) is not None:
            return known
        return read_shape(find_model(request.model, settings.model_directories))
    except InputError as error:
        known_names = ", ".join(name.rpartition("/")[2] for name in KNOWN)
        raise Failure(f"{error}; known without files are {known_names}; or name a config.json with --config", USAGE) from None


def _machine(gpu: str, gpus: int, engines: int | None, fraction: float | None, request: RunRequest, shape: ModelShape) -> Machine:
    from console.plan.hardware import GPUS
    from console.plan.planning import default_machine

    found = GPUS.get(gpu.upper())
    if found is None:
        raise Failure(f"--gpu {gpu!r} is not one of {', '.join(GPUS)}", USAGE)
    machine = default_machine(found, gpus, request, shape)
    if engines is not None:
        used = engines * machine.engine_tensor
        if gpus > 1 and request.train == "on" and used >= gpus:
            raise Failure(f"--engines {engines} take {used} of {gpus} GPUs and leave none to the trainer", USAGE)
        left = max(1, gpus - used)
        machine = replace(machine, engines=engines, trainer_data=max(1, left // machine.trainer_tensor))
    return machine if fraction is None else replace(machine, memory_fraction=fraction)


def _assume(task: str | None, request: RunRequest, settings: Settings, judge_slots: int) -> Assumptions:
    from console.plan.planning import Assumptions
    from tasks.registry import TaskError, TaskSource

    prompt, wall = _WITHOUT_TASK
    if task is not None:
        try:
            found = TaskSource(settings.task_dirs).load(task)
            characters = len(found.instruction) + len(found.start_program(request.search.start))
        except TaskError as error:
            raise Failure(str(error), USAGE) from None
        prompt, wall = characters / _CHARACTERS_PER_TOKEN + _PROMPT_AROUND, found.limits.wall_seconds
    wall = request.judge.wall_seconds or wall
    return Assumptions(
        prompt_tokens=prompt,
        mean_tokens=_MEAN_SHARE * request.sampling.max_new_tokens,
        judge_slots=judge_slots,
        judge_seconds=wall / 2,
        judge_limit_seconds=wall,
    )


def register(app: typer.Typer) -> None:
    app.command()(plan)

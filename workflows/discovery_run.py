"""DiscoveryRun: the loop over steps. Started with a user's JSON; validates it inside, so that bad input ends the run at once.

A plain pydantic parameter would be decoded before the workflow runs, and a bad field would leave the run RUNNING for ever on a
failing workflow task. Here the input is any JSON value, and an error of ours ends the run as Failed, naming the field.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from temporalio import workflow
from temporalio.common import SearchAttributeKey, WorkflowIDReusePolicy
from temporalio.exceptions import ActivityError, ApplicationError, ChildWorkflowError

from workflows import names, policies
from workflows.calls import call
from workflows.contracts.messages import (
    ExtendArguments,
    Judged,
    JudgeSeedRequest,
    Opened,
    OpenRequest,
    Phase,
    Prepared,
    PrepareRequest,
    RunProgress,
    RunResult,
    RunState,
    RunStatus,
    StepInput,
    StepResult,
    StepSummary,
)
from workflows.contracts.request import RunRequest, parse_request
from workflows.publishing import explain, head_policies, publish_everywhere

CONTINUE_EVERY_STEPS = 25
"""Ten events a step: far below Temporal's limits, small enough to replay at once."""
RECENT_STEPS = 20
"""Step summaries carried along for the status query."""

_TASK = SearchAttributeKey.for_keyword(names.ATTRIBUTE_TASK)
_STATE = SearchAttributeKey.for_keyword(names.ATTRIBUTE_STATE)
_MODEL = SearchAttributeKey.for_keyword(names.ATTRIBUTE_MODEL)
_STEP = SearchAttributeKey.for_int(names.ATTRIBUTE_STEP)
_BEST = SearchAttributeKey.for_float(names.ATTRIBUTE_BEST)
_VERSION = SearchAttributeKey.for_int(names.ATTRIBUTE_VERSION)


@workflow.defn(name=names.DISCOVERY_RUN)
class DiscoveryRun:
    """``temporal workflow start --type DiscoveryRun --task-queue tttd-control --workflow-id run/NAME --input '{"task": ...}'``"""

    @workflow.init
    def __init__(self, raw: Any = None, carried: Any = None) -> None:
        self._raw = raw
        self._state: RunState = "opening"
        self._phase = Phase(name="opening", since=workflow.now().isoformat())
        self._error: str | None = None
        self._progress: RunProgress | None = _carried(carried)
        self._pause_asked = self._progress is not None and self._progress.paused
        self._stop_asked = False
        self._retry_asked = False

    @workflow.run
    async def run(self, raw: Any = None, carried: Any = None) -> RunResult:
        request, run_id = self._validate(raw)
        if self._progress is None:
            self._progress = await self._open(request, run_id)
            await self._publish_head(request)
        p = self._progress
        while p.head.step < p.steps and not self._stop_asked:
            if self._pause_asked:
                await self._wait_while_paused()
                continue
            if not await self._step(request):
                await self._wait_while_blocked()
            p = self._progress
            if self._should_continue_as_new():
                await workflow.wait_condition(workflow.all_handlers_finished)
                workflow.continue_as_new(args=[raw, p.model_copy(update={"paused": self._pause_asked}).model_dump(mode="json")])
        self._enter("stopped" if self._stop_asked else "completed", "done")
        await workflow.wait_condition(workflow.all_handlers_finished)
        return RunResult(
            run_id=p.run.run_id,
            state=self._state,
            step=p.head.step,
            best_score=p.head.best,
            commit=p.head.commit,
            policy=p.head.policy.name,
        )

    # Opening --------------------------------------------------------------------------------------------------------------
    def _validate(self, raw: Any) -> tuple[RunRequest, str]:
        try:
            request = parse_request(raw)
        except ValueError as error:
            raise ApplicationError(str(error), type="InputError", non_retryable=True) from None
        run_id = workflow.info().workflow_id.removeprefix("run/")
        if request.name not in (None, run_id):
            raise ApplicationError(
                f"name: {request.name!r} does not match the workflow id {workflow.info().workflow_id!r}; "
                f"leave `name` out, or start with --workflow-id run/{request.name}",
                type="InputError",
                non_retryable=True,
            )
        try:
            PrepareRequest(run_id=run_id, request=request)
        except ValidationError:
            raise ApplicationError(
                f"workflow id {workflow.info().workflow_id!r}: use run/NAME with letters, digits, '.', '_' and '-' (120 at most)",
                type="InputError",
                non_retryable=True,
            ) from None
        return request, run_id

    async def _open(self, request: RunRequest, run_id: str) -> RunProgress:
        prepared = await call(
            names.PREPARE_RUN,
            PrepareRequest(run_id=run_id, request=request),
            Prepared,
            queue=names.CONTROL_QUEUE,
            options=policies.control(request.timeouts),
            summary=f"{request.task}: resolve defaults and digests",
            activity_id="prepare",
        )
        if prepared.judge_seed:
            await call(
                names.JUDGE_SEED,
                JudgeSeedRequest(run=prepared.run),
                Judged,
                queue=names.JUDGE_QUEUE,
                options=policies.judge(request.timeouts),
                summary="certify the seed program",
                activity_id="judge-seed",
            )
        opened = await call(
            names.OPEN_RUN,
            OpenRequest(run=prepared.run),
            Opened,
            queue=names.CONTROL_QUEUE,
            options=policies.control(request.timeouts),
            summary="seeds and commit 0, or the last commit",
            activity_id="open",
        )
        return RunProgress(
            run=prepared.run,
            head=opened.head,
            steps=request.search.steps,
            best_known=opened.best_known,
            score_name=opened.score_name,
            higher_is_better=opened.higher_is_better,
            task=opened.task,
            model=opened.model,
            recent=opened.recent,
        )

    async def _publish_head(self, request: RunRequest) -> None:
        """A resume begins with publish, not with sample: the engine may have restarted since the last commit."""
        assert self._progress is not None
        p = self._progress
        while p.head.step < p.steps and not self._stop_asked:
            self._enter("running", "publish", f"policy version {p.head.policy.version}")
            try:
                await publish_everywhere(p.run, *head_policies(p.head), request.timeouts)
            except ActivityError as error:
                if workflow.cancellation_reason() is not None:
                    raise
                self._error = explain(error)
                await self._wait_while_blocked()
            else:
                return

    # Steps ----------------------------------------------------------------------------------------------------------------
    async def _step(self, request: RunRequest) -> bool:
        """Run one step; False when it failed for a reason that only a person can mend."""
        assert self._progress is not None
        p = self._progress
        step = p.head.step + 1
        self._enter("running", "step", f"step {step} of {p.steps}")
        try:
            result = await workflow.execute_child_workflow(
                names.DISCOVERY_STEP,
                StepInput(
                    run=p.run,
                    step=step,
                    head=p.head,
                    rollouts=request.search.rollouts,
                    train=request.train == "on",
                    higher_is_better=p.higher_is_better,
                    timeouts=request.timeouts,
                ),
                result_type=StepResult,
                id=f"{workflow.info().workflow_id}/step/{step:06d}",
                # A reset leaves the step in progress running; it must not keep the run from starting it again.
                id_reuse_policy=WorkflowIDReusePolicy.TERMINATE_IF_RUNNING,
                task_queue=names.CONTROL_QUEUE,
                static_summary=f"step {step} of {p.task}: policy version {p.head.policy.version}",
            )
        except ChildWorkflowError as error:
            if workflow.cancellation_reason() is not None:
                raise
            self._error = f"step {step} failed: {explain(error)}"
            return False
        # Not of `p`: the run may have been extended while the step was in progress.
        recent = (*p.recent, result.summary)[-RECENT_STEPS:]
        self._progress = self._progress.model_copy(update={"head": result.head, "recent": recent})
        return True

    def _should_continue_as_new(self) -> bool:
        assert self._progress is not None
        p = self._progress
        if p.head.step >= p.steps or self._stop_asked:
            return False
        return workflow.info().is_continue_as_new_suggested() or p.head.step % CONTINUE_EVERY_STEPS == 0

    # Waiting --------------------------------------------------------------------------------------------------------------
    async def _wait_while_paused(self) -> None:
        self._enter("paused", "paused", "waiting for `tttd resume` (update `resume`)")
        await workflow.wait_condition(lambda: not self._pause_asked or self._stop_asked)

    async def _wait_while_blocked(self) -> None:
        self._retry_asked = False
        self._enter("blocked", "blocked", "waiting for update `retry` or `stop`")
        await workflow.wait_condition(lambda: self._retry_asked or self._stop_asked)
        self._error = None

    # Updates and the query ------------------------------------------------------------------------------------------------
    @workflow.update(name=names.PAUSE)
    def pause(self) -> str:
        self._pause_asked = True
        return "the run pauses when the step in progress is committed"

    @pause.validator
    def _check_pause(self) -> None:
        self._refuse_if(self._pause_asked, "the run is already paused, or will be after this step")

    @workflow.update(name=names.RESUME)
    def resume(self) -> str:
        self._pause_asked = False
        return "the run goes on"

    @resume.validator
    def _check_resume(self) -> None:
        self._refuse_if(not self._pause_asked, f"the run is {self._state}, not paused")

    @workflow.update(name=names.STOP)
    def stop(self) -> str:
        self._stop_asked = True
        return "the run ends when the step in progress is committed"

    @stop.validator
    def _check_stop(self) -> None:
        self._refuse_if(self._stop_asked, "the run is already stopping")

    @workflow.update(name=names.RETRY)
    def retry(self) -> str:
        self._retry_asked = True
        return "trying again; stored rollouts and verdicts are used, not made again"

    @retry.validator
    def _check_retry(self) -> None:
        self._refuse_if(self._state != "blocked", f"the run is {self._state}; only a blocked run can be retried")

    @workflow.update(name=names.EXTEND)
    def extend(self, raw: Any = None) -> int:
        assert self._progress is not None
        steps = self._progress.steps + _extend_arguments(raw).steps
        self._progress = self._progress.model_copy(update={"steps": steps})
        return steps

    @extend.validator
    def _check_extend(self, raw: Any = None) -> None:
        self._refuse_if(self._progress is None, "the run is still opening; try again in a moment")
        try:
            _extend_arguments(raw)
        except ValidationError:
            self._refuse_if(True, f'extend takes {{"steps": N}} with N from 1 to 100000, got {raw!r}')

    def _refuse_if(self, condition: bool, why: str) -> None:
        # An ApplicationError rejects the update; any other exception would fail the workflow task.
        if condition:
            raise ApplicationError(why, type="UpdateRefused", non_retryable=True)

    @workflow.query(name=names.STATUS)
    def status(self) -> RunStatus:
        p = self._progress
        raw = self._raw if isinstance(self._raw, dict) else {}
        return RunStatus(
            run_id=p.run.run_id if p else workflow.info().workflow_id.removeprefix("run/"),
            task=p.task if p else str(raw.get("task", "")),
            state=self._state,
            step=p.head.step if p else 0,
            steps=p.steps if p else 0,
            best_score=p.head.best if p else None,
            best_known=p.best_known if p else None,
            score_name=p.score_name if p else "score",
            higher_is_better=p.higher_is_better if p else True,
            policy_version=p.head.policy.version if p else 0,
            commit=p.head.commit if p else None,
            pause_requested=self._pause_asked,
            phase=self._phase,
            error=self._error,
            recent=p.recent if p else (),
        )

    def _enter(self, state: RunState, phase: str, detail: str = "") -> None:
        """Begin a phase; show it in the Web UI's details and in the search attributes."""
        self._state = state
        self._phase = Phase(name=phase, since=workflow.now().isoformat(), detail=detail)
        p = self._progress
        if p is None:
            return
        updates: list[Any] = [
            _TASK.value_set(p.task),
            _MODEL.value_set(p.model),
            _STATE.value_set(state),
            _STEP.value_set(p.head.step),
            _VERSION.value_set(p.head.policy.version),
        ]
        if p.head.best is not None:
            updates.append(_BEST.value_set(p.head.best))
        workflow.upsert_search_attributes(updates)
        workflow.set_current_details(_details(p, state, detail, self._error))


def _carried(value: Any) -> RunProgress | None:
    """State from the execution before. A second input that somebody made up is ignored: the run opens from what is stored."""
    try:
        return None if value is None else RunProgress.model_validate(value)
    except ValidationError:
        return None


def _extend_arguments(raw: Any) -> ExtendArguments:
    return ExtendArguments.model_validate({"steps": raw} if isinstance(raw, int) else raw)


def _details(p: RunProgress, state: str, detail: str, error: str | None) -> str:
    """For the Web UI: state, best against best known, and a table of the last steps."""
    best = "none" if p.head.best is None else f"{p.head.best:.10f}"
    known = "" if p.best_known is None else f" (best known {p.best_known:.10f})"
    lines = [f"### {p.task}: {state}", f"{detail}  ", f"best certified {p.score_name}: **{best}**{known}", ""]
    if error:
        lines += [f"**{error}**", ""]
    if p.recent:
        # A code block: the Web UI sets Markdown tables without space between the columns.
        lines += ["```", f"{'step':>5} {'best':>12} {'grid mean':>10} {'valid':>8} {'new':>5} {'improved':>9} {'KL':>8}"]
        lines += [*(_row(s) for s in p.recent), "```"]
    return "\n".join(lines)


def _row(s: StepSummary) -> str:
    best = "" if s.best is None else f"{s.best:.8f}"
    kl = "" if s.kl is None else f"{s.kl:.4f}"
    valid = f"{s.valid}/{s.rollouts}"
    return f"{s.step:>5} {best:>12} {s.mean_reward:>10.4f} {valid:>8} {s.valid_and_new:>5} {s.improved:>9} {kl:>8}"

"""The command line: parsing, exit codes, sentences instead of tracebacks, and a --help that loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from activities.errors import ConflictError
from console.cli.demo import introduction, learning_lines
from console.cli.services import ROLES
from console.launch import ask, build_raw
from console.main import app
from console.output import FAILED, INTERRUPTED, RUN_FAILED, USAGE, VERIFICATION_FAILED, Failure, command
from tests.console_world import ARGUMENTS, SETTINGS, TASK, World
from tests.test_console_lines import summary
from workers import services
from workers.settings import Settings

COMMANDS = (
    *("demo", "run", "status", "watch", "best", "pause", "resume", "stop", "retry", "extend"),
    *("judge", "verify", "baseline", "polish", "up", "down", "worker", "doctor"),
)


@pytest.fixture
def tttd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    world = World.make(tmp_path / "home")
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("TEMPORAL_ADDRESS", "TEMPORAL_CONFIG_FILE", "TEMPORAL_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TTTD_TEMPORAL_PORT", "1")
    monkeypatch.chdir(tmp_path)
    return CliRunner()


def exit_of(error: BaseException) -> tuple[int, Any]:
    """Exit code of a command that raises, as a process would end with it."""
    single = typer.Typer(pretty_exceptions_enable=False)

    @single.command()
    @command
    def fail() -> int:
        raise error

    result = CliRunner().invoke(single, [])
    return result.exit_code, result


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (Failure("run r is blocked", RUN_FAILED), RUN_FAILED, "tttd: run r is blocked"),
        (ConflictError("two\ncontents"), FAILED, "tttd: two contents"),
        (RuntimeError("services did not come up"), FAILED, "tttd: services did not come up"),
        (SystemExit("tttd: bad settings"), USAGE, "tttd: bad settings"),
        (KeyError("x"), FAILED, "tttd: unexpected KeyError: 'x' (TTTD_DEBUG=true shows where)"),
        (KeyboardInterrupt(), INTERRUPTED, "interrupted"),
    ],
)
def test_every_error_is_a_sentence_and_a_code(error: BaseException, code: int, says: str) -> None:
    found, result = exit_of(error)
    assert found == code
    assert result.stderr.strip() == says
    assert result.stdout == ""


def test_debug_shows_the_traceback_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTTD_DEBUG", "true")
    _, result = exit_of(KeyError("x"))
    assert "Traceback" in result.stderr
    assert "unexpected KeyError" in result.stderr


def test_set_takes_dotted_keys_and_json_values() -> None:
    raw = build_raw(
        TASK, "laptop", ["search.steps=4", "search.start=empty", "train=off", "judge.wall_seconds=2.5", "model=a=b"], "n"
    )
    assert raw == {
        "task": TASK,
        "profile": "laptop",
        "name": "n",
        "search": {"steps": 4, "start": "empty"},
        "train": "off",
        "judge": {"wall_seconds": 2.5},
        "model": "a=b",
    }


@pytest.mark.parametrize("wrong", ["steps", "=4", "search..steps=4", "name=x", "task=y", "search.steps.more=1"])
def test_set_refuses_what_it_cannot_mean(wrong: str) -> None:
    with pytest.raises(Failure, match="--set") as refused:
        build_raw(TASK, "laptop", ["search.steps=4", wrong], None)
    assert refused.value.code == USAGE


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", TASK, *ARGUMENTS, "--set", "search.stepz=3"], "search.stepz: unknown field; allowed here: capacity"),
        (["run", TASK, *ARGUMENTS, "--profile", "huge"], "'huge' is not one of coder, laptop, paper, repeatable"),
        (["run", "no_such_task", *ARGUMENTS], "no task 'no_such_task'; there are: ac1, ac2, circle_packing_26"),
        (["run", TASK, *ARGUMENTS, "--set", "model=nowhere"], "model 'nowhere' is neither a Hugging Face folder"),
        (
            ["run", TASK, *ARGUMENTS, "--set", "sampling.temperature=0.5", "--set", 'train="on"'],
            "train=on needs sampling.temperature=1",
        ),
        (["worker", "cook"], "no role 'cook'; roles are control, sample, judge, train, engine"),
        (["judge", "no_such_task", "x.py"], "no task 'no_such_task'"),
        (["judge", TASK, "nowhere.py"], "nowhere.py"),
    ],
)
def test_usage_errors_exit_2_with_a_sentence(tttd: CliRunner, arguments: list[str], says: str) -> None:
    result = tttd.invoke(app, arguments)
    assert result.exit_code == USAGE
    assert says in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [["extend", "r"], ["extend", "r", "--steps", "0"], ["best"], ["nonsense"]])
def test_wrong_words_exit_2(tttd: CliRunner, arguments: list[str]) -> None:
    assert tttd.invoke(app, arguments).exit_code == USAGE


@pytest.mark.parametrize("verb", ["pause", "resume", "stop", "retry", "watch"])
def test_without_a_server_the_sentence_says_how_to_start_one(tttd: CliRunner, verb: str) -> None:
    result = tttd.invoke(app, [verb, "r"])
    assert result.exit_code == FAILED
    assert result.stderr.strip() == "tttd: no Temporal server at 127.0.0.1:1: start one with `tttd up`, or set TEMPORAL_ADDRESS"


def test_bad_settings_exit_2(tttd: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTTD_TEMPORAL_PORT", "many")
    result = tttd.invoke(app, ["status"])
    assert result.exit_code == USAGE
    assert "temporal_port" in result.stderr


def test_dry_run_prints_the_resolved_request_and_starts_nothing(tttd: CliRunner, tmp_path: Path) -> None:
    result = tttd.invoke(app, ["run", TASK, *ARGUMENTS, "--dry-run"])
    assert result.exit_code == 0, result.stderr
    shown = json.loads(result.stdout)
    asked = ask({"task": TASK, **SETTINGS}, Settings(home=tmp_path / "home", model_dirs=(tmp_path / "home" / "models",)))
    assert shown["identity"] == asked.spec.identity
    assert shown["run_id"] == f"{TASK}-{asked.spec.identity[:8]}"
    assert shown["request"]["search"]["steps"] == 8
    assert shown["input"]["search"] == {"groups": 2, "rollouts": 3}
    assert not (tmp_path / "home" / "services.json").exists()


def test_up_refuses_to_shadow_a_server_of_ones_own(tttd: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", "temporal.example:7233")
    result = tttd.invoke(app, ["up"])
    assert result.exit_code == FAILED
    assert "temporal.example:7233" in result.stderr


def test_down_without_services_is_no_error(tttd: CliRunner) -> None:
    result = tttd.invoke(app, ["down"])
    assert result.exit_code == 0
    assert "no services run" in result.stdout


def test_roles_are_the_supervisors() -> None:
    assert ROLES == services.ROLES


def test_judge_exits_by_verdict(tttd: CliRunner, tmp_path: Path) -> None:
    seed = Path(__file__).parent.parent / "tasks" / TASK / "seeds" / "grid.py"
    valid = tttd.invoke(app, ["judge", TASK, str(seed), "--json"])
    assert valid.exit_code == 0, valid.stderr
    assert json.loads(valid.stdout)["score"] == pytest.approx(2.5414213562)
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def run_packing():\n    raise ValueError('no idea')\n", encoding="utf-8")
    invalid = tttd.invoke(app, ["judge", TASK, str(wrong)])
    assert invalid.exit_code == VERIFICATION_FAILED
    assert "crashed" in invalid.stdout
    assert "no idea" in invalid.stdout


def test_doctor_names_what_is_missing(tttd: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTTD_ENGINE_MODEL", "nowhere")
    result = tttd.invoke(app, ["doctor", "--json"])
    assert result.exit_code == FAILED
    report = json.loads(result.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert [name for name, check in checks.items() if check["verdict"] == "failed"] == ["model", "tokenizer"]
    assert checks["store"]["verdict"] == "ok"
    assert checks["server"]["verdict"] == "warning"
    assert "tttd up" in checks["server"]["hint"]
    assert all(check["mechanism"] and check["detail"] for check in checks.values())


def test_demo_says_what_the_model_is_and_what_the_numbers_mean(tmp_path: Path) -> None:
    world = World.make(tmp_path / "home")
    text = introduction(ask({"task": TASK, **SETTINGS}, world.settings))
    assert "toy" in text
    assert "2 parent programs" in text
    assert "all 6 of them" in text
    found = [summary(step=s, mean_reward=float(s), notes=("collapsed",) if s == 6 else ()) for s in range(1, 7)]
    lines = learning_lines(found, 6)
    assert lines[0] == "  grid mean  1.0000 in the first step, 6.0000 in the last (first three 2.0000, last three 5.0000)"
    assert lines[-1] == "  note  step 6: collapsed"


def test_help_of_every_command_loads_nothing_heavy() -> None:
    script = (
        "import sys\nfrom typer.testing import CliRunner\nfrom console.main import app\n"
        "for words in ([], *([name] for name in sys.argv[1:])):\n"
        "    result = CliRunner().invoke(app, [*words, '--help'])\n"
        "    assert result.exit_code == 0, (words, result.output)\n"
        "    assert not words or words[0] in result.stdout\n"
        "print(*sorted({m.partition('.')[0] for m in sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *COMMANDS], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    # pydantic is typer's own.
    assert loaded.isdisjoint({"temporalio", "activities", "numpy", "torch", "transformers", "httpx", "structlog", "boto3"})


def test_a_process_that_used_a_client_ends_with_its_own_code(tmp_path: Path) -> None:
    """The client's threads crash the interpreter's own exit now and then, so such a process must not take it."""
    home = World.make(tmp_path / "home")
    environment = {**home.environment, "TTTD_TEMPORAL_PORT": "1", "PATH": "/usr/bin:/bin", "NO_COLOR": "1"}
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "console.main", "pause", "r"], capture_output=True, text=True, env=environment, cwd=root, check=False
    )
    assert done.returncode == FAILED
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr


def test_ctrl_c_is_heard_even_if_a_cancellation_is_swallowed() -> None:
    """Python 3.11's `asyncio.wait_for` can swallow one; the command must end all the same."""
    script = """
import asyncio, os, signal
from console.cli.session import run_async

async def deaf():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(2):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
    await asyncio.sleep(60)

try:
    run_async(deaf())
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "interrupted\n", done.stderr

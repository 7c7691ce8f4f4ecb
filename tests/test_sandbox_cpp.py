"""C++17 programs in the sandbox: compiled as hostile text, cached, run as one process on their input."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from activities.judge.sandbox import (
    Limits,
    Outcome,
    Program,
    Sandbox,
    SandboxSettings,
    SandboxUnavailable,
    Status,
    cpp_toolchain,
    open_sandbox,
)
from activities.judge.sandbox import cpp as cpp_module
from activities.judge.sandbox.backend import LocalSandbox
from activities.judge.sandbox.cpp import COMPILE_ERROR
from activities.judge.sandbox.cpp_toolchain import BINARY, SOURCE, CompilerMissing, find_toolchain, installed

LIMITS = Limits(wall_seconds=10, memory_bytes=256 << 20, result_bytes=1 << 20)

pytestmark = pytest.mark.skipif(installed() is None, reason="needs g++")


@pytest.fixture(scope="module", params=["landlock", "bwrap"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    try:
        opened = open_sandbox(SandboxSettings(backend=request.param))
    except SandboxUnavailable as unavailable:
        pytest.skip(str(unavailable))
    with opened:
        yield opened


async def run(sandbox: Sandbox, source: str, stdin: bytes = b"", limits: Limits = LIMITS) -> Outcome:
    return await sandbox.run(Program(source, language="cpp17", stdin=stdin), limits)


ADD = '#include <iostream>\nint main() { long a, b; std::cin >> a >> b; std::cout << a + b; std::cerr << "adding\\n"; }'


async def test_input_to_output(sandbox: Sandbox) -> None:
    assert "cpp17" in sandbox.isolation.languages
    outcome = await run(sandbox, ADD, b"20 22")
    assert (outcome.status, outcome.result, outcome.exit_code) == (Status.OK, b"42", 0)
    assert outcome.stderr_tail == "adding\n"


async def test_output_is_bytes_and_input_may_be_large(sandbox: Sandbox) -> None:
    source = '#include <cstdio>\nint main() { int c, n = 0; while ((c = getchar()) != EOF) n += c; printf("%c%c%d", 0, 255, n); }'
    outcome = await run(sandbox, source, b"\x01" * (4 << 20))
    assert outcome.result == b"\x00\xff%d" % (4 << 20)


async def test_no_input_is_an_empty_one(sandbox: Sandbox) -> None:
    outcome = await run(sandbox, '#include <cstdio>\nint main() { puts(getchar() == EOF ? "end" : "something"); }')
    assert outcome.result == b"end\n"


async def test_a_program_prints_nothing(sandbox: Sandbox) -> None:
    outcome = await run(sandbox, "int main() {}")
    assert (outcome.status, outcome.result) == (Status.OK, b"")


async def test_it_is_cpp17_with_threads_and_optimised(sandbox: Sandbox) -> None:
    source = """
#include <bits/stdc++.h>
#ifndef __OPTIMIZE__
#error not optimised
#endif
static_assert(__cplusplus == 201703L);
int main() {
    std::atomic<int> n{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; i++) threads.emplace_back([&] { n++; });
    for (auto& t : threads) t.join();
    auto [a, b] = std::pair{n.load(), std::async(std::launch::async, [] { return 7; }).get()};
    std::cout << a << b;
}"""
    assert (await run(sandbox, source)).result == b"87"


ENDINGS: dict[str, tuple[str, Status, str]] = {
    "exit code": ("int main() { return 3; }", Status.CRASHED, "exit 3"),
    "exception": ("int main() { throw 1; }", Status.CRASHED, "signal 6"),
    "null": ("int main() { return *(volatile int*)0; }", Status.CRASHED, "signal 11"),
    "out of memory": (
        "#include <vector>\nint main() { std::vector<std::vector<char>> v; for (;;) v.emplace_back(1 << 24, 'x'); }",
        Status.MEMORY,
        "std::bad_alloc",
    ),
    "too much output": ('#include <cstdio>\nint main() { for (;;) puts("xxxxxxx"); }', Status.OUTPUT_TOO_LARGE, "result"),
    "too many errors": (
        '#include <cstdio>\nint main() { for (;;) fputs("xxxxxxx", stderr); }',
        Status.OUTPUT_TOO_LARGE,
        "log",
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
async def test_endings(name: str, sandbox: Sandbox) -> None:
    source, status, reason = ENDINGS[name]
    outcome = await run(sandbox, source, limits=replace(LIMITS, log_bytes=1 << 20))
    assert (outcome.status, outcome.reason, outcome.result) == (status, reason, None)


async def test_time_is_bounded(sandbox: Sandbox) -> None:
    sleeping = await run(
        sandbox, "#include <unistd.h>\nint main() { sleep(60); }", limits=replace(LIMITS, wall_seconds=0.3, grace_seconds=0.1)
    )
    assert (sleeping.status, sleeping.reason) == (Status.TIMEOUT, "wall")
    spinning = await run(
        sandbox, "int main() { for (volatile int x = 0;; x++); }", limits=replace(LIMITS, wall_seconds=60, cpu_seconds=1)
    )
    assert (spinning.status, spinning.reason) == (Status.TIMEOUT, "cpu")


async def test_compile_error_is_a_crash_with_the_compilers_words(sandbox: Sandbox) -> None:
    outcome = await run(sandbox, "int main() { return undeclared_name; }")
    assert (outcome.status, outcome.reason, outcome.result) == (Status.CRASHED, COMPILE_ERROR, None)
    assert "program.cpp:1:21: error: 'undeclared_name' was not declared in this scope" in outcome.stderr_tail


async def test_link_error_too(sandbox: Sandbox) -> None:
    outcome = await run(sandbox, "int nowhere(); int main() { return nowhere(); }")
    assert (outcome.status, outcome.reason) == (Status.CRASHED, COMPILE_ERROR)
    assert "undefined reference to `nowhere()'" in outcome.stderr_tail


async def test_source_need_not_be_text(sandbox: Sandbox) -> None:
    outcome = await run(sandbox, "\x00\x1b[31m\ud800 ünïcode")
    assert (outcome.status, outcome.reason) == (Status.CRASHED, COMPILE_ERROR)
    assert all(c.isprintable() or c in "\n\t" for c in outcome.stderr_tail)


async def test_a_program_cannot_pretend_that_it_was_not_compiled(sandbox: Sandbox) -> None:
    outcome = await run(
        sandbox, '#include <cstdio>\nint main() { fputs("program.cpp:1: error: compile error", stderr); return 1; }'
    )
    assert (outcome.status, outcome.reason) == (Status.CRASHED, "exit 1")


async def test_compilation_is_bounded_in_time(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_module, "COMPILE_SECONDS", 1.0)
    slow = "constexpr long f(long n) { long s = 0; for (long i = 0; i < n; i++) s += i; return s; }\n"
    slow += "".join(f"static_assert(f(200000 + {i}) != 1);\n" for i in range(500))
    began = time.monotonic()
    outcome = await run(sandbox, slow + "int main() {}")
    assert (outcome.status, outcome.reason) == (Status.CRASHED, COMPILE_ERROR)
    assert "needed more than 1 s" in outcome.stderr_tail
    assert time.monotonic() - began < 30


async def test_cancelling_leaves_no_process(sandbox: Sandbox) -> None:
    before = children_of(os.getpid())
    running = asyncio.create_task(
        run(sandbox, "#include <unistd.h>\nint main() { sleep(50); }", limits=replace(LIMITS, wall_seconds=60))
    )
    await asyncio.sleep(1.5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    after = children_of(os.getpid())
    assert {after[child] for child in after.keys() - before.keys()} == set()


def children_of(pid: int) -> dict[int, str]:
    """Living children by process id, with their commands."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text()
            except OSError:
                continue
            name, rest = status[status.index("(") + 1 : status.rindex(")")], status[status.rindex(")") + 2 :].split()
            if int(rest[1]) == pid and rest[0] != "Z":
                found[int(entry.name)] = name
    return found


def counting(sandbox: Sandbox) -> list[Path]:
    """Every directory that is compiled in from now on."""
    assert isinstance(sandbox, LocalSandbox)
    programs, directories = sandbox._cpp, []
    compile_ = programs._compile

    def counted(toolchain: cpp_toolchain.Toolchain, source: str, directory: Path, cancel: int) -> None:
        directories.append(directory)
        compile_(toolchain, source, directory, cancel)

    programs._compile = counted  # type: ignore[method-assign]
    return directories


async def test_a_program_is_compiled_once(sandbox: Sandbox) -> None:
    directories = counting(sandbox)
    source = ADD + "// compiled once"
    for k in range(3):
        assert (await run(sandbox, source, b"%d 1" % k)).result == b"%d" % (k + 1)
    assert len(directories) == 1
    assert not directories[0].exists()
    await run(sandbox, source + " or twice", b"1 1")
    assert len(directories) == 2


async def test_a_program_that_two_wait_for_is_compiled_once(sandbox: Sandbox) -> None:
    directories = counting(sandbox)
    outcomes = await asyncio.gather(*(run(sandbox, ADD + "// for two", b"1 1") for _ in range(2)))
    assert [outcome.result for outcome in outcomes] == [b"2", b"2"]
    assert len(directories) == 1


async def test_without_static_libraries_a_program_still_runs_and_still_starts_nothing(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp_toolchain, "_library", lambda driver, name: False)
    dynamic = cpp_toolchain.find_toolchain.__wrapped__()
    assert not dynamic.static
    monkeypatch.setattr(cpp_module, "find_toolchain", lambda: dynamic)
    assert (await run(sandbox, ADD, b"20 22")).result == b"42"
    shell = """
#include <unistd.h>
#include <cstdio>
int main() { execl("/usr/bin/env", "env", nullptr); puts(fork() < 0 ? "held" : "forked"); }"""
    assert (await run(sandbox, shell)).result == b"held\n"


async def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpp_toolchain, "_PLACES", (tmp_path / "g++",))
    find_toolchain.cache_clear()
    try:
        with open_sandbox() as bare:
            assert bare.isolation.languages == ("python",)
            outcome = await run(bare, ADD)
    finally:
        find_toolchain.cache_clear()
    assert outcome.status is Status.SANDBOX_ERROR
    assert "apt-get install g++" in outcome.reason


def test_a_compiler_that_is_something_else_is_not_understood(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    odd = tmp_path / "g++"
    odd.write_text("#!/bin/sh\necho odd\n")
    odd.chmod(0o755)
    monkeypatch.setattr(cpp_toolchain, "_PLACES", (odd,))
    with pytest.raises(CompilerMissing, match="is not understood"):
        find_toolchain.__wrapped__()


async def test_a_directory_that_no_program_can_run_in_is_not_the_programs_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where the temporary directory is mounted noexec: without the check every program would have crashed."""
    with open_sandbox() as opened:
        assert isinstance(opened, LocalSandbox)
        real = opened._cpp._run_binary

        def broken(toolchain: cpp_toolchain.Toolchain, binary: Path, program: Program, limits: Limits, cancel: int) -> Outcome:
            binary.chmod(0o444)
            return real(toolchain, binary, program, limits, cancel)

        monkeypatch.setattr(opened._cpp, "_run_binary", broken)
        outcome = await run(opened, ADD, b"1 1")
        assert outcome.status is Status.SANDBOX_ERROR
        assert "a C++ program that must work ended as crashed" in outcome.reason
        assert "TMPDIR" in outcome.reason
        monkeypatch.undo()


def test_the_tools_are_those_that_the_driver_names(tmp_path: Path) -> None:
    (tmp_path / SOURCE).write_text('#include <cstdio>\nint main() { puts("by hand"); }')
    for step in find_toolchain().steps:
        subprocess.run([step.tool, *step.arguments], cwd=tmp_path, check=True, env={"PATH": "/usr/bin:/bin"})
    assert subprocess.run([tmp_path / BINARY], capture_output=True).stdout == b"by hand\n"
    assert all(step.tool.is_relative_to("/usr") for step in find_toolchain().steps)
    assert shutil.which("g++") is not None


def test_digest_depends_on_source_flags_and_version() -> None:
    toolchain = find_toolchain()
    others = [
        replace(toolchain, version="g++ 99"),
        replace(toolchain, steps=toolchain.steps[:-1]),
    ]
    digests = {t.digest("int main() {}") for t in (toolchain, *others)} | {toolchain.digest("int main() { }")}
    assert len(digests) == 4

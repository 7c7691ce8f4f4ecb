"""`python -m tests.golden FILE...`: one line a case. Exit status 1 if a case fails, 2 if a file cannot be replayed."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.golden.outcome import UnknownFormat, summary_line
from tests.golden.replay import replay_file


def main(arguments: list[str]) -> int:
    if not arguments or any(argument.startswith("-") for argument in arguments):
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    failed = total = unknown = 0
    for argument in arguments:
        try:
            cases = replay_file(Path(argument))
        except UnknownFormat as error:
            print(f"FAIL  {error}")
            unknown += 1
            continue
        print(f"{argument}: {len(cases)} cases")
        for case in cases:
            print("  " + "\n  ".join(summary_line(case)))
        total += len(cases)
        failed += sum(not case.passed for case in cases)
    print(f"{total - failed} of {total} cases pass" + (f", {unknown} files not replayed" if unknown else ""))
    return 1 if failed else 2 if unknown else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

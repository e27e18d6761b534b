"""`init` under every launcher: real ones as subprocesses, Slurm by its variables.

The ranks of a launched test run this file: `python -m test_launch <check>` (see `CHECKS`).
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import FOLDERS

from distfx.runtime.comm import detect, launch
from distfx.runtime.comm.launch import expand_nodelist, init

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 90
FOREIGN = (
    *("OMPI_", "PMI", "HYD", "MPI_", "PALS_", "FLUX_", "SLURM_", "TORCHELASTIC_", "MASTER_", "DISTFX_"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "ENVIRONMENT"),
)

MODULES = os.pathsep.join(str(ROOT / folder) for folder in FOLDERS)
BIN = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
MPIEXEC = shutil.which("mpiexec", path=BIN)
needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None, reason="needs mpiexec and mpi4py"
)


# Starting programs.


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without the variables of launchers, so that these tests also run under one."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": MODULES, "PATH": BIN, "PYTHONWARNINGS": "ignore::FutureWarning"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}  # Open MPI 5: more ranks than cores
    return env | dict(extra or {})


def start(command: Sequence[str], env: Mapping[str, str] | None = None) -> "Program":
    return Program(command, environment(env))


class Program:
    """A program in a separate process group, all of which `end` kills."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.out, self.err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, env=env, cwd=ROOT / "tests", stdout=self.out, stderr=self.err, start_new_session=True
        )

    def end(self, seconds: float = SECONDS) -> tuple[int, str, str]:
        """Exit code, output, errors."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = -signal.SIGALRM
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        texts = []
        for file in (self.out, self.err):
            file.seek(0)
            texts.append(file.read())
            file.close()
        return code, texts[0], texts[1]


def python(module: str, *args: str) -> list[str]:
    return [sys.executable, "-m", module, *args]


def torchrun(world: int, module: str, *args: str) -> list[str]:
    return python("torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m", module, *args)


def mpiexec(world: int, module: str, *args: str) -> list[str]:
    assert MPIEXEC is not None
    return [MPIEXEC, "-n", str(world), *python(module, *args)]


def reports(output: str) -> list[dict[str, Any]]:
    """The reports that the ranks printed, in rank order."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda report: report.get("rank", 0))


# Programs that the ranks run.


def report(this: launch.Launch, **more: object) -> None:
    total = torch.tensor([this.rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == this.world * (this.world + 1) / 2
    # One write per line, because several ranks share the file.
    sys.stdout.write(json.dumps({**asdict(this), "device": str(this.device), **more}) + "\n")
    sys.stdout.flush()


def check_join() -> None:
    report(init(timeout=60), mpi4py="mpi4py" in sys.modules, backend_of_torch=str(dist.get_backend()))


def check_gloo() -> None:
    report(init(backend="gloo", timeout=60))


def check_join_without_mpi4py() -> None:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    report(init(timeout=60))


def check_backend_mpi() -> None:
    with pytest.raises(ValueError, match="mpiexec"):
        init(backend="mpi")
    check_join()


def check_alone() -> None:
    """Checks in a single process."""
    assert "mpi4py" not in sys.modules
    with pytest.raises(ValueError, match=r"unknown launcher 'pdsh'; choose one of torchrun, mpi, slurm, single"):
        init(launcher="pdsh")
    with pytest.raises(ValueError, match="unknown backend 'smoke'; choose one of gloo"):
        init(backend="smoke")
    with pytest.raises(ValueError, match="alone"):
        init(backend="cpu:mpi,cuda:nccl")
    with pytest.raises(ValueError, match="positive"):
        init(timeout=0)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="needs GPUs"):
            init(backend="nccl")
    with pytest.raises(ValueError, match="RANK is not set"):
        init(launcher="torchrun")
    assert not dist.is_initialized()

    first = init()
    assert first is init() is init(backend=first.backend, launcher="single", timeout=launch.DEFAULT_TIMEOUT)
    with pytest.raises(ValueError, match="initialised already, with backend"):
        init(backend="fake")
    with pytest.raises(ValueError, match="initialised already, with launcher single"):
        init(launcher="mpi")
    with pytest.raises(ValueError, match="initialised already, with timeout"):
        init(timeout=7)

    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    adopted = init()
    assert adopted == init(backend="gloo") and adopted.launcher == "existing" and adopted.world == 1
    with pytest.raises(ValueError, match="by the program itself"):
        init(timeout=7)
    dist.destroy_process_group()

    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match="needs mpi4py"):
        init(backend="mpi")
    report(init(timeout=7, backend="gloo"))


def check_error() -> None:
    this = init(timeout=60)
    if this.rank == this.world - 1:
        raise RuntimeError("this rank has had enough")
    dist.all_reduce(torch.ones(1))
    dist.barrier()


CHECKS: dict[str, Callable[[], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


# Tests.


def test_alone() -> None:
    code, out, err = start(python("test_launch", "alone")).end()
    assert code == 0, err
    (alone,) = reports(out)
    assert (alone["launcher"], alone["rank"], alone["world"], alone["backend"]) == ("single", 0, 1, "gloo")
    assert "distfx:" not in err


def test_torchrun() -> None:
    code, out, err = start(torchrun(2, "test_launch", "backend_mpi")).end()
    assert code == 0, err
    launches = reports(out)
    assert [m["rank"] for m in launches] == [m["local_rank"] for m in launches] == [0, 1]
    assert {(m["launcher"], m["world"]) for m in launches} == {("torchrun", 2)}
    if not torch.cuda.is_available():
        assert "distfx: 2 ranks by torchrun, backend gloo, device cpu" in err.splitlines()


@needs_mpi
@pytest.mark.parametrize("check, backend", [("join", "mpi"), ("gloo", "gloo"), ("join_without_mpi4py", "gloo")])
def test_mpiexec(check: str, backend: str) -> None:
    env = {"DISTFX_QUIET": "1"} if check == "gloo" else {}
    code, out, err = start(mpiexec(2, "test_launch", check), env).end()
    assert code == 0, err
    launches = reports(out)
    assert [m["rank"] for m in launches] == [m["local_rank"] for m in launches] == [0, 1]
    assert {(m["launcher"], m["world"]) for m in launches} == {("mpi", 2)}
    if not torch.cuda.is_available():
        assert {m["backend"] for m in launches} == {backend}
        assert ("distfx: 2 ranks by mpi" in err) == (check != "gloo")


@needs_mpi
def test_one_rank_of_mpiexec() -> None:
    code, out, err = start(mpiexec(1, "test_launch", "join")).end()
    assert code == 0, err
    assert [(m["launcher"], m["world"]) for m in reports(out)] == [("mpi", 1)]


@needs_mpi
@pytest.mark.parametrize("world", [3])
def test_an_error_on_one_rank_ends_all(world: int) -> None:
    code, _, err = start(mpiexec(world, "test_launch", "error")).end(45)  # less than the timeout of the others
    assert code not in (0, -signal.SIGALRM), err
    assert "RuntimeError: this rank has had enough" in err


@pytest.mark.parametrize("nodes", ["localhost", "127.0.0.1"])
def test_slurm(nodes: str) -> None:
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": nodes}
    tasks = [
        start(python("test_launch", "join"), {**job, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}) for i in range(2)
    ]
    ends = [task.end() for task in tasks]
    assert [code for code, _, _ in ends] == [0, 0], ends
    launches = reports("".join(out for _, out, _ in ends))
    assert [(m["launcher"], m["rank"], m["local_rank"], m["world"]) for m in launches] == [
        ("slurm", 0, 0, 2),
        ("slurm", 1, 1, 2),
    ]
    assert not any(m["mpi4py"] for m in launches)


@pytest.mark.parametrize(
    "nodes, hosts",
    [
        ("node[001-003,007],gpu5", "node001 node002 node003 node007 gpu5"),
        ("node[9-11]", "node9 node10 node11"),
        ("node[098-101]", "node098 node099 node100 node101"),
        ("r[1-2]n[08,10]-ib,login", "r1n08-ib r1n10-ib r2n08-ib r2n10-ib login"),
        ("a-b.c-d.org", "a-b.c-d.org"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_node_lists(nodes: str, hosts: str) -> None:
    assert expand_nodelist(nodes) == hosts.split()


@pytest.mark.parametrize("nodes", ["", "node[1-]", "node[a-b]"])
def test_bad_node_lists(nodes: str) -> None:
    with pytest.raises(ValueError, match="set MASTER_ADDR"):
        expand_nodelist(nodes)


SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    "env, expected",
    [
        ({}, ("single", 0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, ("torchrun", 3, 4, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1", "PMI_RANK": "5", "PMI_SIZE": "9"}, ("torchrun", 0, 1, 0)),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"},
            ("mpi", 3, 4, 2),
        ),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}, ("mpi", 3, 4, 1)),
        ({"PALS_RANKID": "1", "PALS_SIZE": "2", "PALS_LOCAL_RANKID": "1"}, ("mpi", 1, 2, 1)),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0"}, ("mpi", 1, 2, 0)),
        (SLURM, ("slurm", 3, 8, 1)),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "2", "ENVIRONMENT": "BATCH"}, ("slurm", 3, 4, 1)),
        ({**SLURM, "ENVIRONMENT": "BATCH"}, ("single", 0, 1, 0)),  # in the batch script itself, without srun
        ({**SLURM, "PMIX_RANK": "3"}, ("slurm", 3, 8, 1)),  # srun's PMIx, which no MPI here understands
        ({**SLURM, "DISTFX_LAUNCHER": "single"}, ("single", 0, 1, 0)),
        ({"RANK": "1", "PMI_RANK": "3", "PMI_SIZE": "4"}, ("mpi", 3, 4, 0)),
    ],
)
def test_detect(env: dict[str, str], expected: tuple[str, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "import_mpi4py", lambda: None)
    placement = detect.detect(env, None)
    assert (placement.launcher, placement.rank, placement.world, placement.local_rank) == expected


@pytest.mark.parametrize(
    "env, message",
    [
        ({"RANK": "1"}, "RANK=1 is set, WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, RANK is not"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is not a number"),
        ({"SLURM_PROCID": "1"}, "SLURM_NTASKS is not set"),
        ({"DISTFX_LAUNCHER": "mpirun"}, "DISTFX_LAUNCHER=mpirun: unknown launcher"),
        ({"PMIX_RANK": "1"}, "install mpi4py"),
    ],
)
def test_detect_errors(env: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "import_mpi4py", lambda: None)
    with pytest.raises(ValueError, match=message):
        detect.detect(env, None)


def test_slurm_address() -> None:
    env = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node[07-09]"}
    assert launch._slurm_address(env) == ("node07", 23456)
    host, port = launch._slurm_address({**env, "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "node09"})
    assert host == "node09" and port != 23456


if __name__ == "__main__":
    try:
        CHECKS[sys.argv[1]]()
    except BaseException:
        if sys.argv[1] != "error":  # this check is about the exception hook
            traceback.print_exc()
            os._exit(1)
        raise

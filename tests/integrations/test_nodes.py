"""Several nodes: two torchrun agents on loopback, started by the batch file, train like one node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.run import get_args_parser

from tests.ranks import ENVIRONMENT

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "train_llama.py")
SIZES = ["--layers", "1", "--dim", "16", "--batch", "1", "--seq", "8", "--steps", "3", "--sample", "0"]
FLAGS = [*SIZES, "--backend", "eager"]

# Slurm's commands in a job of two nodes, both of which are this machine.
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames here[1-2]" ] && printf 'localhost\\nlocalhost\\n'
"""
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 2
shift
"$@" & first=$!
"$@" & second=$!
wait $first; status=$?
wait $second && exit $status
"""
TORCHRUN = f"""#!/bin/bash
exec {sys.executable} -m torch.distributed.run "$@"
"""


def _run(command: list[str], **environment: str) -> None:
    result = subprocess.run(
        command,
        env={**ENVIRONMENT, **os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def _losses(file: Path) -> dict[str, Any]:
    result = json.loads(file.read_text())
    return {key: result[key] for key in ("world_size", "losses", "grad_norms", "first_step")}


@pytest.mark.slow
def test_two_nodes_of_slurm(tmp_path: Path) -> None:
    """The batch file's two agents find each other; the losses equal two ranks on one node."""
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "torchrun": TORCHRUN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "here[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "RANKS_PER_NODE": "1",
        "PORT": str(get_free_port()),
        "USER": "someone",
        "TMPDIR": str(tmp_path),
    }
    batch = ["bash", str(ROOT / "examples" / "slurm.sbatch")]
    checkpoint = ["--checkpoint", str(tmp_path / "run"), "--resume"]
    _run([*batch, SCRIPT, *FLAGS, *checkpoint, "--json", str(tmp_path / "nodes.json")], **job)
    alone = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    _run([*alone, SCRIPT, *FLAGS, "--json", str(tmp_path / "alone.json")])
    nodes = _losses(tmp_path / "nodes.json")
    assert nodes == _losses(tmp_path / "alone.json")
    assert (nodes["world_size"], nodes["first_step"], len(set(nodes["losses"]))) == (2, 0, 3)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-3"]


def test_the_manifest_starts_an_example() -> None:
    """The Kubernetes manifest is valid YAML, and runs torchrun with flags that the example has."""
    job = yaml.safe_load((ROOT / "examples" / "kubernetes.yaml").read_text())
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker["replicas"] == job["spec"]["elasticPolicy"]["minReplicas"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    program, *arguments = container["command"]
    assert program == "torchrun"
    found = get_args_parser().parse_args(arguments)
    text = (ROOT / found.training_script).read_text()
    for flag in found.training_script_args:
        assert f'add("{flag.partition("=")[0]}"' in text

"""What the layout of the repository promises."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_passes_is_refused_as_a_package_of_its_own():
    """The directory lies at the top, where `import passes` would find a second copy of every pass."""
    result = python("import passes")
    assert result.returncode != 0
    assert "ImportError: import graphshard.passes" in result.stderr


def test_passes_is_a_relative_symlink():
    link = ROOT / "graphshard" / "passes"
    assert link.is_symlink()
    assert os.readlink(link) == os.path.join("..", "passes")


def test_import_has_no_side_effects():
    """Importing graphshard starts no process group, no compiler and no logging."""
    result = python(
        "import sys, logging, torch.distributed as dist, graphshard\n"
        "print(dist.is_initialized(), 'torch._inductor.async_compile' in sys.modules, logging.root.handlers)"
    )
    assert result.stdout.split("\n")[0] == "False False []", result.stdout + result.stderr

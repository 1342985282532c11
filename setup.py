"""Packages of a checkout with and without symbolic links; everything else is in pyproject.toml.

`graphshard/passes` is a link to `passes/`. With {"": "."}, an editable install is a .pth file with this directory,
which type checkers and editors such as Pylance follow. A checkout without links, as on Windows, has a text file there:
setuptools then finds the passes by `package_dir`, and its editable install is an import hook, unknown to editors.
"""

from pathlib import Path

from setuptools import find_packages, setup

packages = find_packages(include=["graphshard", "graphshard.*"])
directories = {"": "."}
if not Path("graphshard/passes").is_dir():
    packages += ["graphshard.passes", *(f"graphshard.passes.{name}" for name in find_packages("passes"))]
    directories["graphshard.passes"] = "passes"
setup(packages=packages, package_dir=directories)

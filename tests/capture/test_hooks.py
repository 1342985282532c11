"""Hooks for all modules there are: the user's are an error, torch's own run around the compiled module."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules import module as of_all
from torch.utils.module_tracker import ModuleTracker

import graphshard

X = torch.ones(2, 4)


def _doubles(module: nn.Module, *rest: Any) -> Any:
    return rest[-1] * 2 if isinstance(rest[-1], torch.Tensor) else None


REGISTER = {
    "forward": of_all.register_module_forward_hook,
    "forward pre": of_all.register_module_forward_pre_hook,
    "full backward": of_all.register_module_full_backward_hook,
    "full backward pre": of_all.register_module_full_backward_pre_hook,
}


@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_for_all_modules_is_an_error_before_and_after_capture(mesh: DeviceMesh, kind: str) -> None:
    text = re.escape(f"hook for all modules, _doubles ({__file__}:{_doubles.__code__.co_firstlineno})")
    model = graphshard.compile(nn.Sequential(nn.Linear(4, 4)), mesh, backend="eager")
    for _ in range(2):
        handle = REGISTER[kind](_doubles)
        with pytest.raises(graphshard.CaptureError, match=rf"{text}.*Register it on the modules that it is for"):
            model(X)
        handle.remove()
        assert model(X).shape == (2, 4)
    assert len(graphshard.programs(model)) == 1


def test_torchs_own_hooks_are_not_captured(mesh: DeviceMesh) -> None:
    model = graphshard.compile(nn.Sequential(nn.Linear(4, 4)), mesh, backend="eager")
    with ModuleTracker():
        model(X).sum().backward()
    model(X).sum().backward()
    assert len(graphshard.programs(model)) == 1

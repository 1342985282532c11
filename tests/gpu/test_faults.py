"""One rank fails, differs or dies while others wait for NCCL: the checks of `tests/distributed/test_faults.py`."""

from __future__ import annotations

import pytest

from tests.distributed.test_faults import LAUNCHED, check_launched, check_standing_still

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", LAUNCHED)
def test_nccl_is_aborted(case: str) -> None:
    check_launched(case, "nccl")


def test_a_rank_that_stands_still_is_named_on_nccl() -> None:
    check_standing_still("nccl")

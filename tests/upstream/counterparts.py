"""PyTorch's tests of FSDP2, in test/distributed/_composable, and their counterparts here.

The tests are from PyTorch's main branch after 2.13. A counterpart compares graphshard with the real `fully_shard`
bit for bit, on gloo ranks, or expects an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.upstream.of_axes import OF_AXES
from tests.upstream.of_models import OF_MODELS
from tests.upstream.of_steps import OF_STEPS
from tests.upstream.of_values import OF_VALUES, Counterparts

UPSTREAM: Mapping[str, Counterparts] = {**OF_VALUES, **OF_STEPS, **OF_MODELS, **OF_AXES}

# FSDP2 accepts these and graphshard rejects them; the counterparts expect the error.
REFUSED = frozenset(
    {
        "TestFullyShardManagedModulesAndStates.test_managed_modules_nested_fully_shard_and_replicate",
        "TestFullyShardMixedPrecisionJVP.test_no_warmup_jvp_reshard_after_forward_false",
        "TestFullyShardAllocFromPG.test_exception_when_used_together_with_comm_hooks",
        "TestFullyShardShareCommContext.test_share_comm_context",
    }
)


def tables() -> str:
    """Return the table and lists of docs/evidence/upstream.md: tests with a counterpart, and tests without."""
    found = ["| PyTorch's file | tests | with a counterpart | of these about an error |", "|--|--|--|--|"]
    places = []
    missing: dict[str, list[str]] = {}
    for file, tests in UPSTREAM.items():
        asked = {name: where for name, where in tests.items() if not isinstance(where, str)}
        files = {f"`{test.partition('::')[0]}`" for where in asked.values() for test in where}
        found.append(f"| `{file}` | {len(tests)} | {len(asked)} | {len(REFUSED & asked.keys())} |")
        places.append(f"* `{file}`: {', '.join(sorted(files))}")
        for name, why in tests.items():
            if isinstance(why, str):
                missing.setdefault(why, []).append(f"`{name}`")
    total, without = sum(map(len, UPSTREAM.values())), sum(map(len, missing.values()))
    found.append(f"| together | {total} | {total - without} | {len(REFUSED)} |")
    reasons = [f"* {why}: {', '.join(names)}" for why, names in missing.items()]
    return "\n".join([*found, "", "Counterparts are in", "", *places, "", "Without a counterpart:", "", *reasons])

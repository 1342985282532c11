"""Kernel of `_rank_order_sum.py`. Only that imports it, where Triton is installed."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def add_chunks(received, total, size, num_ranks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the chunks of `size` elements, the first rank's first, in the dtype of `total`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    added = tl.load(received + at, mask=inside).to(total.dtype.element_ty)
    for _ in range(1, num_ranks):
        received += size
        added += tl.load(received + at, mask=inside).to(total.dtype.element_ty)
    tl.store(total + at, added, mask=inside)

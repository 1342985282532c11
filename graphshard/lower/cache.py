"""Inductor's cache, whatever the disk is like."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator

from graphshard.torch_compat.inductor_settings import inductor_cache

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@contextlib.contextmanager
def writable_cache() -> Iterator[str]:
    """The directory of Inductor's cache; if nothing can be written there, a temporary one, with a warning.

    What was compiled is loaded by then, so the temporary directory is removed at the end.
    """
    given = os.environ.get(VARIABLE)
    try:
        directory = inductor_cache()
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"graphshard")
    except OSError as error:
        warnings.warn(
            f"Inductor's cache cannot be written ({error}): what is compiled now is not kept for another run, nor "
            f"shared with other ranks. Set {VARIABLE} to a directory that can be written.",
            stacklevel=2,
        )
    else:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="graphshard-", ignore_cleanup_errors=True) as directory:
        os.environ[VARIABLE] = directory
        try:
            yield directory
        finally:
            if given is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = given

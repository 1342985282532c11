"""Classes in the metadata of torch.distributed.checkpoint (DCP), for a reader without pickle."""

from __future__ import annotations

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormatEncoding

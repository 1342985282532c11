"""The `.gshard` file: a zip of JSON, text and compiled regions, with a checksum for every byte of it.

manifest.json       {"format": 1, "members": {"summary.txt": {"bytes": 812, "sha256": "..."}, ...}, ...}
summary.txt         for people
...                 the other members, see `artifact/members.py`
(zip comment)       "sha256:" and the digest of all bytes before it: headers and padding, too;
                    for a signed file also ";ed25519:" and the signature of that digest

A file is read into memory once and checked completely before anything in it is interpreted, so nothing can change
between the check and the use. Nothing is ever extracted under a name that the file chooses. The checksums find
accidents and careless changes, not forgery: whoever can write the file can write its checksums. A signature
(`artifact/signing.py`) finds forgery, and is checked before the zip is read.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from graphshard.artifact.signing import Signer, check_signature
from graphshard.errors import ArgumentError, ArtifactError
from graphshard.utils.files import read_file, replacing

FORMAT = 11
MANIFEST = "manifest.json"

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")
_COMMENT = re.compile(rb"sha256:([0-9a-f]{64})(?:;ed25519:([0-9a-f]{128}))?\Z")
_COMMENT_BYTES, _SIGNED_BYTES = len("sha256:") + 64, len(";ed25519:") + 128
# A member that unpacks to more than this many times its size is stored as it is, so more than that is an attack.
_MAX_RATIO = 200
_MAX_MANIFEST_BYTES = 64 << 20
_MAX_FILE_BYTES = 16 << 30
_AGAIN = "Copy or export it again"


@dataclass(frozen=True)
class Archive:
    """A file that was read and checked.

    Attributes:
        path: where it was.
        facts: the manifest.
        members: contents by name, the manifest excluded.
    """

    path: Path
    facts: Mapping[str, Any]
    members: Mapping[str, bytes]

    def json(self, name: str) -> Any:
        """The content of a JSON member.

        Raises:
            ArtifactError: there is no such member, or it is not JSON.
        """
        try:
            return json.loads(self.members[name])
        except KeyError:
            raise ArtifactError(f"{self.path} has no {name}: it was not written by graphshard.export.") from None
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"{self.path}: {name} is not JSON: {error}") from None

    def text(self, name: str) -> str:
        """The content of a text member."""
        return self.members[name].decode("utf-8", errors="replace") if name in self.members else ""


def write_archive(
    path: Path, facts: Mapping[str, Any], members: Mapping[str, bytes], sign: Signer | None = None
) -> None:
    """Write a file that is either whole or not there.

    Args:
        facts: the manifest without "format" and "members".
        members: contents by name.
        sign: signs the file; None leaves it unsigned.
    """
    checksums = {name: {"bytes": len(data), "sha256": _sha256(data)} for name, data in sorted(members.items())}
    manifest = {"format": FORMAT, **facts, "members": checksums}
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        first = {MANIFEST: (json.dumps(manifest, indent=1, allow_nan=False) + "\n").encode()}
        for name, data in {**first, **members}.items():
            assert _NAME.fullmatch(name), name
            info = zipfile.ZipInfo(name)  # dated 1980: equal contents give equal files
            info.external_attr = 0o644 << 16
            archive.writestr(info, data, _compression(data))
        length = _COMMENT_BYTES + (_SIGNED_BYTES if sign is not None else 0)
        archive.comment = b"0" * length
    body = buffer.getvalue()[:-length]
    digest = _sha256(body).encode()
    signed = b";ed25519:" + sign(digest).hex().encode() if sign is not None else b""
    with replacing(path) as temporary:
        temporary.write_bytes(body + b"sha256:" + digest + signed)


def read_archive(path: Path, trust: Sequence[Any] = ()) -> Archive:
    """Read a file and check every byte of it; nothing is executed or unpickled.

    Args:
        trust: public keys, of which one must have signed the file; without any it need not be signed.

    Raises:
        ArtifactError: it is no such file, was truncated or changed, has another format, or could do harm.
    """
    try:
        content = read_file(path, _MAX_FILE_BYTES)
    except ArgumentError as error:
        raise ArtifactError(str(error)) from None
    comment = _COMMENT.search(content, max(len(content) - _COMMENT_BYTES - _SIGNED_BYTES, 0))
    whole = comment is not None and comment[1].decode() == _sha256(memoryview(content)[: comment.start()])
    if trust:
        signature = bytes.fromhex(comment[2].decode()) if comment is not None and comment[2] else None
        check_signature(path, comment[1] if comment is not None and whole else b"", signature, list(trust))
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            found = _read(path, archive)
    except ArtifactError:
        raise
    except Exception as error:  # what zipfile and zlib say of damaged input is of many kinds
        raise ArtifactError(
            f"{path} is not a whole .gshard file: {type(error).__name__}: {error}. It was truncated, damaged, or is "
            f"something else. {_AGAIN}."
        ) from None
    if not whole:
        raise ArtifactError(
            f"{path} was changed after it was exported: its members are whole, but the file's own checksum is not "
            f"right. {_AGAIN}."
        )
    return found


def _read(path: Path, archive: zipfile.ZipFile) -> Archive:
    entries: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename
        if not _NAME.fullmatch(name) or name != info.orig_filename:
            raise ArtifactError(f"{path} has a member {name!r}, a path that no artifact has. It is not loaded.")
        if name in entries:
            raise ArtifactError(f"{path} has two members {name!r}. It is not loaded.")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
            raise ArtifactError(f"{path}: {name} is encrypted or compressed as no artifact is. It is not loaded.")
        if info.file_size > _MAX_RATIO * max(info.compress_size, 1024):
            raise ArtifactError(
                f"{path}: {name} would unpack {info.compress_size} bytes to {info.file_size}, as no artifact does. It "
                "is not loaded."
            )
        entries[name] = info
    if MANIFEST not in entries:
        raise ArtifactError(f"{path} has no {MANIFEST}: it is not a .gshard file that graphshard.export wrote.")
    facts = _manifest(path, _member(path, archive, entries.pop(MANIFEST), _MAX_MANIFEST_BYTES))
    expected = facts["members"]
    missing, extra = sorted(set(expected) - set(entries)), sorted(set(entries) - set(expected))
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"has a member {extra[0]} that its manifest does not name"
        raise ArtifactError(f"{path} {what}: it was changed after it was exported. {_AGAIN}.")
    members = {}
    for name, info in entries.items():
        size, digest = expected[name]["bytes"], expected[name]["sha256"]
        if info.file_size != size:
            raise ArtifactError(f"{path}: {name} has {info.file_size} bytes instead of {size}. {_AGAIN}.")
        members[name] = _member(path, archive, info, size)
        if _sha256(members[name]) != digest:
            raise ArtifactError(f"{path}: {name} was damaged or changed after it was exported (SHA-256). {_AGAIN}.")
    return Archive(path, facts, members)


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> bytes:
    """A member's content, of which no more than `limit` bytes are unpacked whatever its header says."""
    with archive.open(info) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ArtifactError(f"{path}: {info.filename} is longer than it says. It is not loaded.")
    return data


def _manifest(path: Path, data: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(data)
        version = facts["format"]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ArtifactError(f"{path}: {MANIFEST} cannot be read ({error!r}). {_AGAIN}.") from None
    if version != FORMAT or type(version) is not int:
        raise ArtifactError(
            f"{path} has format {version!r}, this version of graphshard reads {FORMAT}. Export it again with this "
            "version, or load it with the one that wrote it.",
            field="format",
        )
    members = facts.get("members")
    if not isinstance(members, dict) or not all(_is_checksum(item) for item in members.values()):
        raise ArtifactError(f"{path}: {MANIFEST} does not say what is in the file. {_AGAIN}.")
    return facts


def _is_checksum(item: Any) -> bool:
    return isinstance(item, dict) and type(item.get("bytes")) is int and isinstance(item.get("sha256"), str)


def _compression(data: bytes) -> int:
    packed = len(zlib.compress(data, 6))
    return zipfile.ZIP_DEFLATED if packed * _MAX_RATIO // 2 > len(data) else zipfile.ZIP_STORED


def _sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()

"""Signatures of files, with ed25519: who has the private key exported the file, and nobody has changed it since.

    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out public.pem

What is signed is the digest of all bytes of the file but the zip's comment, which holds digest and signature. It is
checked before anything of the file is read. The package `cryptography` is needed, which `graphshard[sign]` installs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphshard.errors import ArgumentError, ArtifactError
from graphshard.utils.argument_validation import path_of
from graphshard.utils.files import read_file
from graphshard.utils.text import brief

# Signs a digest.
Signer = Callable[[bytes], bytes]


_PURPOSE = b"graphshard artifact\n"
_MOST_BYTES = 1 << 16


def signer_of(key: Any) -> Signer:
    """What signs with a private key: a PEM file without a password, or cryptography's own object.

    Raises:
        ArgumentError: it is none.
    """
    ed25519, serialization = _cryptography("sign")
    found = key
    if isinstance(key, (str, os.PathLike)):
        path = path_of("sign", key, "a PEM file with a private key")
        try:
            found = serialization.load_pem_private_key(read_file(path, _MOST_BYTES), None)
        except Exception as error:  # of many kinds, for what is no key
            raise ArgumentError(f"sign: {brief(key)} holds no private key: {error} {_MAKE}") from None
    if not isinstance(found, ed25519.Ed25519PrivateKey):
        raise ArgumentError(f"sign must be an ed25519 private key or its PEM file, got {brief(key)}. {_MAKE}")
    return lambda digest: bytes(found.sign(_PURPOSE + digest))


def trusted(keys: Any) -> list[Any]:
    """The public keys that are trusted: one or several, PEM files or cryptography's own objects.

    Raises:
        ArgumentError: there is none, or one is no public key.
    """
    ed25519, serialization = _cryptography("trust")
    several = list(keys) if isinstance(keys, (list, tuple)) else [keys]
    found = []
    for key in several:
        public = key
        if isinstance(key, (str, os.PathLike)):
            path = path_of("trust", key, "a PEM file with a public key")
            try:
                public = serialization.load_pem_public_key(read_file(path, _MOST_BYTES))
            except Exception as error:
                raise ArgumentError(f"trust: {brief(key)} holds no public key: {error} {_MAKE}") from None
        if not isinstance(public, ed25519.Ed25519PublicKey):
            raise ArgumentError(f"trust must be an ed25519 public key or its PEM file, got {brief(key)}. {_MAKE}")
        found.append(public)
    if not found:
        raise ArgumentError(f"trust must be one public key or several, got {brief(keys)}. {_MAKE}")
    return found


def check_signature(path: Path, digest: bytes, signature: bytes | None, keys: list[Any]) -> None:
    """Raise ArtifactError unless one of the keys signed the digest."""
    from cryptography.exceptions import InvalidSignature

    if signature is None:
        raise ArtifactError(
            f"{path} is not signed, and trust= was given. Export it with sign=, or load it without trust= if you would "
            "run it as a program.",
            field="signature",
        )
    for key in keys:
        try:
            key.verify(signature, _PURPOSE + digest)
            return
        except InvalidSignature:
            continue
    raise ArtifactError(
        f"{path} is not signed by a key that is trusted: it was signed with another one, or changed. It is not loaded. "
        "Give trust= the key of who exported it.",
        field="signature",
    )


_MAKE = "`openssl genpkey -algorithm ed25519 -out key.pem` makes a key."


def _cryptography(argument: str) -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ArgumentError(f"{argument} needs the package cryptography: pip install 'graphshard[sign]'.") from None
    return ed25519, serialization

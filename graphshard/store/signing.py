"""Signatures of artifacts with ed25519: the holder of the private key exported the file, and it is unchanged since.

    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out public.pem

The digest of the whole file is signed (`utils/archive.py`), and checked before anything of the file is interpreted. It
takes the package `cryptography`, which `graphshard[sign]` installs.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from graphshard.errors import ArgumentError, ArtifactError
from graphshard.utils.archive import Signer, Verifier
from graphshard.utils.argument_validation import path_of
from graphshard.utils.files import read_file
from graphshard.utils.text import brief

_PURPOSE = b"graphshard artifact\n"
_MOST_BYTES = 1 << 16
_MAKE = "`openssl genpkey -algorithm ed25519 -out key.pem` makes a key."


def signer_of(key: Any) -> Signer:
    """Return the signing function of a private key: a PEM file without a password, or cryptography's object."""
    found = _key_of("sign", key, "private")
    return lambda digest: bytes(found.sign(_PURPOSE + digest))


def verifier_of(keys: Any) -> Verifier | None:
    """Return the function that checks that one of these public keys signed a file; None for None, which trusts any."""
    if keys is None:
        return None
    several = list(keys) if isinstance(keys, (list, tuple)) else [keys]
    found = [_key_of("trust", key, "public") for key in several]
    if not found:
        raise ArgumentError(f"trust must be one public key or several, got {brief(keys)}. {_MAKE}")
    from cryptography.exceptions import InvalidSignature

    def verify(path: Path, digest: bytes, signature: bytes | None) -> None:
        if signature is None:
            raise ArtifactError(
                f"{path} is not signed, and trust= was given. Export it with sign=, or load it without trust= if you "
                "would run it as a program.",
                field="signature",
            )
        for key in found:
            with contextlib.suppress(InvalidSignature):
                key.verify(signature, _PURPOSE + digest)
                break
        else:
            raise ArtifactError(
                f"{path} is not signed by a key that is trusted: it was signed with another one, or changed. It is not "
                "loaded. Give trust= the key of who exported it.",
                field="signature",
            )

    return verify


def _key_of(argument: str, key: Any, kind: str) -> Any:
    """Return the key that an argument names; raise ArgumentError if it is not an ed25519 key of that kind."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ArgumentError(f"{argument} needs the package cryptography: pip install 'graphshard[sign]'.") from None
    found = key
    if isinstance(key, (str, os.PathLike)):
        path = path_of(argument, key, f"a PEM file with a {kind} key")
        try:
            content = read_file(path, _MOST_BYTES)
            if kind == "private":
                found = serialization.load_pem_private_key(content, None)
            else:
                found = serialization.load_pem_public_key(content)
        except Exception as error:  # of many kinds, for what is not a key
            raise ArgumentError(f"{argument}: {brief(key)} holds no {kind} key: {error} {_MAKE}") from None
    wanted = ed25519.Ed25519PrivateKey if kind == "private" else ed25519.Ed25519PublicKey
    if not isinstance(found, wanted):
        raise ArgumentError(f"{argument} must be an ed25519 {kind} key or its PEM file, got {brief(key)}. {_MAKE}")
    return found

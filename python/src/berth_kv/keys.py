"""Names of chunks: equal prefixes have equal keys, in every process and on every host."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

HASH_BYTES = 32


def chunks(tokens: int, chunk_tokens: int) -> int:
    """How many chunks hold so many tokens."""
    return -(-tokens // chunk_tokens)


class Keyer:
    """Keys of the chunks of a prompt, `model@world_size@worker_id@hash@dtype`.

    The hash is a chain of SHA-256 in lower-case hex: link i is the hash of link i-1 (32 zero bytes before the first) and the chunk's
    tokens as little-endian u32. So the key of a chunk depends on every token up to its end, and on nothing else.

    With a salt (an adapter, a tenant) the chain starts with the SHA-256 of its UTF-8 bytes instead of the zero bytes.
    """

    def __init__(self, model: str, world_size: int, dtype: str, chunk_tokens: int) -> None:
        self.model = model
        self.world_size = world_size
        self.dtype = dtype
        self.chunk_tokens = chunk_tokens

    def hashes(self, tokens: Sequence[int], salt: str = "") -> list[str]:
        """The hash of each chunk; the last chunk may be partial."""
        flat = array("I", tokens)
        if flat.itemsize != 4:
            raise RuntimeError("this platform's unsigned int has not 4 bytes")
        if sys.byteorder == "big":
            flat.byteswap()
        raw = memoryview(flat).cast("B")
        link = hashlib.sha256(salt.encode()).digest() if salt else bytes(HASH_BYTES)
        out = []
        for at in range(0, len(raw), 4 * self.chunk_tokens):
            h = hashlib.sha256(link)
            h.update(raw[at : at + 4 * self.chunk_tokens])
            link = h.digest()
            out.append(link.hex())
        return out

    def key(self, worker: int, chunk_hash: str) -> str:
        """The key of the chunk with that hash at a rank."""
        return f"{self.model}@{self.world_size}@{worker}@{chunk_hash}@{self.dtype}"

    def keys(self, worker: int, tokens: Sequence[int], salt: str = "") -> list[str]:
        """The keys of all chunks of a prompt at a rank."""
        return [self.key(worker, h) for h in self.hashes(tokens, salt)]

    def tokens_key(self, worker: int) -> str:
        """The key of the fixed token list 0, 1, ..., by which two sides find out whether they name chunks alike."""
        return self.keys(worker, range(self.chunk_tokens))[0]

"""Values of calls that both clients share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

from ._core import Message
from .errors import AgentError
from .pool import Pool, View

if TYPE_CHECKING:
    import numpy
    import torch


@dataclass(frozen=True)
class Staged:
    """A chunk in a staging slot, to be submitted. index is its position in the prompt, from 0."""

    index: int
    key: str
    slot: SupportsIndex  # a slot's number, or its View
    tokens: int


@dataclass(frozen=True)
class Chunk:
    """A claimed chunk in the receive pool, readable until it is released."""

    index: int  # in the prompt
    key: str
    tokens: int
    view: View

    @property
    def memory(self) -> memoryview:
        """Its bytes, read-only."""
        return self.view.memory

    def numpy(self) -> numpy.ndarray[Any, Any]:
        """As an array of the chunk's shape."""
        return self.view.numpy()

    def torch(self) -> torch.Tensor:
        """As a tensor of the chunk's shape, not to be written."""
        return self.view.torch()


def millis(seconds: float) -> int:
    """Whole milliseconds, at least 1, rounded up."""
    return max(1, -int(-seconds * 1000 // 1))


def submission(req: str, chunks: Iterable[Staged], end: int | None) -> Message:
    return {
        "req": req,
        "chunks": [{"index": c.index, "key": c.key, "slot": c.slot.__index__(), "tokens": c.tokens} for c in chunks],
        "end": end,
    }


def staged_views(pool: Pool | None, slots: Sequence[int]) -> list[View]:
    if pool is None:
        raise AgentError("unsupported", "this agent has no staging pool")
    return [pool.view(s) for s in slots]


def claimed_chunks(pool: Pool | None, answer: Message) -> list[Chunk]:
    """The chunks of an answer to claim; AgentError when they are of another layout than this engine's."""
    if pool is None:
        raise AgentError("unsupported", "this agent has no receive pool")
    layout = pool.layout
    theirs = (answer["fmt"], answer["dtype"], tuple(answer["shape"]))
    if theirs != (layout.fmt, layout.dtype, layout.shape):
        raise AgentError("layout_mismatch", f"fmt, dtype and shape are {theirs} there, {(layout.fmt, layout.dtype, layout.shape)} here")
    out = []
    for c in answer["chunks"]:
        tokens = c["tokens"]
        if not 0 < tokens <= layout.chunk_tokens or c["bytes"] != layout.bytes(tokens) or not c["slot"] < pool.slots:
            raise AgentError("layout_mismatch", f"chunk {c['index']} has {tokens} tokens and {c['bytes']} bytes in slot {c['slot']}")
        out.append(Chunk(c["index"], c["key"], tokens, pool.view(c["slot"], tokens)))
    return out

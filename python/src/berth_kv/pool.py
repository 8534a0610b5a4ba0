"""An agent's memory in this process: mapped once, seen through views, never copied."""

from __future__ import annotations

import mmap
import os
import warnings
from typing import TYPE_CHECKING, Any, SupportsIndex

from .layout import Layout

if TYPE_CHECKING:
    import numpy
    import torch

# What a wire dtype is in NumPy; bfloat16 and fp8 have no type there and are seen as bits.
_NUMPY = {
    "int8": "i1", "uint8": "u1", "bool": "?", "half": "<f2", "int16": "<i2", "float": "<f4", "int32": "<i4", "double": "<f8", "int64": "<i8",
    "bfloat16": "<u2", "fp8_e4m3fn": "u1", "fp8_e4m3fnuz": "u1", "fp8_e5m2": "u1", "fp8_e5m2fnuz": "u1",
}  # fmt: skip
_TORCH = {
    "fp8_e4m3fn": "float8_e4m3fn", "fp8_e4m3fnuz": "float8_e4m3fnuz", "fp8_e5m2": "float8_e5m2", "fp8_e5m2fnuz": "float8_e5m2fnuz",
    "float": "float32", "double": "float64",
}  # fmt: skip


class View:
    """The first bytes of a slot. Its memory is that of the agent's pool: valid while the slot is yours.

    Python keeps the mapping alive while a view of it is, so that a late look reads old bytes but does not crash.
    """

    __slots__ = ("slot", "nbytes", "tokens", "_pool")

    def __init__(self, pool: Pool, slot: int, tokens: int) -> None:
        self._pool = pool
        self.slot = slot
        self.tokens = tokens
        self.nbytes = pool.layout.bytes(tokens)

    def __index__(self) -> int:
        return self.slot

    def __repr__(self) -> str:
        return f"<{self._pool.name} slot {self.slot}: {self.tokens} tokens, {self.nbytes} bytes>"

    def first(self, tokens: int) -> View:
        """The same slot, for a chunk of so many tokens: the last of a prompt is compact."""
        return self._pool.view(self.slot, tokens)

    @property
    def memory(self) -> memoryview:
        """Its bytes; read-only in the receive pool."""
        return self._pool.slot_memory(self.slot)[: self.nbytes]

    def numpy(self, dtype: Any = None, shape: tuple[int, ...] | None = None) -> numpy.ndarray[Any, Any]:
        """As an array, by default of the chunk's shape and type (bfloat16 and fp8 as unsigned integers)."""
        import numpy as np

        out: numpy.ndarray[Any, Any] = np.frombuffer(self.memory, dtype or _NUMPY[self._pool.layout.dtype])
        if shape is None and dtype is None:
            shape = self._pool.layout.shape_of(self.tokens)
        return out if shape is None else out.reshape(shape)  # type: ignore[no-any-return,unused-ignore]

    def torch(self, dtype: Any = None, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """As a tensor, by default of the chunk's shape and type. torch knows no read-only memory: writing to a tensor of the receive
        pool crashes the process."""
        import torch

        name = self._pool.layout.dtype
        raw = self._pool.tensor()[self.slot * self._pool.slot_bytes :][: self.nbytes]
        out = raw.view(dtype or getattr(torch, _TORCH.get(name, name)))
        if shape is None and dtype is None:
            shape = self._pool.layout.shape_of(self.tokens)
        return out if shape is None else out.view(shape)


class Pool:
    """The mapping of one pool."""

    def __init__(self, name: str, fd: int, slots: int, slot_bytes: int, layout: Layout, writable: bool) -> None:
        size = os.fstat(fd).st_size
        if slots < 1 or slot_bytes < 1 or size < slots * slot_bytes:
            raise ValueError(f"{name} pool: {slots} slots of {slot_bytes} bytes do not fit its {size} bytes")
        self.name = name
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.layout = layout
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        self._map.madvise(mmap.MADV_DONTDUMP)  # prompts do not belong in a core dump
        self._memory = memoryview(self._map)
        self._tensor: torch.Tensor | None = None

    def view(self, slot: SupportsIndex, tokens: int | None = None) -> View:
        """The bytes of a chunk of so many tokens in a slot, by default a full one."""
        slot = slot.__index__()
        if not 0 <= slot < self.slots:
            raise ValueError(f"{self.name} slot {slot} of {self.slots}")
        tokens = self.layout.chunk_tokens if tokens is None else tokens
        if not 0 <= tokens <= self.layout.chunk_tokens:
            raise ValueError(f"{tokens} tokens in a chunk of {self.layout.chunk_tokens}")
        return View(self, slot, tokens)

    def slot_memory(self, slot: int) -> memoryview:
        return self._memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def tensor(self) -> torch.Tensor:
        """The whole pool as bytes."""
        if self._tensor is None:
            import torch

            with warnings.catch_warnings():  # about memory that is read-only
                warnings.simplefilter("ignore", UserWarning)
                self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        return self._tensor

    def touch(self) -> None:
        """Make the pages of a writable pool present here, so that the first write to a slot is not slow. Changes no byte."""
        populate_write = 23  # MADV_POPULATE_WRITE, Linux 5.14
        step = 16 << 20
        for at in range(0, len(self._map), step):
            try:
                self._map.madvise(populate_write, at, min(step, len(self._map) - at))
            except (OSError, ValueError):
                return

    def close(self) -> None:
        """Unmap, now or with the last view."""
        self._tensor = None
        try:
            self._memory.release()
            self._map.close()
        except BufferError:
            pass

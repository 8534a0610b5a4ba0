"""What an engine and its agent must agree on: the form of a chunk."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Wire names of element types and their bytes. "float16" and "float32" are not names of this wire.
DTYPE_BYTES = {
    "int8": 1, "uint8": 1, "bool": 1, "fp8_e4m3fn": 1, "fp8_e4m3fnuz": 1, "fp8_e5m2": 1, "fp8_e5m2fnuz": 1,
    "half": 2, "bfloat16": 2, "int16": 2, "float": 4, "int32": 4, "double": 8, "int64": 8,
}  # fmt: skip
# Memory formats and which dimension of the shape counts tokens.
TOKEN_DIMENSION = {1: 2, 2: 1, 3: 0, 4: 0, 5: 0, 6: 2, 7: 0, 8: 0}
KV_2LTD = 1  # [2, layers, tokens, hidden]
KV_2TD = 3  # [tokens, anything]
KV_MLA = 6  # [1, layers, tokens, head]


@dataclass(frozen=True)
class Layout:
    """The form of a chunk of one tensor-parallel rank. It must equal the agent's, which comes from kv_shape and kv_dtype.

    fmt is the memory format and shape that of a full chunk; dtype the wire's name of the element type.
    """

    fmt: int
    dtype: str
    shape: tuple[int, ...]
    tp_size: int = 1
    tp_rank: int = 0

    def __post_init__(self) -> None:
        if self.fmt not in TOKEN_DIMENSION:
            raise ValueError(f"fmt is {self.fmt}; known are {sorted(TOKEN_DIMENSION)}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}; known are {', '.join(DTYPE_BYTES)}")
        if len(self.shape) <= TOKEN_DIMENSION[self.fmt] or min(self.shape) < 1:
            raise ValueError(f"shape is {self.shape}; fmt {self.fmt} has its tokens in dimension {TOKEN_DIMENSION[self.fmt]}")

    @classmethod
    def attention(
        cls, *, layers: int, kv_heads: int, head_size: int, chunk_tokens: int, dtype: str, mla: bool = False, tp_size: int = 1, tp_rank: int = 0
    ) -> Layout:
        """The layout of a transformer: an agent's kv_shape is [layers, 2, chunk_tokens, kv_heads, head_size], with 1 for 2 with MLA.

        kv_heads are those of one rank.
        """
        kinds = 1 if mla else 2
        return cls(KV_MLA if mla else KV_2LTD, dtype, (kinds, layers, chunk_tokens, kv_heads * head_size), tp_size, tp_rank)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a full chunk."""
        return self.shape[TOKEN_DIMENSION[self.fmt]]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a full chunk."""
        return self.bytes(self.chunk_tokens)

    def shape_of(self, tokens: int) -> tuple[int, ...]:
        """Shape of a chunk of so many tokens."""
        at = TOKEN_DIMENSION[self.fmt]
        return (*self.shape[:at], tokens, *self.shape[at + 1 :])

    def bytes(self, tokens: int) -> int:
        """Bytes of a chunk of so many tokens: a prefix of its slot."""
        return math.prod(self.shape_of(tokens)) * DTYPE_BYTES[self.dtype]

    def facts(self) -> dict[str, object]:
        return {
            "slot_bytes": self.slot_bytes, "fmt": self.fmt, "dtype": self.dtype, "chunk_tokens": self.chunk_tokens,
            "tp_size": self.tp_size, "tp_rank": self.tp_rank,
        }  # fmt: skip

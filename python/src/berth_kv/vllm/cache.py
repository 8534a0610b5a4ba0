"""vLLM's paged KV cache as token-major chunks, [2, layers, tokens, kv_heads * head_size], and back.

A chunk's form does not depend on the cache's: so engines of other block sizes, kernels and hardware understand each other.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

import torch

from ..layout import KV_MLA, Layout


class Cache(Protocol):
    """One rank's cache. gather and scatter take a request's block table and the range [start, end) of its tokens."""

    def gather(self, blocks: list[int], start: int, end: int, out: torch.Tensor) -> None:
        """Copy into out, [kinds, layers, end - start, hidden] in host memory; it is there when this returns."""

    def scatter(self, blocks: list[int], start: int, end: int, chunk: torch.Tensor) -> None:
        """Copy from chunk, of the same shape; it may be overwritten when this returns."""

    def pin(self, pool: torch.Tensor, writable: bool) -> None:
        """Chunks are in this memory from now on; called again with the same."""

    def mark(self) -> Any:
        """A point in the engine's work; after() waits for it."""

    def after(self, mark: Any) -> None: ...


def open_cache(kv_caches: dict[str, torch.Tensor], layout: Layout, block_size: int, kv_cache_dtype: str) -> Cache:
    """The cache that vLLM registered. ValueError when it is not what the configuration says, with both values."""
    names = sorted(kv_caches, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])
    tensors = [kv_caches[name] for name in names]
    kinds, layers, _, hidden = layout.shape
    if len(tensors) != layers:
        raise ValueError(f"vLLM registered {len(tensors)} KV caches, the model has {layers} layers: not supported by BerthConnector")
    first = tensors[0]
    for name, t in zip(names, tensors):
        if t.shape != first.shape or t.stride() != first.stride() or t.dtype != first.dtype:
            raise ValueError(f"the KV cache of {name} is {t.dtype} {tuple(t.shape)}, that of {names[0]} {first.dtype} {tuple(first.shape)}: not supported")
    if layout.fmt == KV_MLA:
        if first.dim() != 3 or first.shape[1] != block_size or first.shape[2] != hidden:
            raise ValueError(f"the KV cache has shape {tuple(first.shape)}; [blocks, {block_size}, {hidden}] is supported")
        return TokenCache(tensors, kinds)
    if first.dim() != 4 or first.shape[2] != block_size or first.shape[1] * first.shape[3] != 2 * hidden:
        raise ValueError(f"the KV cache has shape {tuple(first.shape)}; [blocks, kv_heads, {block_size}, 2 * head_size] of {2 * hidden} per token is supported")
    if first.device.type == "cpu":
        if kv_cache_dtype != "auto":
            raise ValueError(f"kv_cache_dtype is {kv_cache_dtype!r}; on CPU BerthConnector supports auto")
        return CPUCache(tensors)
    return TokenCache(tensors, kinds)


class TokenCache:
    """Caches in which a token is addressable: GPU layouts, by views. K and V of a token are beside each other in the last dimension.

    Copies run on a stream of their own after an event of the engine's, between the device and the pool's pinned memory; the host waits for
    their event.
    """

    def __init__(self, tensors: list[torch.Tensor], kinds: int) -> None:
        self._tensors = tensors
        self._kinds = kinds
        self._block_size = tensors[0].shape[-2]
        cuda = tensors[0].device.type == "cuda"
        self._stream = torch.cuda.Stream(tensors[0].device) if cuda else None
        self._pinned: dict[int, torch.Tensor] = {}  # kept, so that what the driver knows stays mapped

    def pin(self, pool: torch.Tensor, writable: bool) -> None:
        if self._stream is not None and pool.data_ptr() not in self._pinned:
            read_only = 8  # cudaHostRegisterReadOnly
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(pool.data_ptr(), pool.numel(), 0 if writable else read_only))
            self._pinned[pool.data_ptr()] = pool

    def mark(self) -> Any:
        return torch.cuda.current_stream().record_event() if self._stream else None

    def after(self, mark: Any) -> None:
        if mark is not None:
            mark.synchronize()

    def _index(self, blocks: list[int], start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(start, end)
        where = torch.tensor(blocks)[at // self._block_size], at % self._block_size
        device = self._tensors[0].device
        return where[0].to(device), where[1].to(device)

    def gather(self, blocks: list[int], start: int, end: int, out: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            block, offset = self._index(blocks, start, end)
            for layer, t in enumerate(self._tensors):
                if t.dim() == 3:
                    out[0, layer].copy_(t[block, offset], non_blocking=True)
                    continue
                tokens = t[block, :, offset]  # [tokens, heads, 2 * head_size]
                for kind, part in enumerate(tokens.chunk(2, dim=2)):
                    out[kind, layer].copy_(part.flatten(1), non_blocking=True)
            self._finish()

    def scatter(self, blocks: list[int], start: int, end: int, chunk: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            block, offset = self._index(blocks, start, end)
            for layer, t in enumerate(self._tensors):
                if t.dim() == 3:
                    t[block, offset] = chunk[0, layer].to(t.device, non_blocking=True)
                    continue
                heads, size = t.shape[1], t.shape[3] // 2
                parts = [chunk[kind, layer].to(t.device, non_blocking=True).view(-1, heads, size) for kind in range(2)]
                t[block, :, offset] = torch.cat(parts, dim=2)
            self._finish()

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.record_event().synchronize()


class CPUCache:
    """vLLM's CPU cache. Inside one (block, head) there is a region of K and one of V, each permuted as the attention kernel wants it,
    which depends on the machine: the permutation is measured by writing through vLLM's own kernel."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        self._tensors = tensors
        _, self._heads, self._block_size, two = tensors[0].shape
        self._size = two // 2
        self._isa = _get_attn_isa(tensors[0].dtype, self._block_size, self._size)
        self._kv = [self._regions(t) for t in tensors]
        self._stack = stacked(tensors)
        self._places = self._measure()
        self._views = [strided_view(p) for p in self._places]

    def pin(self, pool: torch.Tensor, writable: bool) -> None:
        pass

    def mark(self) -> None:
        return None

    def after(self, mark: Any) -> None:
        pass

    def _regions(self, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = t.view(t.shape[0], self._heads, 2 * self._block_size, self._size).chunk(2, dim=2)
        return k, v

    def _write(self, k: torch.Tensor, v: torch.Tensor, regions: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor) -> None:
        from vllm import _custom_ops as ops

        ops.cpu_attn_reshape_and_cache(k, v, regions[0], regions[1], slots, self._isa)

    def _measure(self) -> list[torch.Tensor]:
        """For K and for V: the place of (token, dim) in its region. Written as numbers below 256, which every type holds exactly."""
        b, h, d = self._block_size, self._heads, self._size
        index = torch.arange(b * d).view(b, 1, d)
        scratch = torch.zeros(1, h, b, 2 * d, dtype=self._tensors[0].dtype)
        regions = self._regions(scratch)
        found = torch.zeros(2, h, b * d, dtype=torch.int64)
        for shift in range(0, max(1, (b * d - 1).bit_length()), 8):
            ramp = ((index >> shift) & 255).to(scratch.dtype).expand(b, h, d).contiguous()
            self._write(ramp, ramp, regions, torch.arange(b))
            for kind in range(2):
                found[kind] += regions[kind][0].reshape(h, b * d).to(torch.int64) << shift
        places = []
        for kind in range(2):
            if not (found[kind] == found[kind][0]).all() or not (found[kind][0].sort().values == torch.arange(b * d)).all():
                raise ValueError(f"the KV cache's layout ({self._isa}) is no permutation of tokens in a block: not supported by BerthConnector")
            places.append(torch.argsort(found[kind][0]).view(b, d))
        return places

    def scatter(self, blocks: list[int], start: int, end: int, chunk: torch.Tensor) -> None:
        at = torch.arange(start, end)
        slots = torch.tensor(blocks)[at // self._block_size] * self._block_size + at % self._block_size
        shape = (end - start, self._heads, self._size)
        for layer, regions in enumerate(self._kv):
            self._write(chunk[0, layer].view(shape), chunk[1, layer].view(shape), regions, slots)

    def gather(self, blocks: list[int], start: int, end: int, out: torch.Tensor) -> None:
        size = self._block_size
        for n in range(start // size, (end - 1) // size + 1):
            a, z = max(start, n * size), min(end, (n + 1) * size)
            for kind in range(2):
                into = out[kind, :, a - start : z - start]
                if z - a == size:
                    self._block(kind, blocks[n], into)
                else:
                    whole = torch.empty(len(self._tensors), size, self._heads * self._size, dtype=out.dtype)
                    self._block(kind, blocks[n], whole)
                    into.copy_(whole[:, a - n * size : z - n * size])

    def _block(self, kind: int, block: int, out: torch.Tensor) -> None:
        """Copy a whole block of all layers into out, [layers, block_size, hidden]."""
        if self._stack is None:
            for layer, t in enumerate(self._tensors):
                self._copy(kind, t[block].unsqueeze(0), out[layer : layer + 1])
        else:
            self._copy(kind, self._stack[:, block], out)

    def _copy(self, kind: int, source: torch.Tensor, out: torch.Tensor) -> None:
        layers, heads, b, d = source.shape[0], self._heads, self._block_size, self._size
        region = source.reshape(layers, heads, 2, b * d)[:, :, kind]
        view = self._views[kind]
        if view is None:
            picked = region.index_select(2, self._places[kind].view(-1)).view(layers, heads, b, d)
            out.view(layers, b, heads, d).copy_(picked.transpose(1, 2))
            return
        (t_shape, t_stride), (d_shape, d_stride) = view
        if d_stride[-1] == 1 and d_shape[-1] == 2 and out.element_size() == 2:  # two elements at a time
            out, region = out.view(torch.int32), region.view(torch.int32)
            t_stride, d_shape, d_stride = [s // 2 for s in t_stride], d_shape[:-1], [s // 2 for s in d_stride[:-1]]
        strides = (region.stride(0), region.stride(1), *t_stride, *d_stride)
        tokens = region.as_strided((layers, heads, *t_shape, *d_shape), strides)
        into = out.view(layers, *t_shape, heads, *d_shape)
        into.copy_(tokens.movedim(1, 1 + len(t_shape)))


def stacked(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """The layers as one tensor, if they are views of one storage at equal distances."""
    first = tensors[0]
    if len(tensors) == 1:
        return first.unsqueeze(0)
    step = tensors[1].storage_offset() - first.storage_offset()
    same = first.untyped_storage().data_ptr()
    if step <= 0 or any(t.untyped_storage().data_ptr() != same or t.storage_offset() != first.storage_offset() + i * step for i, t in enumerate(tensors)):
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()), first.storage_offset())


Dims = tuple[list[int], list[int]]  # sizes and strides


def strided(values: list[int]) -> Dims | None:
    """A sequence that begins with 0 as dims of a strided view, if it is one."""
    if values[0] != 0 or min(values) < 0:
        return None
    sizes: list[int] = []
    strides: list[int] = []
    while len(values) > 1:  # the innermost dim first
        step, n = values[1], 2
        while n < len(values) and values[n] == n * step:
            n += 1
        while len(values) % n:
            n -= 1
        if n < 2:
            return None
        sizes.insert(0, n)
        strides.insert(0, step)
        values = values[::n]
    return sizes, strides


def strided_view(places: torch.Tensor) -> tuple[Dims, Dims] | None:
    """A permutation as a strided view, if it is one: the dims of the token and those of the dim."""
    tokens, dim = strided(places[:, 0].tolist()), strided(places[0].tolist())
    if tokens is None or dim is None:
        return None
    if sum((n - 1) * s for part in (tokens, dim) for n, s in zip(*part)) >= places.numel():
        return None
    seen = torch.arange(places.numel()).as_strided((*tokens[0], *dim[0]), (*tokens[1], *dim[1]))
    return (tokens, dim) if torch.equal(seen.reshape(places.shape), places) else None

"""What the connector is told: vLLM's configuration and its own extra settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..keys import Keyer
from ..layout import Layout

# vLLM's names of element types on the wire.
WIRE_DTYPE = {
    "torch.bfloat16": "bfloat16", "torch.float16": "half", "torch.float32": "float", "torch.float64": "double", "torch.uint8": "uint8",
    "torch.float8_e4m3fn": "fp8_e4m3fn", "torch.float8_e5m2": "fp8_e5m2",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """kv_connector_extra_config. Times are in seconds."""

    berth_socket: str | list[str] = ""  # of the agents; {rank} stands for the tensor-parallel rank, or one path for each rank
    chunk_tokens: int = 256  # the agent's chunk_size
    model_name: str = ""  # in keys; default: vLLM's model. The same on both sides
    find: bool = False  # decode side: look for the KV of requests that name none, as LMCache's proxy sends them
    admit_ahead: int = 4  # prompts for one receiver that wait for their grant; the next ones stay in vLLM's queue
    transfer_timeout: float = 600.0  # from begin to ready
    wait_timeout: float = 60.0  # decode side: until the request is ready
    connect_timeout: float = 10.0  # at start
    timings: bool = False  # a log line with the parts of each transfer's time

    @classmethod
    def of(cls, kv_transfer_config: Any) -> Settings:
        """Read and check the extra settings; ValueError names every fault."""
        given = dict(kv_transfer_config.kv_connector_extra_config or {})
        faults = []
        values: dict[str, Any] = {}
        for name, field in cls.__dataclass_fields__.items():
            if name not in given:
                continue
            v = given.pop(name)
            default = field.default
            if name == "berth_socket":
                ok = isinstance(v, str) or isinstance(v, list) and v and all(isinstance(p, str) for p in v)
            elif isinstance(default, bool):
                ok = isinstance(v, bool)
            elif isinstance(default, (int, float)):
                ok = isinstance(v, (int, float) if isinstance(default, float) else int) and not isinstance(v, bool) and v > 0
            else:
                ok = isinstance(v, str)
            if not ok:
                faults.append(f"{name} is {v!r}; it must be like {default!r}" + (", above 0" if isinstance(default, (int, float)) else ""))
            values[name] = v
        faults += [f"{name} is not known; known are {', '.join(cls.__dataclass_fields__)}" for name in given]
        if not values.get("berth_socket"):
            faults.append("berth_socket is missing: the agents' local_socket, with {rank} for the rank")
        if faults:
            raise ValueError("kv_connector_extra_config: " + "; ".join(faults))
        return cls(**values)

    def socket(self, rank: int, ranks: int) -> str:
        """Path of a rank's agent."""
        if isinstance(self.berth_socket, list):
            if len(self.berth_socket) != ranks:
                raise ValueError(f"berth_socket has {len(self.berth_socket)} paths for {ranks} ranks")
            return self.berth_socket[rank]
        path = self.berth_socket.replace("{rank}", str(rank))
        if ranks > 1 and path == self.berth_socket:
            raise ValueError(f"berth_socket is {path!r} for {ranks} ranks; {{rank}} in it stands for the rank")
        return path


@dataclass(frozen=True)
class Engine:
    """What both sides of the connector must know of the engine."""

    settings: Settings
    engine_id: str
    ranks: int
    sends: bool
    receives: bool
    max_model_len: int
    block_size: int
    kv_cache_dtype: str
    layout: Layout  # of rank 0
    keyer: Keyer

    @classmethod
    def of(cls, vllm_config: Any) -> Engine:
        transfer = vllm_config.kv_transfer_config
        settings = Settings.of(transfer)
        model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
        if parallel.pipeline_parallel_size != 1:
            raise ValueError(f"pipeline_parallel_size is {parallel.pipeline_parallel_size}; BerthConnector supports 1")
        if getattr(parallel, "decode_context_parallel_size", 1) != 1 or getattr(parallel, "prefill_context_parallel_size", 1) != 1:
            raise ValueError("context parallelism is not supported by BerthConnector")
        dtype = WIRE_DTYPE[str(model.dtype)] if cache.cache_dtype == "auto" else cache_dtype(cache.cache_dtype)
        layout = Layout.attention(
            layers=model.get_num_layers(parallel), kv_heads=model.get_num_kv_heads(parallel), head_size=model.get_head_size(),
            chunk_tokens=settings.chunk_tokens, dtype=dtype, mla=model.use_mla, tp_size=parallel.tensor_parallel_size,
        )  # fmt: skip
        return cls(
            settings=settings, engine_id=f"vllm-{transfer.engine_id}", ranks=parallel.tensor_parallel_size, sends=transfer.is_kv_producer,
            receives=transfer.is_kv_consumer, max_model_len=model.max_model_len, block_size=cache.block_size, kv_cache_dtype=cache.cache_dtype,
            layout=layout,
            keyer=Keyer(settings.model_name or model.model, parallel.tensor_parallel_size, dtype, settings.chunk_tokens),
        )  # fmt: skip

    def layout_of(self, rank: int) -> Layout:
        return Layout(self.layout.fmt, self.layout.dtype, self.layout.shape, self.ranks, rank)


def cache_dtype(name: str) -> str:
    """The wire's name of a kv_cache_dtype."""
    known = {"bfloat16": "bfloat16", "float16": "half", "half": "half", "float32": "float", "fp8": "fp8_e4m3fn", "fp8_e4m3": "fp8_e4m3fn", "fp8_e5m2": "fp8_e5m2"}
    if name not in known:
        raise ValueError(f"kv_cache_dtype is {name!r}; BerthConnector knows auto, {', '.join(known)}")
    return known[name]


@dataclass(frozen=True)
class Spec:
    """disagg_spec of a request's kv_transfer_params: where a prompt's KV goes, or, with no host, whence it comes."""

    req_id: str
    host: str = ""
    alloc_ports: tuple[int, ...] = ()
    init_ports: tuple[int, ...] = ()
    berth_proxy: bool = False

    @classmethod
    def of(cls, params: Any, ranks: int) -> Spec | None:
        """None when there is none; ValueError when it cannot be used."""
        spec = (params or {}).get("disagg_spec")
        if spec is None:
            return None
        if not isinstance(spec, dict) or not isinstance(spec.get("req_id"), str) or not spec["req_id"]:
            raise ValueError(f"disagg_spec has no req_id: {spec!r}")
        host = spec.get("receiver_host") or ""
        if not host:
            return cls(spec["req_id"])
        alloc, init = _ports(spec, "receiver_alloc_port"), _ports(spec, "receiver_init_port")
        if len(alloc) < ranks or 0 < len(init) < ranks:
            raise ValueError(f"disagg_spec has {len(alloc)} receiver_alloc_port and {len(init)} receiver_init_port for {ranks} ranks")
        return cls(spec["req_id"], str(host), alloc, init, bool(spec.get("berth_proxy")))


def _ports(spec: dict[str, Any], name: str) -> tuple[int, ...]:
    v = spec.get(name)
    ports = v if isinstance(v, list) else [] if v is None else [v]
    if not all(isinstance(p, int) and 0 < p < 65536 for p in ports):
        raise ValueError(f"{name} is {v!r}; it must be a port, or one for each rank")
    return tuple(ports)

"""What the scheduler side tells the worker sides with each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass
class Compute:
    """A step computes a prompt up to `ready` tokens: they may be sent after it. blocks is the prompt's whole block table so far."""

    request_id: str
    req: str  # at the agents
    hashes: list[str]  # of all its chunks
    prompt: int  # tokens
    ready: int
    blocks: list[int]


@dataclass
class Load:
    """Copy tokens [start, end) of a claimed request into blocks and release it."""

    request_id: str
    req: str
    incarnations: list[str]  # of each rank's agent that holds it
    chunks: list[list[tuple[int, int]]]  # of each rank: slot and tokens of each chunk from the first on
    start: int
    end: int
    blocks: list[int]


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]
    compute: list[Compute] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)  # their blocks belong to others from this step on
    finished: dict[str, bool] = field(default_factory=dict)  # their blocks wait to be freed; True: nothing more is to be sent
    load: list[Load] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.compute or self.preempted or self.finished or self.load)


@dataclass
class Failures(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler side: transfers that it could not send, and why, by request id."""

    requests: dict[str, str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Failures:
        assert isinstance(other, Failures)
        return Failures({**self.requests, **other.requests})

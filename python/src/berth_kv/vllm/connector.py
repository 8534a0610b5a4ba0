"""The class that vLLM loads. It has one of two sides and hands every call on to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from .messages import Failures, Step
from .scheduler import SchedulerSide
from .settings import Engine
from .worker import WorkerSide

if TYPE_CHECKING:
    import torch


class BerthConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Sends and receives the KV cache of prompts through Berth agents.

    It does not say that it supports vLLM's hybrid KV cache manager, which would make several KV cache groups of a model with sliding windows:
    without it vLLM keeps such a model's cache as one group, and only that has blocks for every token of a prompt, as a transfer needs.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._engine = Engine.of(vllm_config)
        groups = len(kv_cache_config.kv_cache_groups) if kv_cache_config is not None else 1
        if groups > 1:
            raise ValueError(f"the model has {groups} KV cache groups; BerthConnector supports 1")
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(self._engine)

    # Scheduler side.

    def _s(self) -> SchedulerSide:
        assert self._scheduler is not None, "a call for the scheduler side came to a worker"
        return self._scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._s().matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._s().allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._s().step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._s().output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._s().finished(request)

    def has_pending_block_frees(self) -> bool:
        return self._s().frees_soon()

    # Worker side.

    def _w(self) -> WorkerSide:
        assert self._worker is not None, "register_kv_caches has not been called"
        return self._worker

    def _step(self) -> Step:
        meta = self._get_connector_metadata()
        assert isinstance(meta, Step)
        return meta

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank

        self._worker = WorkerSide(self._engine, get_tensor_model_parallel_rank(), kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if kv_connector_metadata.preempted:
            self._w().preempted(kv_connector_metadata.preempted)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._step().load:
            self._w().load(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # loads are asynchronous: a request runs when all of its KV is there

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # prompts are sent by chunks of all layers, after the step

    def wait_for_save(self) -> None:
        step = self._step()
        if step:
            self._w().computed(step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._w().done()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._w().invalid()

    def build_connector_worker_meta(self) -> Failures | None:
        return self._w().failures()

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

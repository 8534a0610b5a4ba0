"""The connector for vLLM's V1 interface:

    --kv-transfer-config '{"kv_connector": "BerthConnector", "kv_connector_module_path": "berth_kv.vllm", "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"berth_socket": "/run/berth/sender-{rank}.sock"}}'

docs/vllm.md has the settings and what they do.
"""

from .connector import BerthConnector

__all__ = ["BerthConnector"]

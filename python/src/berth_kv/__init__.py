"""Client of a Berth agent's local API: what an inference engine uses to send and receive the KV cache of prompts.

    import berth_kv

    layout = berth_kv.Layout.attention(layers=4, kv_heads=2, head_size=16, chunk_tokens=16, dtype="bfloat16")
    with berth_kv.connect("/run/berth/sender-0.sock", layout) as agent: ...

berth_kv.aio has the same client for asyncio, berth_kv.vllm the connector for vLLM.
"""

from ._dial import Info, new_engine_id
from ._values import Chunk, Staged
from .client import Batch, Claim, Client, Transfer, connect
from .errors import AgentError, DeadlineError
from .keys import Keyer, chunks
from .layout import Layout
from .pool import Pool, View

__version__ = "0.1.0"
__all__ = [
    "AgentError", "Batch", "Chunk", "Claim", "Client", "DeadlineError", "Info", "Keyer", "Layout", "Pool", "Staged", "Transfer", "View",
    "chunks", "connect", "new_engine_id",
]  # fmt: skip

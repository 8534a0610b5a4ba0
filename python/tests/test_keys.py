"""Keys and layouts: values that other languages must get too."""

from __future__ import annotations

import hashlib
import pathlib
import pickle

import pytest

from berth_kv import AgentError, DeadlineError, Keyer, Layout, chunks
from berth_kv.errors import agent_error


def test_known_keys() -> None:
    k = Keyer("berth-demo", 2, "bfloat16", 16)
    first = hashlib.sha256(bytes(32) + b"".join(t.to_bytes(4, "little") for t in range(16))).hexdigest()
    second = hashlib.sha256(bytes.fromhex(first) + (16).to_bytes(4, "little")).hexdigest()
    assert k.keys(1, range(17)) == [f"berth-demo@2@1@{first}@bfloat16", f"berth-demo@2@1@{second}@bfloat16"]
    assert k.tokens_key(1) == k.keys(1, range(17))[0]
    assert first == "aa330374288acbdcb5008f2959fd6df7d265c735fbb9b4b4c42ec2036accd6d3"
    assert first in (pathlib.Path(__file__).parents[2] / "docs" / "local-api.md").read_text()
    assert k.hashes([]) == []


def test_prefixes_share_keys() -> None:
    k = Keyer("m", 1, "float", 4)
    a, b = k.hashes([1, 2, 3, 4, 5, 6, 7, 8, 9]), k.hashes([1, 2, 3, 4, 5, 6, 7, 9])
    assert a[0] == b[0] and a[1] != b[1] and len(a) == 3
    assert k.hashes([1, 2, 3]) != k.hashes([1, 2, 3], salt="adapter")


def test_chunks_and_bytes() -> None:
    assert [chunks(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    layout = Layout.attention(layers=30, kv_heads=3, head_size=64, chunk_tokens=256, dtype="bfloat16")
    assert layout.shape == (2, 30, 256, 192) and layout.slot_bytes == 23040 * 256 and layout.bytes(1) == 23040
    for bad, text in [(dict(fmt=9), "fmt is 9"), (dict(dtype="float32"), "dtype is 'float32'"), (dict(shape=(2, 3)), "shape is"), (dict(shape=(2, 3, 0, 4)), "shape is")]:
        with pytest.raises(ValueError, match=text):
            Layout(**(dict(fmt=1, dtype="float", shape=(2, 3, 4, 5)) | bad))


def test_errors_pickle() -> None:
    e = pickle.loads(pickle.dumps(agent_error("busy", "full", 0.5)))
    assert isinstance(e, AgentError) and (e.code, e.text, e.retry_after, str(e)) == ("busy", "full", 0.5, "busy: full")
    assert isinstance(pickle.loads(pickle.dumps(agent_error("deadline"))), DeadlineError)

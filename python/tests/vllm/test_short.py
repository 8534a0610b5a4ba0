"""The short form of test_vllm.py, for every change: one prefill and one decode engine of real vLLM, a few prompts."""

from __future__ import annotations

import pathlib

from fleet import Fleet, answer, at_once


def test_answers_through_berth_equal_the_engine_s_own(tmp_path: pathlib.Path) -> None:
    f = Fleet(tmp_path, plain=False)
    try:
        which = [3, 4, 7, 8, 12, 19, 21]  # 31, 64, 128, 129, 257, 513, 30 tokens; every fourth is a chat
        computed, received = f.computed()
        got = at_once(f.ask, which)
        f.settled()
        more, arrived = f.computed()
        assert more - computed <= len(which), "the decoder computes at most the last token of each prompt"
        assert arrived - received > 1000
        want = at_once(lambda i: answer(f.prefillers[0].port, f.prompts[i]), which)  # without kv_transfer_params: plain vLLM
        assert got == want
    finally:
        f.close()

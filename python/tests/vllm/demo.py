"""`make demo-vllm`: a prefill and a decode server of real vLLM, each beside its agent, and Berth's proxy; a few real questions, and where
their KV cache went."""

from __future__ import annotations

import pathlib
import shutil
import sys
import tempfile
import time

from fleet import NAME, VLLM, Agent, events, free_port, proxy, stop, until

QUESTIONS = [
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Here is a list: apples, pears, plums, cherries. " * 40 + "What kind of things are in the list? Answer in one sentence.",
]


def main() -> int:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="berth-demo-"))
    processes = []
    failed = True
    try:
        notify = free_port()
        sender = Agent("sender", folder, "sender", "bfloat16", 16, notify)
        processes.append(sender)
        receiver = Agent("receiver", folder, "receiver", "bfloat16", 20)
        processes.append(receiver)
        print("starting two vLLM servers with SmolLM2-135M-Instruct on this machine's CPU; this takes a minute or two", flush=True)
        prefill = VLLM("prefill", folder, "bfloat16", role="kv_producer", agent=sender, core=0)
        processes.append(prefill)
        decode = VLLM("decode", folder, "bfloat16", role="kv_consumer", agent=receiver, core=1)
        processes.append(decode)
        prefill.ready()
        decode.ready()
        front, port = proxy(folder, [prefill], [(decode, receiver)], notify)
        processes.append(front)
        print(f"\n  you ─► proxy :{port} ─► prefill vLLM :{prefill.port} ─► its agent ═ KV ═► agent ─► decode vLLM :{decode.port}\n", flush=True)
        for question in QUESTIONS:
            print(f"> {question if len(question) < 200 else question[:60] + ' ... ' + question[-60:]}", flush=True)
            before = {s: decode.counter("prompt_tokens_by_source_total", source=s) for s in ("local_compute", "local_cache_hit", "external_kv_transfer")}
            body = {"model": NAME, "messages": [{"role": "user", "content": question}], "max_tokens": 80, "temperature": 0}
            began, first = time.monotonic(), 0.0
            print("  ", end="")
            for event in events(port, "/v1/chat/completions", body):
                for choice in event["choices"]:
                    if text := choice.get("delta", {}).get("content"):
                        first = first or time.monotonic() - began
                        print(text.replace("\n", "\n  "), end="", flush=True)
            until(receiver.empty, "every slot is free again", 30)
            moved = {s: int(decode.counter("prompt_tokens_by_source_total", source=s) - n) for s, n in before.items()}
            print(f"\n  [first token after {first:.2f} s; of {sum(moved.values())} tokens the decode server received the KV of {moved['external_kv_transfer']}"
                  f" through Berth, had {moved['local_cache_hit']}, computed {moved['local_compute']}]\n", flush=True)  # fmt: skip
            if not moved["external_kv_transfer"] + moved["local_cache_hit"]:
                raise RuntimeError("no KV travelled")
        failed = False
        print("every slot of both agents is free again")
    finally:
        for p in reversed(processes):
            if failed and not p.alive():
                print(f"{p.name} has ended:\n{p.tail(20)}", file=sys.stderr)
        stop(processes)
        if failed:
            print(f"logs: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

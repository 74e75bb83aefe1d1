"""Converts a model to an Orbax directory that jpaged restores without conversion.

Example: `python scripts/convert_checkpoint.py --model smollm2-135m-instruct --output smollm2`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jpaged.config import DTYPES
from jpaged.weights import load_model, orbax


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", required=True, help="a directory, a .gguf file, a short name, or owner/name"
    )
    parser.add_argument("--output", required=True, type=Path, help="directory to write: empty or absent")
    parser.add_argument("--dtype", choices=DTYPES, help="of the parameters (default: the checkpoint's)")
    args = parser.parse_args(argv)
    try:
        model = load_model(args.model, args.dtype)
        orbax.save(args.output, model.config, model.params, model.tokenizer)
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.output} ({model.config.architecture}, {model.config.dtype})")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The planner's command prints the library's numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from jpaged.memory_plan import plan_memory
from jpaged.presets import PRESETS, preset

SCRIPT = Path(__file__).parents[1] / "scripts" / "plan_memory.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


def test_json_of_a_config_file_has_the_numbers_of_its_preset(tmp_path):
    config = PRESETS["qwen2.5-7b"] | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--gpu", str(80 << 30), "--weights", "int4", "--kv", "fp8", "--context", "4096", "--json"]
    record = json.loads(run("--model", str(tmp_path), *options).stdout)
    plan = plan_memory(preset("qwen2.5-7b"), 80 << 30, weights="int4", kv="fp8_e4m3", context=4096)
    names = ("weight_bytes", "kv_bytes_per_token", "kv_bytes_per_block", "kv_tokens", "max_sequences")
    for name in (*names, "contiguous_max_sequences"):
        assert record[name] == getattr(plan, name)


def test_a_model_that_does_not_fit_ends_with_an_error():
    done = run("--model", "llama2-7b", "--gpu", str(8 << 30))
    assert done.returncode == 2
    assert "leaves no room" in done.stderr

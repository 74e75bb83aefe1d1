"""The dtype on a CPU follows its instructions."""

from __future__ import annotations

import pytest

from jpaged.llm import cpu_dtype


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("avx2 fma", "float32"),
        ("avx2 avx512f avx512_bf16", "bfloat16"),
        ("amx_tile amx_bf16", "bfloat16"),
        ("", "float32"),
    ],
)
def test_bfloat16_needs_instructions_for_it(tmp_path, flags, dtype):
    (tmp_path / "cpuinfo").write_text(f"model name : some\nflags : fpu sse {flags}\n")
    assert cpu_dtype(str(tmp_path / "cpuinfo")) == dtype


def test_a_machine_that_tells_nothing_gets_float32(tmp_path):
    assert cpu_dtype(str(tmp_path / "nothing")) == "float32"

"""The count of bytes follows the kernel's own loads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from attention import counted_bytes


@pytest.mark.parametrize(("context", "window", "blocks"), [(48, None, 3), (40, None, 3), (100, 32, 3)])
def test_decode_asks_for_whole_blocks_of_what_it_sees(context, window, blocks):
    assert counted_bytes(context, width=16, window=window) == 2 * 16 * blocks * 64 * 4

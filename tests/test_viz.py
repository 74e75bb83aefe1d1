"""Drawing snapshots."""

from __future__ import annotations

import pytest
from fake import fake_engine

from jpaged import SamplingParams, viz


@pytest.fixture(scope="module", params=["radix", "hash"])
def snapshots(request):
    engine = fake_engine(prefix_cache=request.param, num_kv_blocks=20)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for seed in range(3):
        engine.add_request([*range(3, 40), 50 + seed], params, request_id=f"r{seed}")
    taken = []
    while engine.has_unfinished():
        engine.step()
        taken.append(engine.snapshot())
    return taken


def test_a_snapshot_names_the_owners_of_every_block(snapshots):
    shared = next(s for s in snapshots if any(owners and len(owners) > 1 for owners in s["blocks"]))
    first, second = shared["blocks"][0], shared["blocks"][1]
    assert set(first) == set(second) and len(first) > 1 and set(first) <= {"r0", "r1", "r2"}
    assert len(shared["blocks"]) == 20
    last = snapshots[-1]["blocks"]
    # 57 stored tokens each: two blocks are common to all three, the third is full and differs.
    assert sum(owners == [] for owners in last) == 5 and sum(owners is None for owners in last) == 15


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_pictures_are_written_in_the_format_of_the_ending(snapshots, tmp_path, ending, magic):
    viz.draw_blocks(snapshots, tmp_path / f"blocks.{ending}")
    viz.draw_tree(snapshots[len(snapshots) // 2], tmp_path / f"tree.{ending}")
    for name in ("blocks", "tree"):
        content = (tmp_path / f"{name}.{ending}").read_bytes()
        assert content.startswith(magic) and len(content) > 5000


def test_the_svg_says_who_owned_blocks(snapshots, tmp_path):
    viz.draw_blocks(snapshots, tmp_path / "blocks.svg")
    text = (tmp_path / "blocks.svg").read_text()
    assert all(f"<!-- {name} -->" in text for name in ("r0", "r1", "r2", "shared", "free"))


def test_no_snapshots_are_refused(tmp_path):
    with pytest.raises(ValueError, match="snapshots is empty"):
        viz.draw_blocks([], tmp_path / "nothing.png")

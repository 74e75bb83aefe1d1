"""Imports point downwards only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the bottom up; a module may import what stands on a lower line, or in its own package.
LAYERS = [
    {"config"},
    {"sampling_params", "presets", "gpu_compile"},
    {"request", "pallas"},
    {"scheduling", "detokenizer"},
    {"batch", "kv_cache"},
    {"ops"},
    {"models"},
    {"weights", "engine.steps", "engine.metrics", "engine.sizing", "memory_plan"},
    {"engine.packing"},
    {"engine.runner"},
    {"engine.outputs"},
    {"engine.engine"},
    {"beam_search"},
    {"llm"},
    {"offline", "viz"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
HOST_ONLY = {"scheduling", "request", "sampling_params", "config", "presets", "detokenizer", "viz"}
DEVICE_PACKAGES = {"jax", "jaxlib", "flax", "numpy", "torch"}


def layer_of(module: str) -> str:
    """`jpaged.engine.runner` -> `engine.runner`; `jpaged.ops.layers` -> `ops`."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts[0] == "engine" and len(parts) > 1 else parts[0]


def imports(source: str) -> set[str]:
    """Modules imported when the source is loaded or run, type checking aside."""
    found = set()
    tree = ast.parse(source)
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            packages = ("jpaged", "jpaged.engine")  # whose members are layers of their own
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if node.module in packages else {str(node.module)}
    return found


def faults(module: str, source: str) -> list[str]:
    own = layer_of(module)
    found = []
    for name in imports(source):
        if name.startswith("jpaged"):
            other = layer_of(name)
            if other != own and LEVEL.get(other, len(LAYERS)) >= LEVEL[own]:
                found.append(f"{module} imports {name}, which is not below it")
        elif own in HOST_ONLY and name.split(".")[0] in DEVICE_PACKAGES:
            found.append(f"{module} imports {name}, but runs on the host only")
    return found


def modules() -> list[str]:
    paths = (ROOT / "jpaged").rglob("*.py")
    return sorted(".".join(p.relative_to(ROOT).with_suffix("").parts) for p in paths)


@pytest.mark.parametrize(
    "module", [m for m in modules() if m not in ("jpaged.__init__", "jpaged.engine.__init__")]
)
def test_a_module_imports_only_what_is_below_it(module):
    source = (ROOT / (module.replace(".", "/") + ".py")).read_text()
    assert faults(module.removesuffix(".__init__"), source) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jpaged.scheduling.scheduler", "import jax"),
        ("jpaged.scheduling.block_pool", "from numpy import array"),
        ("jpaged.scheduling.kv_manager", "def f():\n    from jax import numpy"),
        ("jpaged.ops.layers", "from jpaged.models import transformer"),
        ("jpaged.engine.packing", "from jpaged.engine.runner import ModelRunner"),
        ("jpaged.engine.steps", "from jpaged.engine import packing\nimport jpaged.engine.packing"),
        ("jpaged.config", "from jpaged.request import Request"),
        ("jpaged.batch", "from jpaged import LLM\nfrom jpaged.llm import LLM"),
    ],
)
def test_an_upward_import_is_found(module, source):
    assert faults(module, source)


def test_scripts_and_benchmarks_import_public_names_and_the_parts_they_measure():
    allowed = {
        "jpaged.Engine", "jpaged.LLM", "jpaged.SamplingParams", "jpaged.llm", "jpaged.offline",
        "jpaged.weights", "jpaged.config", "jpaged.gpu_compile", "jpaged.memory_plan", "jpaged.presets",
        "jpaged.engine.metrics", "jpaged.ops.sampling", "jpaged.request", "jpaged.sampling_params",
        "jpaged.scheduling.block_pool", "jpaged.scheduling.kv_manager", "jpaged.scheduling.radix_cache",
        "jpaged.scheduling.scheduler", "jpaged.viz",
    }  # fmt: skip
    inside = {  # for those that compile or time steps and kernels themselves
        "jpaged.batch", "jpaged.engine.packing", "jpaged.engine.runner", "jpaged.engine.sizing",
        "jpaged.engine.steps", "jpaged.gpu_compile", "jpaged.kv_cache", "jpaged.models.transformer",
        "jpaged.ops", "jpaged.ops.attention", "jpaged.ops.quantized", "jpaged.pallas",
        "jpaged.pallas.add_norm", "jpaged.pallas.common", "jpaged.pallas.decode", "jpaged.pallas.prefill",
        "jpaged.pallas.quantized_matmul", "jpaged.pallas.write", "jpaged.presets",
    }  # fmt: skip
    for folder in ("scripts", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            used = {name for name in imports(path.read_text()) if name.startswith("jpaged")}
            extra = {n for n in used if n not in allowed and not n.startswith("jpaged.weights")}
            measured = ("compile_check.py", "quant_report.py", "gpu_suite.py", "attention.py", "scheduler.py")
            measures = path.name in measured
            extra -= inside if measures else set()
            assert not extra, f"{path.name} imports {extra}"

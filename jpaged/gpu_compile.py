"""Compiles for a GPU that this machine need not have, and reads what the compiler wrote.

jax's CUDA plugin compiles for a described GPU: kernels become PTX, a program becomes a list of
launches, and its memory is known. Nothing runs and nothing is tuned. A process that compiles must have
been started with `ENVIRONMENT`, and must compute nothing: one that ran something on the CPU before may
abort.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.metadata
import math
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

BULK_BYTES = 16  # a bulk copy counts as this: its size is a multiple


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU as XLA describes one; sizes in bytes."""

    name: str
    compute_capability: tuple[int, int]
    cores: int
    lanes: int  # float32 units per core
    threads: int  # per core
    shared_per_block: int
    shared_per_core: int
    memory: int
    bandwidth: int  # bytes/s
    l2: int
    clock_ghz: float

    @property
    def capability(self) -> int:
        """10 * major + minor."""
        major, minor = self.compute_capability
        return 10 * major + minor

    @property
    def description(self) -> str:
        """The text form of XLA's `GpuTargetConfigProto`."""
        major, minor = self.compute_capability
        accelerated = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {self.threads}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.shared_per_block}
  shared_memory_per_core: {self.shared_per_core} core_count: {self.cores} fpus_per_core: {self.lanes}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2} clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{self.name}"
"""


# From the vendor's datasheets and XLA's own descriptions (xla/backends/gpu/target_config/specs).
# fmt: off
TARGETS = {
    "a100": Target("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 166912, 167936, 85100068864,
                   2039040000000, 41943040, 1.41),
    "rtx4090": Target("NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 1536, 101376, 102400, 25757220864,
                      1008000000000, 75497472, 2.52),
    "h100": Target("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 232448, 233472, 84942979072,
                   3352320000000, 52428800, 1.98),
    "h200": Target("NVIDIA H200", (9, 0), 132, 128, 2048, 232448, 233472, 150754820096,
                   4800000000000, 62914560, 1.98),
    "b200": Target("NVIDIA B200", (10, 0), 148, 128, 2048, 232448, 233472, 191514411008,
                   7672320000000, 132644864, 1.965),
}
# fmt: on

# -- compiling --------------------------------------------------------------------------------


def check_plugin() -> None:
    """Raises `RuntimeError` unless there is a CUDA plugin of jax's own version."""
    for name in ("jax-cuda12-plugin", "jax-cuda13-plugin"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            if version != jax.__version__:
                raise RuntimeError(
                    f"{name} is {version} and jax is {jax.__version__}; they must be equal: "
                    f'pip install "{name}=={jax.__version__}"'
                )
            return
    raise RuntimeError(
        f"there is no CUDA plugin beside jax {jax.__version__}: "
        f'pip install "jpaged[gpu-compile]" "jax=={jax.__version__}"'
    )


# Environment variables that a process must have that imports jax to compile.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


def dump_flags(dump: Path) -> str:
    """The value of `XLA_FLAGS`, to be set before the first `Compiler`, that writes to folder `dump`."""
    # "ptx" limits what jax 0.11 and later write; 0.10 writes PTX in any case.
    return f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_emitter_re=ptx"


class Compiler:
    """Compiles one function for `target`; `dump` is the folder of `dump_flags`."""

    def __init__(self, target: Target, dump: Path):
        self.target = target
        self._dump = dump
        topology = topologies.get_topology_desc(
            topology_name="gpu", platform="cuda", target_config=target.description, topology="1x1x1"
        )
        mesh = topologies.make_mesh(topology, (1,), ("d",))
        self._context: Any = contextlib.nullcontext()
        if hasattr(jax.sharding, "AbstractDevice"):  # from jax 0.11 on a lowering asks the mesh for the GPU
            mesh = Mesh(mesh.devices, ("d",), axis_types=(AxisType.Explicit,))
            self._context = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
        self._sharding = NamedSharding(mesh, PartitionSpec())

    def array(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """An array on the GPU, as an argument of `compile`."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

    def compile(self, function: Any, *arguments: Any, **options: Any) -> Any:
        """Compiles a jitted function for abstract arguments."""
        with self._context:
            return function.trace(*arguments, **options).lower(lowering_platforms=("cuda",)).compile()

    @property
    def thunks(self) -> str:
        """The list of launches."""
        return next(self._dump.glob("*.thunk_sequence.txt")).read_text()

    def kernels(self, pools: dict[str, set[int]]) -> dict[str, dict[str, Any]]:
        """What the Pallas kernels of the program use and do: registers, bytes, and see `ptx_kernels`.

        Args:
          pools: see `pool_operands`.
        """
        found, shared = {}, shared_bytes(self.thunks)
        for path in sorted(self._dump.glob("*.ptx")):
            used = ptx_kernels(path.read_text(), pools)
            usage = ptxas_usage(_assemble(path)) if used else {}
            for name, record in used.items():
                registers, spilled = usage[name]
                own = {"registers": registers, "spill_bytes": spilled, "shared_bytes": shared[name]}
                found[name] = own | record
        return found


def _assemble(path: Path) -> str:
    """What `ptxas -v` says of a PTX file: that of the installed package, or the one on the path."""
    bundled = sorted(Path(jax.__file__).parents[1].glob("nvidia/**/bin/ptxas"))
    arch = re.search(r"\.target\s+(\w+)", path.read_text())
    assert arch is not None, f"{path} has no target"
    command = [str(bundled[0]) if bundled else "ptxas", "-v", f"-arch={arch[1]}", str(path), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas: {done.stderr.strip()[-500:]}")
    return done.stderr


# -- kernels ----------------------------------------------------------------------------------


def ptxas_usage(text: str) -> dict[str, tuple[int, int]]:
    """`ptxas -v` -> by kernel, registers and bytes of spill stores and loads."""
    found = {}
    for part in text.split("Compiling entry function '")[1:]:
        registers, spills = re.search(r"Used (\d+) registers", part), re.findall(r"(\d+) bytes spill", part)
        assert registers is not None, part
        found[part.partition("'")[0]] = (int(registers[1]), sum(map(int, spills)))
    return found


def shared_bytes(thunks: str) -> dict[str, int]:
    """Bytes of shared memory by kernel, from a list of launches."""
    lines = re.findall(r"(\S+) grid: .*shared_memory: (\d+) bytes", thunks)
    return {name: int(size) for name, size in lines}


def pool_operands(program: str, entries: set[int]) -> dict[str, set[int]]:
    """Pallas kernels of a program: name -> which operands are pools: arrays of as many entries."""
    found = {}
    for line in re.findall(r'^.*custom_call_target="__gpu\$xla\.gpu\.triton".*$', program, re.M):
        name = re.search(r'[{ ]name = "([^"]+)"', line)
        assert name is not None, line[:200]
        label = "operand_layout_constraints="
        operands = _arrays(_enclosed(line, line.index(label) + len(label)))
        found[name[1]] = {i for i, (size, _) in enumerate(operands) if size in entries}
    return found


def ptx_kernels(text: str, pools: dict[str, set[int]]) -> dict[str, dict[str, Any]]:
    """What the kernels named in `pools` do.

    Returns:
      By name: `loads` from pools, number of instructions by bytes a thread; kinds of tensor-core
      instructions, and whether one of them is tf32.
    """
    found = {}
    for part in text.split(".entry ")[1:]:
        name = part.partition("(")[0].strip()
        if name in pools:
            widths = collections.Counter(n for origin, n in global_loads(part) if origin & pools[name])
            mma = tensor_core_products(part)
            tf32 = any("tf32" in product for product in mma)
            found[name] = {"loads": dict(sorted(widths.items())), "mma": mma, "tf32": tf32}
    return found


def tensor_core_products(ptx: str) -> list[str]:
    """Kinds of tensor-core instructions, such as `wgmma m64n64k16 bf16`."""
    found = set()
    for kind, rest in re.findall(r"\b(wgmma|mma|tcgen05)\.(?:mma_async|mma|sync)\.([\w.:]+)", ptx):
        shape = re.search(r"m\d+n\d+k\d+", rest)
        # Types are listed as those of the result, A, B; tcgen05 names a kind instead.
        dtypes = re.findall(r"\b(?:tf32|bf16|f16|f32|f64|e4m3|e5m2|s8|u8|s32)\b", rest)
        operand = re.findall(r"kind::(\w+)", rest) or dtypes[1:2]
        found.add(" ".join([kind, *([shape[0]] if shape else []), *operand]))
    return sorted(found)


def global_loads(ptx: str) -> list[tuple[set[int], int]]:
    """Loads from global memory: the kernel's parameters that the address comes from, and bytes a thread.

    Values are followed through registers, not through memory: the address of a block comes from the
    pool, not from the table that its id was read from.
    """
    origin: dict[str, set[int]] = collections.defaultdict(set)
    moves: list[tuple[list[str], list[str]]] = []
    loads: list[tuple[list[str], int]] = []
    for statement in re.split(r"[;\n]", ptx):
        match = re.match(r"\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(.+)", statement)
        if match is None:
            continue
        opcode, operands = match.groups()
        head = re.match(r"\{[^}]*\}|%\w+(?:\|%\w+)?", operands)  # what is written
        written = re.findall(r"%\w+", head[0]) if head else []
        used = re.findall(r"%\w+|\w+_param_\d+", operands[head.end() if head else 0 :])
        for name in used:
            if not name.startswith("%"):
                origin[name] = {int(name.rpartition("_")[2])}
        if opcode.startswith("cp.async.bulk") and ".global" in opcode:
            loads.append((used, BULK_BYTES))
        elif opcode.startswith(("cp.async.ca", "cp.async.cg")):
            address, size = operands.split(",")[1:3]
            loads.append((re.findall(r"%\w+", address), int(size, 0)))
        elif opcode.startswith("ld.") and ".global" in opcode:
            width = re.search(r"(?:\.v(\d))?\.[busf](\d+)$", opcode)
            assert width is not None, statement
            loads.append((used, int(width[1] or 1) * int(width[2]) // 8))
        elif opcode.startswith("ld.param") or not opcode.startswith("ld."):
            moves.append((written, used))
    changed = True
    while changed:
        changed = False
        for written, used in moves:
            new = set().union(*(origin[name] for name in used))
            for name in written:
                changed |= not new <= origin[name]
                origin[name] |= new
    return [(set().union(*(origin[name] for name in used)), size) for used, size in loads]


# -- programs ---------------------------------------------------------------------------------

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_RENAMING = {"parameter", "bitcast", "tuple", "get-tuple-element", "optimization-barrier"}
_RENAMING |= {"while", "conditional", "call"}
_CONTROL = {"kWhile", "kConditional", "kCommandBuffer", "kSequential", "kDynamicSliceFusion"}


def count_launches(thunks: str) -> int:
    """Kernels, copies and library calls of a list of launches; the body of a loop counts once."""
    return sum(kind not in _CONTROL for kind in re.findall(r"^\s*\d+: (k\w+)", thunks, re.M))


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An argument of a program; `label` is its path, such as `params.layers[0].wo`."""

    label: str
    rank: int
    entries: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch of a program.

    Attributes:
      name: of the Pallas kernel, or of the instruction.
      arguments: labels of the program's arguments that it reads or updates.
      bytes: that it reads and writes, as often as it is known to run.
    """

    name: str
    arguments: tuple[str, ...]
    bytes: int


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    arguments: str  # with their brackets
    attributes: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.arguments)

    def called(self, *attributes: str) -> list[str]:
        """Computations that attributes name, as `body=%x` or `branch_computations={%x, %y}`."""
        found = re.findall(rf"\b(?:{'|'.join(attributes)})=(\{{[^}}]*\}}|%[\w.-]+)", self.attributes)
        return re.findall(r"%([\w.-]+)", " ".join(found))


class Program:
    """An optimized HLO program, to be asked what it launches, moves and copies."""

    def __init__(self, text: str):
        self._computations: dict[str, list[_Instruction]] = {}
        body: list[_Instruction] = []
        for line in text.splitlines():
            header = re.match(r"(ENTRY )?%([\w.-]+) \(.*\{$", line)
            instruction = re.match(r"\s+(?:ROOT )?%([\w.-]+) = (.*)", line)
            if header:
                body = self._computations[header[2]] = []
                self._entry = header[2]  # the entry comes last
            elif instruction:
                body.append(_parse(*instruction.groups()))

    def parameters(self) -> list[Parameter]:
        """Arguments of the program in order, those that it does not use left out."""
        found = {}
        for instruction in self._computations[self._entry]:
            if instruction.opcode == "parameter":
                label = re.search(r'op_name="([^"]*)"', instruction.attributes)
                [(entries, size)] = _arrays(instruction.type)
                rank = instruction.type.partition("]")[0].count(",") + 1
                number = int(instruction.arguments[1:-1])
                found[number] = Parameter(label[1] if label else "", rank, entries, size)
        return [found[number] for number in sorted(found)]

    def written(self) -> list[tuple[str, str, int, int]]:
        """(instruction, dtype, entries, bytes) of every array that is computed or copied, once where it is.

        What a fusion keeps to itself is not written, and what only renames arrays writes none.
        """
        fused = {name for body in self._computations.values() for i in body for name in i.called("calls")}
        return [
            (instruction.name, dtype, *_size(dtype, dims))
            for name, body in self._computations.items()
            if name not in fused
            for instruction in body
            if instruction.opcode not in _RENAMING and not instruction.opcode.endswith("-start")
            for dtype, dims in _ARRAY.findall(instruction.type)
        ]

    def launches(self, kernels: Mapping[str, Callable[[list[int], list[int]], int]]) -> list[Launch]:
        """Every launch in order, the bodies of loops and all branches once, and what it moves.

        That is what it reads of its operands and what it writes, in bytes: of a table, the rows that are
        gathered; of an array that is updated in place, the updates.

        Args:
          kernels: bytes of those Pallas kernels that move less than all operands and results, by name:
            from the bytes of each operand and of each result.
        """
        found: list[Launch] = []
        self._launches(self._entry, 1, kernels, found)
        return found

    def _launches(
        self, computation: str, times: int, kernels: Mapping[str, Any], found: list[Launch]
    ) -> None:
        body = {instruction.name: instruction for instruction in self._computations[computation]}

        def label(name: str) -> str | None:
            """Of the program's argument that a value is."""
            source = body[name]
            while source.opcode in ("bitcast", "get-tuple-element") or source.opcode.endswith("-done"):
                source = body[source.operands[0]]
            if source.opcode != "parameter" or computation != self._entry:
                return None
            match = re.search(r'op_name="([^"]*)"', source.attributes)
            return match[1] if match else None

        for instruction in body.values():
            opcode = instruction.opcode
            if opcode in ("while", "call", "conditional"):
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
                attributes = ("condition", "body", "to_apply", "branch_computations")
                for name in instruction.called(*attributes, "true_computation", "false_computation"):
                    self._launches(name, times * int(trips[1]) if trips else times, kernels, found)
            elif opcode not in _RENAMING | {"constant"} and not opcode.endswith("-done"):
                name = instruction.name
                kernel = re.search(r'[{ ]name = "([^"]+)"', instruction.attributes)
                if opcode == "custom-call" and kernel:
                    name = re.sub(r"__\d+$", "", kernel[1])
                if opcode == "custom-call" and name in kernels:
                    operands = [size for x in instruction.operands for _, size in _arrays(body[x].type)]
                    moved = kernels[name](operands, [size for _, size in _arrays(instruction.type)])
                else:
                    moved = self._written_by(instruction, body) + sum(
                        self._read_of(instruction, position, sum(size for _, size in _arrays(body[x].type)))
                        for position, x in enumerate(instruction.operands)
                    )
                labels = filter(None, map(label, instruction.operands))
                found.append(Launch(name, tuple(labels), moved * times))

    def _read_of(self, instruction: _Instruction, position: int, size: int) -> int:
        """Bytes that an instruction reads of an operand of `size` bytes."""
        opcode = instruction.opcode
        if position == 0 and opcode in ("gather", "dynamic-slice", "slice"):
            return sum(own for _, own in _arrays(instruction.type))
        if position == 0 and opcode in ("scatter", "dynamic-update-slice"):
            return 0
        called = instruction.called("calls")
        if not called:
            return size
        body = self._computations[called[0]]
        [name] = [x.name for x in body if x.opcode == "parameter" and x.arguments == f"({position})"]
        names, read = {name}, 0
        for user in body:
            for place, operand in enumerate(user.operands):
                if operand in names and user.opcode == "bitcast" and user is not body[-1]:
                    names.add(user.name)
                elif operand in names:
                    read += self._read_of(user, place, size)
        return min(read, size)

    def _written_by(self, instruction: _Instruction, body: Mapping[str, _Instruction]) -> int:
        """Bytes that an instruction of a computation writes."""
        called = instruction.called("calls")
        if called and not instruction.opcode.endswith("-start"):
            inner = {x.name: x for x in self._computations[called[0]]}
            return self._written_by(self._computations[called[0]][-1], inner)
        if instruction.opcode == "tuple":
            return sum(self._written_by(body[name], body) for name in instruction.operands)
        if instruction.opcode == "bitcast":
            return self._written_by(body[instruction.operands[0]], body)
        if instruction.opcode in ("scatter", "dynamic-update-slice"):
            update = body[instruction.operands[2 if instruction.opcode == "scatter" else 1]]
            return sum(size for _, size in _arrays(update.type))
        return sum(size for _, size in _results(instruction))

    def copies(self, prefixes: tuple[str, ...], but: tuple[str, ...] = ()) -> list[tuple[str, int]]:
        """(what, bytes written) of every copy of half or more of a matrix or pool.

        Products read a weight and write something else; updates, and kernels with aliased outputs,
        write in place. Whatever else writes at least half as many entries as an argument has that it
        reads is a copy, a conversion or a transposition. A loop counts as often as it is known to run.

        Args:
          prefixes: of the labels of the arguments that count.
          but: prefixes of those among them that do not.
        """

        def counts(p: Parameter) -> bool:
            return p.rank > 1 and p.label.startswith(prefixes) and not p.label.startswith(but)

        followed = [p if counts(p) else None for p in self.parameters()]
        found: list[tuple[str, int]] = []
        self._follow(self._entry, followed, 1, found)
        return found

    def _follow(
        self, computation: str, arguments: list[Any], times: int, found: list[tuple[str, int]]
    ) -> Any:
        """Notes the copies of a computation that runs `times` times.

        Values are told apart by the argument of the program that they are: a `Parameter`, a list of
        such for a tuple, `None` for all else. Returns that of the result.
        """
        known: dict[str, Any] = {}
        result = None
        for instruction in self._computations[computation]:
            operands = [known.get(name) for name in instruction.operands]
            if instruction.opcode == "parameter":
                result = arguments[int(instruction.arguments[1:-1])]
            else:
                result = self._value(instruction, operands, times, found)
            known[instruction.name] = result
        return result

    def _value(
        self, instruction: _Instruction, operands: list[Any], times: int, found: list[tuple[str, int]]
    ) -> Any:
        opcode, attributes = instruction.opcode, instruction.attributes
        if opcode in ("bitcast", "optimization-barrier") or opcode.endswith("-done"):
            return operands[0]
        if opcode == "tuple":
            return operands
        if opcode == "get-tuple-element":
            index = re.search(r"index=(\d+)", attributes)
            return operands[0][int(index[1])] if index and operands[0] is not None else None
        if opcode == "while":
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', attributes)
            body_times = times * int(trips[1]) if trips else times
            self._follow(instruction.called("body")[0], operands, body_times, found)
            return operands[0]
        if opcode == "call":
            return self._follow(instruction.called("to_apply")[0], operands, times, found)
        if opcode == "conditional":
            branches = instruction.called("branch_computations", "true_computation", "false_computation")
            for branch, operand in zip(branches, operands[1:], strict=True):
                self._follow(branch, [operand], times, found)
            return None
        if opcode == "custom-call":
            outputs: list[Any] = [None] * len(_arrays(instruction.type))
            aliases = attributes.partition("metadata=")[0]
            for output, operand in re.findall(r"\{(\d*)\}: \((\d+), \{\}\)", aliases):
                outputs[int(output or 0)] = operands[int(operand)]
            return outputs if instruction.type.startswith("(") else outputs[0]
        inner = self._opcodes(instruction)
        read = [operand for operand in operands if isinstance(operand, Parameter)]
        if not read or inner & {"dot", "convolution"}:
            return None
        if inner & {"scatter", "dynamic-update-slice"}:
            return read[0]
        written = _results(instruction)
        entries, size = sum(e for e, _ in written) * times, sum(s for _, s in written) * times
        found += [(f"{p.label} in {instruction.name}", size) for p in read if 2 * entries >= p.entries]
        return None

    def _opcodes(self, instruction: _Instruction) -> set[str]:
        """Of an instruction and what is fused into it."""
        found = {instruction.opcode}
        for name in instruction.called("calls"):
            found = found.union(*map(self._opcodes, self._computations[name]))
        return found


def _parse(name: str, text: str) -> _Instruction:
    kind = _enclosed(text, 0) if text.startswith("(") else text.partition(" ")[0]
    opcode = text[len(kind) + 1 :].partition("(")[0]
    start = len(kind) + 1 + len(opcode)
    arguments = _enclosed(text, start)
    return _Instruction(name, kind, opcode, arguments, text[start + len(arguments) :])


def _enclosed(text: str, start: int) -> str:
    """From the bracket at `start` to the one that closes it."""
    depth = 0
    for bracket in re.compile(r"[(){}]").finditer(text, start):
        depth += 1 if bracket[0] in "({" else -1
        if depth == 0:
            return text[start : bracket.end()]
    raise ValueError(f"unbalanced: {text[start : start + 100]}")


def _results(instruction: _Instruction) -> list[tuple[int, int]]:
    """(entries, bytes) of each array that an instruction computes, or begins to."""
    arrays = _arrays(instruction.type)
    if instruction.opcode == "copy-start":
        return arrays[:1]  # of target, source, context
    if instruction.opcode.endswith("-start"):
        operand_count = len(_arrays(_enclosed(instruction.type, 1)))
        return [x for x in arrays[operand_count:] if x[0] > 1]  # not the context, a scalar
    return arrays


def _arrays(kind: str) -> list[tuple[int, int]]:
    """(entries, bytes) of each array of an HLO type: `bf16[4,8]{1,0}`, or a tuple of such."""
    return [_size(dtype, dims) for dtype, dims in _ARRAY.findall(kind)]


def _size(dtype: str, dims: str) -> tuple[int, int]:
    """(entries, bytes) of `bf16`, `4,8`."""
    entries = math.prod(int(dim) for dim in dims.split(",") if dim)
    bits = re.search(r"\d+", dtype)  # bf16, s8, f8e4m3fn; pred has none
    return entries, entries * (int(bits[0]) if bits else 8) // 8

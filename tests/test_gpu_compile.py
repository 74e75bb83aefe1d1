"""Readers of what the compiler writes, on short texts as it writes them."""

from __future__ import annotations

import pytest

from jpaged import gpu_compile
from jpaged.gpu_compile import (
    TARGETS,
    Program,
    check_plugin,
    count_launches,
    global_loads,
    pool_operands,
    ptx_kernels,
    ptxas_usage,
    shared_bytes,
    tensor_core_products,
)

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'paged_decode' for 'sm_90a'
ptxas info    : Function properties for paged_decode
    160 bytes stack frame, 100 bytes spill stores, 60 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 160 bytes cumulative stack size
ptxas info    : Compiling entry function 'paged_decode_merge' for 'sm_90a'
ptxas info    : Function properties for paged_decode_merge
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""

THUNKS = """\
001: kCustomKernel [source       | next=002 (1)] fusion_1 grid: [128, 1, 1] threads: [256, 1, 1]  shared_memory: 64 bytes
002: kCustomKernel [prev=001 (1) | next=003 (1)] paged_decode grid: [8, 2, 1] threads: [128, 1, 1]  shared_memory: 38928 bytes
003: kCopy         kCopy
010: kConditional
  false_branch:
    No thunks.  true_branch:
    004: kWhile
condition:
        005: kCustomKernel [source | sink] less grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
      body:
        006: kGemm [source | sink] dot
"""  # noqa: E501


def test_ptxas_tells_registers_and_spilled_bytes_of_each_kernel():
    assert ptxas_usage(PTXAS) == {"paged_decode": (255, 160), "paged_decode_merge": (32, 0)}


def test_launches_are_counted_inside_loops_and_branches_but_these_are_none():
    assert count_launches(THUNKS) == 5


def test_shared_memory_is_read_by_kernel():
    assert shared_bytes(THUNKS) == {"fusion_1": 64, "paged_decode": 38928, "less": 0}


# The first operand is q; K is parameter 1 and V parameter 2; 3 is the table, whose entries say where to
# read; in the loop K's address moves through another register.
PTX = """\
.visible .entry other(
	.param .u64 .ptr .align 16 other_param_0
)
{
	ld.param.b64 	%rd1, [other_param_0];
	ld.global.b8 	%rs1, [%rd1];
}
.visible .entry paged_decode(
	.param .u64 .ptr .align 16 paged_decode_param_0,
	.param .u64 .ptr .align 16 paged_decode_param_1
)
{
	.reg .b64 	%rd<20>;
	ld.param.b64 	%rd1, [paged_decode_param_0];
	ld.param.b64 	%rd2, [paged_decode_param_1];
	cvta.to.global.u64 	%rd3, %rd2;
	ld.param.b64 	%rd4, [paged_decode_param_2];
	ld.param.b64 	%rd5, [paged_decode_param_3];
	// begin inline asm
	mov.u32 %r1, 0x0; mov.u32 %r2, 0x0; ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];
	// end inline asm
	ld.global.b32 	%r3, [%rd5+4];
	mul.wide.s32 	%rd6, %r3, 2;
	add.s64 	%rd7, %rd3, %rd6;
$L__BB0_1:
	@%p2 cp.async.cg.shared.global [ %r75 + 0 ], [ %rd9 + 0 ], 0x10, %r76;
	@%p2 cp.async.ca.shared.global [ %r75 + 0 ], [ %rd9 + 64 ], 0x4, %r76;
	mov.b64 	%rd9, %rd8;
	add.s64 	%rd8, %rd7, 128;
	ld.global.L1::evict_last.v4.b32 	{%r10, %r11, %r12, %r13}, [%rd4+16];
	ld.shared.v4.b32 	{%r20, %r21, %r22, %r23}, [%r75];
	cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd4], %r2, [%r3];
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1, %r2 }, { %r3 }, { %r4 }, { %r1, %r2 };
	@%p1 bra 	$L__BB0_1;
	ret;
}
"""


def test_loads_are_told_apart_by_the_parameter_their_address_comes_from():
    body = PTX.split(".entry paged_decode")[1]
    assert global_loads(body) == [({0}, 8), ({3}, 4), ({1}, 16), ({1}, 4), ({2}, 16), ({2}, 16)]


def test_only_the_named_kernels_are_read_and_only_loads_from_pools_count():
    pools = {"paged_decode": {1, 2}, "absent": {0}}
    expected = {"loads": {4: 1, 16: 3}, "mma": ["mma m16n8k16 bf16"], "tf32": False}
    assert ptx_kernels(PTX, pools) == {"paged_decode": expected}


@pytest.mark.parametrize(
    ("ptx", "kinds"),
    [
        (
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd1, %rd2;",
            ["wgmma m64n128k16 bf16"],
        ),
        ("wgmma.fence.sync.aligned;", []),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1};", ["mma m16n8k8 tf32"]),
        ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%r1};", ["mma m16n8k32 e4m3"]),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p1;", ["tcgen05 f16"]),
        ("fma.rn.f32 %f1, %f2, %f3, %f1;", []),
    ],
)
def test_tensor_core_instructions_are_named_by_kind_shape_and_operand(ptx, kinds):
    assert tensor_core_products(ptx) == kinds


KERNEL_CALL = (
    '  %c = f32[64,8]{1,0} custom-call(%q, %k, %v, %t), custom_call_target="__gpu$xla.gpu.triton", '
    "operand_layout_constraints={f32[4,2,8]{2,1,0}, s8[5,2,16,8]{3,2,1,0}, u8[160,8]{1,0}, s32[4,9]{1,0}}, "
    'backend_config={debug = false, ir = "ML\\EFR", name = "paged_decode", num_stages = 3 : i32}\n'
)


def test_the_pools_among_a_kernels_operands_are_found_by_their_size():
    assert pool_operands(KERNEL_CALL, {5 * 2 * 16 * 8}) == {"paged_decode": {1, 2}}


# A step in small: `copies` below tells what each part stands for.
HLO = """\
HloModule jit_step, is_scheduled=true

%fused_dot (a: bf16[8,64], b: bf16[64,64]) -> f32[8,64] {
  %b = bf16[64,64]{1,0} parameter(1)
  %a = bf16[8,64]{1,0} parameter(0)
  ROOT %dot = f32[8,64]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_convert (c: bf16[64,64]) -> f32[64,64] {
  %c = bf16[64,64]{1,0} parameter(0)
  ROOT %convert = f32[64,64]{1,0} convert(%c)
}

%fused_scatter (d: bf16[9,2,16,64], e: bf16[4,2,64]) -> bf16[9,2,16,64] {
  %d = bf16[9,2,16,64]{3,2,1,0} parameter(0)
  %e = bf16[4,2,64]{2,1,0} parameter(1)
  ROOT %scatter = bf16[9,2,16,64]{3,2,1,0} scatter(%d, %e)
}

%fused_slice (f: bf16[4,64,64], g: s32[]) -> bf16[1,64,64] {
  %f = bf16[4,64,64]{2,1,0} parameter(0)
  %g = s32[] parameter(1)
  ROOT %dynamic-slice = bf16[1,64,64]{2,1,0} dynamic-slice(%f, %g, %g, %g), dynamic_slice_sizes={1,64,64}
}

%body (state: (s32[], bf16[4,64,64])) -> (s32[], bf16[4,64,64]) {
  %state = (s32[], bf16[4,64,64]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = bf16[4,64,64]{2,1,0} get-tuple-element(%state), index=1
  %fusion-start = ((bf16[4,64,64]{2,1,0}, s32[]), bf16[1,64,64]{2,1,0}, u32[]) fusion-start(%stack, %i), kind=kLoop, calls=%fused_slice
  %fusion-done = bf16[1,64,64]{2,1,0} fusion-done(%fusion-start)
  ROOT %next = (s32[], bf16[4,64,64]{2,1,0}) tuple(%i, %stack)
}

%true (p: (bf16[9,2,16,64])) -> f32[2] {
  %p = (bf16[9,2,16,64]{3,2,1,0}) parameter(0)
  %pool = bf16[9,2,16,64]{3,2,1,0} get-tuple-element(%p), index=0
  %copy.2 = bf16[9,2,16,64]{1,2,3,0} copy(%pool)
  ROOT %two = f32[2]{0} fusion(%copy.2), kind=kInput, calls=%fused_convert
}

%false (n: ()) -> f32[2] {
  %n = () parameter(0)
  ROOT %none = f32[2]{0} constant({0, 0})
}

ENTRY %main (w.1: bf16[64,64], stack.1: bf16[4,64,64], bias.1: bf16[4096], k.1: bf16[9,2,16,64], v.1: bf16[9,2,16,64], x.1: bf16[8,64], new.1: bf16[4,2,64], yes.1: pred[]) -> bf16[8] {
  %yes.1 = pred[] parameter(7), metadata={op_name="batch.yes"}
  %new.1 = bf16[4,2,64]{2,1,0} parameter(6), metadata={op_name="batch.new"}
  %x.1 = bf16[8,64]{1,0} parameter(5), metadata={op_name="batch.x"}
  %v.1 = bf16[9,2,16,64]{3,2,1,0} parameter(4), metadata={op_name="cache.v[0]"}
  %k.1 = bf16[9,2,16,64]{3,2,1,0} parameter(3), metadata={op_name="cache.k[0]"}
  %bias.1 = bf16[4096]{0} parameter(2), metadata={op_name="params.bias"}
  %stack.1 = bf16[4,64,64]{2,1,0} parameter(1), metadata={op_name="params.stack"}
  %w.1 = bf16[64,64]{1,0} parameter(0), metadata={op_name="params.w"}
  %product = f32[8,64]{1,0} fusion(%x.1, %w.1), kind=kCustom, calls=%fused_dot
  %flat = bf16[4096]{0} bitcast(%w.1)
  %converted = f32[64,64]{1,0} fusion(%flat), kind=kLoop, calls=%fused_convert
  %again = f32[4096]{0} negate(%bias.1)
  %own = bf16[8,64]{1,0} copy(%x.1)
  %scattered = bf16[9,2,16,64]{3,2,1,0} fusion(%k.1, %new.1), kind=kInput, calls=%fused_scatter
  %rows = bf16[288,64]{1,0} bitcast(%scattered)
  %write = (bf16[288,64]{1,0}, bf16[9,2,16,64]{3,2,1,0}) custom-call(%new.1, %rows, %v.1), custom_call_target="__gpu$xla.gpu.triton", output_to_operand_aliasing={{0}: (1, {}), {1}: (2, {})}, metadata={op_name="write"}
  %written = bf16[288,64]{1,0} get-tuple-element(%write), index=0
  %copy-start = (bf16[288,64]{1,0}, bf16[288,64]{1,0}, u32[]) copy-start(%written)
  %copy-done = bf16[288,64]{1,0} copy-done(%copy-start)
  %v.2 = bf16[9,2,16,64]{3,2,1,0} get-tuple-element(%write), index=1
  %some = bf16[2,2,16,64]{3,2,1,0} slice(%v.2), slice={[0:2], [0:2], [0:16], [0:64]}
  %zero = s32[] constant(0)
  %start = (s32[], bf16[4,64,64]{2,1,0}) tuple(%zero, %stack.1)
  %loop = (s32[], bf16[4,64,64]{2,1,0}) while(%start), condition=%less, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %one = (bf16[9,2,16,64]{3,2,1,0}) tuple(%v.2)
  %empty = () tuple()
  %branch = f32[2]{0} conditional(%yes.1, %one, %empty), true_computation=%true, false_computation=%false
  ROOT %result = bf16[8]{0} constant({...})
}
"""  # noqa: E501


def test_a_programs_arguments_have_their_paths_and_sizes():
    found = {p.label: (p.rank, p.entries, p.bytes) for p in Program(HLO).parameters()}
    assert found["params.w"] == (2, 4096, 8192)
    assert found["params.bias"] == (1, 4096, 8192)
    assert found["cache.v[0]"] == (4, 18432, 36864)
    assert list(found)[:3] == ["params.w", "params.stack", "params.bias"]


def test_copies_of_weights_and_pools_are_found_wherever_they_are_and_nothing_else():
    assert Program(HLO).copies(("params.", "cache.")) == [
        ("params.w in converted", 4 * 4096),
        ("cache.k[0] in copy-start", 36864),  # behind an update in place and a kernel's aliased output
        ("params.stack in fusion-start", 4 * 8192),  # a quarter of it, four times
        ("cache.v[0] in copy.2", 36864),  # in a branch
    ]
    assert Program(HLO).copies(("params.s",)) == [("params.stack in fusion-start", 4 * 8192)]


def test_arguments_whose_prefix_is_left_out_are_not_followed():
    assert Program(HLO).copies(("params.", "cache."), but=("cache.", "params.w")) == [
        ("params.stack in fusion-start", 4 * 8192)
    ]


def test_what_a_program_writes_is_every_array_once_in_loops_and_branches_too():
    written = Program(HLO).written()
    assert ("converted", "f32", 4096, 16384) in written
    assert ("write", "bf16", 18432, 36864) in written  # of a tuple
    assert ("fusion-done", "bf16", 4096, 8192) in written  # in a loop, not by its trips
    names = [name for name, *_ in written]
    assert "copy.2" in names and "copy-done" in names
    # Arguments, other names of an array, and what stays inside a fusion are none.
    assert not {"w.1", "flat", "rows", "loop", "copy-start", "convert", "dot"} & set(names)


# Beside `HLO`: fusions of which an operand is read in part, updated in place, or read by parts of a fusion.
MOVES = """\
HloModule jit_step, is_scheduled=true

%fused_gather (table: bf16[1000,64], ids: s32[4]) -> f32[4,64] {
  %table = bf16[1000,64]{1,0} parameter(0)
  %ids = s32[4]{0} parameter(1)
  %again = bf16[1000,64]{1,0} bitcast(%table)
  %rows = bf16[4,64]{1,0} gather(%again, %ids), slice_sizes={1,64}
  ROOT %convert = f32[4,64]{1,0} convert(%rows)
}

%fused_halves (x: f32[4,64]) -> f32[4,32] {
  %x = f32[4,64]{1,0} parameter(0)
  %first = f32[4,32]{1,0} slice(%x), slice={[0:4], [0:32]}
  ROOT %negate = f32[4,32]{1,0} negate(%first)
}

%fused_update (state: s32[65], values: s32[4], at: s32[4]) -> (s32[65], f32[2]) {
  %state = s32[65]{0} parameter(0)
  %at = s32[4]{0} parameter(2)
  %values = s32[4]{0} parameter(1)
  %two = f32[2]{0} constant({1, 2})
  %scatter = s32[65]{0} scatter(%state, %at, %values)
  ROOT %both = (s32[65]{0}, f32[2]{0}) tuple(%scatter, %two)
}

%inner (a: bf16[64,8]) -> f32[64,8] {
  %a = bf16[64,8]{1,0} parameter(0)
  ROOT %wide = f32[64,8]{1,0} convert(%a)
}

%fused_dot (h: f32[4,64], w: bf16[64,8]) -> f32[4,8] {
  %w = bf16[64,8]{1,0} parameter(1)
  %h = f32[4,64]{1,0} parameter(0)
  %w.2 = f32[64,8]{1,0} fusion(%w), kind=kCustom, calls=%inner
  ROOT %dot = f32[4,8]{1,0} dot(%h, %w.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %state = (s32[], f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%state), index=1
  %twice = f32[4,8]{1,0} add(%x, %x)
  ROOT %next = (s32[], f32[4,8]{1,0}) tuple(%i, %twice)
}

%less (state.3: (s32[], f32[4,8])) -> pred[] {
  %state.3 = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %no = pred[] constant(false)
}

ENTRY %main (embed.1: bf16[1000,64], ids.1: s32[4], w.1: bf16[64,8], state.1: s32[65], pool.1: bf16[99,8]) -> f32[4,8] {
  %embed.1 = bf16[1000,64]{1,0} parameter(0), metadata={op_name="params.embed"}
  %ids.1 = s32[4]{0} parameter(1), metadata={op_name="batch.ids"}
  %w.1 = bf16[64,8]{1,0} parameter(2), metadata={op_name="params.w"}
  %state.1 = s32[65]{0} parameter(3), metadata={op_name="state.last"}
  %pool.1 = bf16[99,8]{1,0} parameter(4), metadata={op_name="cache.k"}
  %embedded = f32[4,64]{1,0} fusion(%embed.1, %ids.1), kind=kLoop, calls=%fused_gather
  %half = f32[4,32]{1,0} fusion(%embedded), kind=kLoop, calls=%fused_halves
  %flat = bf16[64,8]{1,0} bitcast(%w.1)
  %product = f32[4,8]{1,0} fusion(%embedded, %flat), kind=kCustom, calls=%fused_dot
  %update = (s32[65]{0}, f32[2]{0}) fusion(%state.1, %ids.1, %ids.1), kind=kInput, calls=%fused_update
  %write = (bf16[99,8]{1,0}, f32[3]{0}) custom-call(%product, %pool.1), custom_call_target="__gpu$xla.gpu.triton", output_to_operand_aliasing={{0}: (1, {})}, backend_config={name = "write_kv", num_stages = 1 : i32}
  %norm = f32[4,8]{1,0} custom-call(%product), custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "add_norm__1", num_stages = 1 : i32}
  %zero = s32[] constant(0)
  %start = (s32[], f32[4,8]{1,0}) tuple(%zero, %norm)
  %loop = (s32[], f32[4,8]{1,0}) while(%start), condition=%less, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %result = f32[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_launches_move_what_they_read_of_their_operands_and_what_they_write():
    launches = Program(MOVES).launches({"write_kv": lambda operands, results: sum(operands) + 7 * results[1]})
    assert [(x.name, x.arguments, x.bytes) for x in launches] == [
        ("embedded", ("params.embed", "batch.ids"), 4 * 64 * 2 + 4 * 4 + 4 * 64 * 4),  # rows of the table
        ("half", (), 2 * 4 * 32 * 4),  # half of what it could read
        ("product", ("params.w",), 4 * 64 * 4 + 64 * 8 * 2 + 4 * 8 * 4),
        ("update", ("state.last", "batch.ids", "batch.ids"), 2 * 16 + 16 + 8),  # not the state
        ("write_kv", ("cache.k",), 4 * 8 * 4 + 99 * 8 * 2 + 7 * 12),  # as it was told
        ("add_norm", (), 2 * 4 * 8 * 4),
        ("twice", (), 5 * 3 * 4 * 8 * 4),
    ]


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, "there is no CUDA plugin beside jax 1.2.3"),
        ({"jax-cuda12-plugin": "1.2.2"}, "jax-cuda12-plugin is 1.2.2 and jax is 1.2.3"),
        ({"jax-cuda13-plugin": "1.2.4"}, "jax-cuda13-plugin is 1.2.4 and jax is 1.2.3"),
    ],
)
def test_a_plugin_of_another_version_is_refused_with_both_versions(monkeypatch, installed, message):
    def version(name):
        if name not in installed:
            raise gpu_compile.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(gpu_compile.jax, "__version__", "1.2.3")
    monkeypatch.setattr(gpu_compile.importlib.metadata, "version", version)
    with pytest.raises(RuntimeError, match=message):
        check_plugin()
    installed.clear()
    installed["jax-cuda12-plugin"] = "1.2.3"
    check_plugin()


def test_targets_describe_the_gpus_they_are_named_after():
    capabilities = {name: target.capability for name, target in TARGETS.items()}
    assert capabilities == {"a100": 80, "rtx4090": 89, "h100": 90, "h200": 90, "b200": 100}
    assert "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES" in TARGETS["h200"].description
    assert "ACCELERATED" not in TARGETS["rtx4090"].description

"""What a compiled program moves, counted from XLA's text."""

import pytest

from tpu_configs.hlo import Array, Hlo
from tpu_configs.traffic import link_bytes, step_traffic

PROGRAM = """HloModule jit_step, is_scheduled=true

%slice_and_multiply (w: bf16[8,256,128], i: s32[], x: f32[16,256]) -> f32[16,128] {
  %w = bf16[8,256,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %x = f32[16,256]{1,0:T(8,128)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  %layer = bf16[1,256,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%w, %i, %zero, %zero), dynamic_slice_sizes={1,256,128}
  %matrix = bf16[256,128]{1,0:T(8,128)(2,1)} bitcast(%layer)
  ROOT %out = f32[16,128]{1,0:T(8,128)S(1)} convolution(%x, %matrix), dim_labels=bf_io->bf
}

%body (carry: (s32[], f32[16,256], bf16[8,256,128], f32[4,16,128])) -> (s32[], f32[16,256]) {
  %carry = (s32[]{:T(128)}, f32[16,256]{1,0:T(8,128)}, bf16[8,256,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %x.1 = f32[16,256]{1,0:T(8,128)} get-tuple-element(%carry), index=1
  %w.1 = bf16[8,256,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%carry), index=2
  %y = f32[16,128]{1,0:T(8,128)S(1)} fusion(%w.1, %i.1, %x.1), kind=kOutput, calls=%slice_and_multiply
  %sum = f32[16,128]{1,0:T(8,128)S(1)} all-reduce(%y), replica_groups={{0,1}}, to_apply=%add
  ROOT %next = (s32[]{:T(128)}, f32[16,256]{1,0:T(8,128)}, bf16[8,256,128]{2,1,0:T(8,128)(2,1)}) tuple(%i.1, %x.1, %w.1)
}

%update (pool: f32[64,128], new: f32[1,128], at: s32[]) -> f32[64,128] {
  %pool = f32[64,128]{1,0:T(8,128)} parameter(0)
  %new = f32[1,128]{1,0:T(1,128)} parameter(1)
  %at = s32[]{:T(128)} parameter(2)
  ROOT %updated = f32[64,128]{1,0:T(8,128)} dynamic-update-slice(%pool, %new, %at, %at)
}

%cheap (a: f32[64,128]) -> f32[64,128] {
  ROOT %a = f32[64,128]{1,0:T(8,128)} parameter(0)
}

%dear (b: f32[64,128]) -> f32[64,128] {
  %b = f32[64,128]{1,0:T(8,128)} parameter(0)
  ROOT %c = f32[64,128]{1,0:T(8,128)} copy(%b)
}

ENTRY %main (w0: bf16[8,256,128], x0: f32[16,256], pool0: f32[64,128], which: pred[]) -> f32[64,128] {
  %w0 = bf16[8,256,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %x0 = f32[16,256]{1,0:T(8,128)} parameter(1)
  %pool0 = f32[64,128]{1,0:T(8,128)} parameter(2)
  %which = pred[] parameter(3)
  %n = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, f32[16,256]{1,0:T(8,128)}, bf16[8,256,128]{2,1,0:T(8,128)(2,1)}) tuple(%n, %x0, %w0)
  %loop = (s32[]{:T(128)}, f32[16,256]{1,0:T(8,128)}) while(%start), condition=%until, body=%body, metadata={op_name="jit(step)/layers/while"}
  %row = f32[1,128]{1,0:T(1,128)} slice(%x0), slice={[0:1], [0:128]}
  %pool1 = f32[64,128]{1,0:T(8,128)} fusion(%pool0, %row, %n), kind=kLoop, calls=%update
  ROOT %last = f32[64,128]{1,0:T(8,128)} conditional(%which, %pool1, %pool1), branch_computations={%cheap, %dear}
}
"""  # noqa: E501
LAYER = 256 * 128 * 2
X = 16 * 256 * 4
ROW = 128 * 4


def test_a_layer_is_read_not_all_layers_and_once_for_each_trip():
    found = step_traffic(Hlo.parse(PROGRAM), lambda loop: 8, kernel_bytes={})
    per_trip = LAYER + X  # the result stays in VMEM
    pool = ROW + ROW  # the new row alone: read, and written into the pool where it lies
    row, scalars = ROW + ROW, (8 + 1) * 4
    assert found.hbm_bytes == 8 * per_trip + row + pool + scalars
    assert found.collectives == {"all-reduce": (8, 8 * 16 * 128 * 4)}


KERNEL = """HloModule jit_step, is_scheduled=true

ENTRY %main (q: bf16[32,128], k: s8[2,9,2,128,64], scale: bf16[2,9,4,128]) -> bf16[32,128] {
  %q = bf16[32,128]{1,0:T(8,128)(2,1)} parameter(0)
  %k = s8[2,9,2,128,64]{4,3,2,1,0:T(8,128)(4,1)} parameter(1)
  %scale = bf16[2,9,4,128]{3,2,1,0:T(4,128)(2,1)} parameter(2)
  %attend.3 = (bf16[32,128]{1,0:T(8,128)(2,1)}, s8[2,9,2,128,64]{4,3,2,1,0:T(8,128)(4,1)}, bf16[2,9,4,128]{3,2,1,0:T(4,128)(2,1)}) custom-call(%q, %k, %scale), custom_call_target="tpu_custom_call", output_to_operand_aliasing={{1}: (1, {}), {2}: (2, {})}, metadata={op_name="jit(step)/attend"}
  ROOT %out = bf16[32,128]{1,0:T(8,128)(2,1)} get-tuple-element(%attend.3), index=0
}
"""  # noqa: E501


def test_a_kernel_reads_of_what_it_writes_in_place_what_it_says_itself():
    """Scales of pages have an axis less than pages, and lie there for all layers as well."""
    found = step_traffic(Hlo.parse(KERNEL), lambda loop: 1, kernel_bytes={"attend": 1000})
    assert (found.hbm_bytes, found.kernel_calls) == (1000 + 2 * 32 * 128 * 2, 1)


def test_a_loop_says_where_it_is_from():
    [loop] = [one for one in Hlo.parse(PROGRAM).walk() if one.opcode == "while"]
    assert loop.op_name == "jit(step)/layers/while"
    assert loop.known_trips is None


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (Array("bf16", (16, 128), "1,0:T(8,128)(2,1)"), 4096),
        (Array("bf16", (5, 100), "1,0:T(8,128)(2,1)"), 8 * 128 * 2),
        (Array("f32", (4, 6, 128), "2,0,1:T(8,128)"), 6 * 8 * 128 * 4),
        (Array("s32", (), ":T(128)"), 4),
        (Array("s8", (3,), ""), 3),
    ],
)
def test_tiles_are_filled_up(text, num_bytes):
    assert text.num_bytes == num_bytes


def test_what_a_ring_of_devices_sends():
    assert link_bytes({"all-reduce": (2, 800.0)}, 8) == 2 * 7 / 8 * 800
    assert link_bytes({"all-gather": (1, 800.0)}, 8) == 7 / 8 * 800
    assert link_bytes({"all-reduce": (2, 800.0)}, 1) == 0

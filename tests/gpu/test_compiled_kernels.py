"""What Triton makes of our kernels for GPUs of several generations; no GPU is needed for that."""

import os

import pytest

pytestmark = pytest.mark.gpu(compiled=True)

GENERATIONS = (75, 86, 90)
"""Compute capabilities: of the cards 20x0, 30x0 and of H100."""
TYPES = {"largest": "*i32", "share": "fp32", "rest": "fp32", "numel": "i32"}
"""Types of arguments; all others are pointers to float32."""
CONSTANTS = {"PART": 1024, "FROM_THETA": True}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_kernel_compiles_without_contraction_or_flushing(generation: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lowcomm_node.trainer import merge_kernels

    assert os.environ.get("TRITON_INTERPRET") != "1"
    for one in (merge_kernels._shifted, merge_kernels._mixed):
        constants = {k: v for k, v in CONSTANTS.items() if k in one.arg_names}
        types = {
            name: "constexpr" if name in constants else TYPES.get(name, "*fp32")
            for name in one.arg_names
        }
        source = ASTSource(fn=one, signature=types, constexprs=constants)
        made = triton.compile(
            source, target=GPUTarget("cuda", generation, 32), options={"enable_fp_fusion": False}
        )
        text = made.asm["ptx"]
        assert "fma.rn.f" not in text, f"{one.__name__} rounds a product and a sum once"
        assert ".ftz" not in text, f"{one.__name__} flushes subnormal numbers"

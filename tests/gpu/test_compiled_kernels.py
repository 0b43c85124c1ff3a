"""What Triton makes of our kernels for GPUs of several generations; no GPU is needed for that."""

import os
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.gpu(compiled=True)

GENERATIONS = (75, 86, 90)
"""Compute capabilities: of the cards 20x0, 30x0 and of H100."""
POINTERS = {
    **dict.fromkeys(("data", "bad"), "*u8"),
    **dict.fromkeys(("marks", "largest_bits", "keys", "mantissas"), "*i32"),
    **dict.fromkeys(("hashes", "begins"), "*i64"),
    **dict.fromkeys(("theta", "phi", "delta", "pooled", "captured", "progress", "sent"), "*fp32"),
    **dict.fromkeys(("mean", "one", "other", "sums", "vector", "own", "wanted"), "*fp32"),
    **dict.fromkeys(("steps", "inverses"), "*fp32"),
    **dict.fromkeys(
        ("gain", "pull", "share", "rest", "rate", "momentum", "memory", "new", "count"), "fp32"
    ),
    **dict.fromkeys(("numel",), "i32"),
}
CONSTANTS = {"ROWS": 4, "PART": 1024, "BLOCK": 256, "BITS": 3, "GROUP": 8, "FROM_THETA": True}


def kernels() -> list[tuple[ModuleType, str]]:
    """Every function that is launched: those that begin with a pointer and end with a constant."""
    from lowcomm_node.trainer.device import blocks, modulo, outer

    found = []
    for module in (blocks, modulo, outer):
        for name, one in vars(module).items():
            names = getattr(one, "arg_names", [])
            if "numel" in names[2:] and one.__module__ == module.__name__:
                found.append((module, name))
    return found


def type_of(module: ModuleType, kernel: str, name: str) -> str:
    """Of one argument."""
    short = module.__name__.rpartition(".")[2]
    if name == "out" and (kernel.endswith("encode")):
        return "*u8"
    if name == "out":
        return "*fp32"
    if name == "codes":
        return "*u8" if kernel.endswith("decode") else "*i32"
    if name == "largest":
        return "*i32" if short == "outer" else "fp32"
    return POINTERS[name]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_kernel_compiles_without_contraction_or_flushing(generation: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    assert os.environ.get("TRITON_INTERPRET") != "1"
    found = kernels()
    assert len(found) >= 20
    divisions = 0
    for module, name in found:
        one: Any = getattr(module, name)
        constants = {k: v for k, v in CONSTANTS.items() if k in one.arg_names}
        types = {
            arg: "constexpr" if arg in constants else type_of(module, name, arg)
            for arg in one.arg_names
        }
        source = ASTSource(fn=one, signature=types, constexprs=constants)
        made = triton.compile(
            source, target=GPUTarget("cuda", generation, 32), options={"enable_fp_fusion": False}
        )
        text = made.asm["ptx"]
        assert "fma.rn.f" not in text, f"{name} rounds a product and a sum once"
        assert ".ftz" not in text, f"{name} flushes subnormal numbers"
        assert "div.full" not in text and "div.approx" not in text, f"{name} divides roughly"
        divisions += text.count("div.rn.f")
    assert divisions, "some kernels divide"

"""What must hold for kernels where there is no Triton: those that tests of a GPU compile have
arguments whose types these know."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lowcomm_node.trainer
from gpu.test_compiled_kernels import CONSTANTS, type_of

FOLDER = Path(lowcomm_node.trainer.__file__).parent / "device"


def kernels(module: str) -> dict[str, list[str]]:
    """Names of the arguments of every function that is launched, as tests of a GPU find them."""
    functions = [
        one
        for one in ast.parse((FOLDER / f"{module}.py").read_text()).body
        if isinstance(one, ast.FunctionDef)
        and any(ast.unparse(decorator) == "triton.jit" for decorator in one.decorator_list)
    ]
    names = {one.name: [argument.arg for argument in one.args.args] for one in functions}
    return {name: arguments for name, arguments in names.items() if "numel" in arguments[2:]}


@pytest.mark.parametrize("module", ["blocks", "modulo", "outer"])
def test_each_argument_has_a_type(module: str) -> None:
    found = kernels(module)
    assert len(found) >= 3
    named: Any = SimpleNamespace(__name__=f"lowcomm_node.trainer.device.{module}")
    for kernel, arguments in found.items():
        for argument in arguments:
            assert argument in CONSTANTS or type_of(named, kernel, argument), (kernel, argument)

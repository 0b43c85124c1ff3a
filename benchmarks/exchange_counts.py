"""Counts of what an exchange does to memory: the same on every machine, however busy it is.

Both nodes run in this process, their trainers on threads of it, and what touches a fragment is
watched: operations of torch, compiled kernels, hashes, memory of Python, and frames."""

import asyncio
import hashlib
import sys
import tempfile
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from exchange_ends import FLOAT, Node, run_of, values_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WARM = 2
"""Exchanges before the one that is counted."""
LARGE = 0.5
"""Of a fragment: smaller tensors are scratch that stays in a cache."""


async def count(method: str, size: int) -> dict[str, Any]:
    """One exchange of a fragment of about ``size`` bytes in fp32: what both ends tell, and counts.

    Exchanges before it teach codecs their ranges.
    """
    spec = run_of(method, size)
    counting = Counting(FLOAT * values_of(spec.model.width))
    from helpers.trainer_thread import TrainerThread

    with tempfile.TemporaryDirectory() as folder:
        nodes = [Node(name, Path(folder), spec, TrainerThread()) for name in ("first", "second")]
        try:
            for one in nodes:
                await one.open()
            for _ in range(WARM + 1):
                told = [await one.do({"train": True}) for one in nodes]
                for one, other in zip(nodes, reversed(told), strict=True):
                    await one.do(other)
                counting.reset()
                began = (await nodes[0].do({"go": True}))["began"]
                ended = await asyncio.gather(*(one.do({"end": True}) for one in nodes))
                counts = counting.figures()
        finally:
            for one in nodes:
                await one.close()
            counting.stop()
    return {"began": began, "ends": ended, "counts": counts}


class Counting:
    """Counts in this process until it is stopped: make it before trainers start."""

    def __init__(self, fragment: int) -> None:
        """``fragment``: bytes in fp32."""
        import lowcomm_node.sync.exchanger
        import lowcomm_node.trainer.loop  # noqa: F401 - all that is counted is in these

        self._fragment = fragment
        self._replaced: list[tuple[Any, str, Any]] = []
        self._lock = Lock()
        self._counts: Counter[str] = Counter()
        self._lenders: list[Any] = []
        self._watch_torch()
        self._watch_vectors()
        self._watch_kernels()
        self._watch_hashes()
        self._watch_frames()

    def reset(self) -> None:
        """Forget what was counted."""
        with self._lock:
            self._counts.clear()
        tracemalloc.start()

    def add(self, name: str, count: int) -> None:
        """Count."""
        with self._lock:
            self._counts[name] += count

    def stop(self) -> None:
        """Count no more."""
        for owner, name, value in reversed(self._replaced):
            setattr(owner, name, value)

    def figures(self) -> dict[str, float]:
        """What was counted since ``reset``, of both ends together: numbers, and the rest in
        fragments of fp32."""
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return {
            "tensors": self._counts["tensors"],
            "chunks": self._counts["chunks"],
            "touched": self._counts["touched"] / self._fragment,
            "hashed": self._counts["hashed"] / self._fragment,
            "python": peak / self._fragment,
            "wire": self._counts["wire"] / self._fragment,
            "held": self._held() / self._fragment,
        }

    def _held(self) -> int:
        """Bytes of vectors; those of a rehearsal are of a toy model."""
        least = LARGE * self._fragment
        return sum(one.made * one.bytes for one in self._lenders if one.bytes >= least)

    # what is watched

    def _watch_torch(self) -> None:
        from lowcomm_node.trainer import loop
        from lowcomm_node.trainer.replica import Replica

        counting = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                result = func(*args, **(kwargs or {}))
                counting.torch_did(func, tree_leaves((args, kwargs)), tree_leaves(result))
                return result

        class Pool(ThreadPoolExecutor):
            def __init__(self, workers: int, name: str) -> None:
                super().__init__(workers, name, initializer=lambda: Mode().__enter__())

        self._set(loop, "ThreadPoolExecutor", Pool)
        for name in ("capture", "merge"):  # between inner steps, which are not counted
            self._set(Replica, name, within(Mode, getattr(Replica, name)))

    def torch_did(self, func: Any, given: list[Any], results: list[Any]) -> None:
        """Count an operation; a view touches nothing."""
        returns = func._schema.returns
        if any(one.alias_info is not None and not one.alias_info.is_write for one in returns):
            return
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        known = {one.data_ptr() for one in tensors}
        made = [
            one for one in results if isinstance(one, torch.Tensor) and one.data_ptr() not in known
        ]
        large = sum(one.nbytes >= LARGE * self._fragment for one in made)
        self.add("tensors", large)
        if "empty" in func.name():
            return
        if func.name().startswith("aten::index"):
            tensors = made  # it reads as much as it writes
        self.add("touched", sum(one.nbytes for one in (*tensors, *made)))

    def _watch_vectors(self) -> None:
        """Vectors of fragments: those that were made once stay, whether they are held or free."""
        from lowcomm_node.trainer.scratch import Scratch

        made, lenders = Scratch.__init__, self._lenders

        def remember(scratch: Scratch, *arguments: Any) -> None:
            made(scratch, *arguments)
            lenders.append(scratch)

        self._set(Scratch, "__init__", remember)

    def _watch_kernels(self) -> None:
        def counted(kernel: Any) -> Any:
            @wraps(kernel)
            def call(*arguments: Any) -> Any:
                arrays = [one for one in arguments if isinstance(one, np.ndarray)]
                self.add("touched", sum(one.nbytes for one in arrays))
                return kernel(*arguments)

            return call

        self._replace(
            lambda value: getattr(value, "__qualname__", "") == "kernel.<locals>.call", counted
        )

    def _watch_hashes(self) -> None:
        counting = self

        class Hash:
            kind: Any

            def __init__(self, data: Any = b"") -> None:
                self._hash = self.kind()
                self.update(data)

            def update(self, data: Any) -> None:
                counting.add("hashed", memoryview(data).nbytes)
                self._hash.update(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._hash, name)

        self._replace(
            lambda value: value is hashlib.sha256 or value is blake3,
            lambda value: type("Counted", (Hash,), {"kind": staticmethod(value)}),
        )

    def _replace(self, chosen: Any, by: Any) -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("lowcomm_"):
                for key, value in list(vars(module).items()):
                    if chosen(value):
                        self._set(module, key, by(value))

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _watch_frames(self) -> None:
        from lowcomm_node.net.stream import CalleeStream, CallerStream

        for kind in (CalleeStream, CallerStream):
            self._set(kind, "send", self._counted(kind.send))

    def _counted(self, send: Any) -> Any:
        @wraps(send)
        async def counted(stream: Any, frame: Any) -> None:
            self.add("chunks", frame.WhichOneof("kind") == "chunk")
            self.add("wire", frame.ByteSize())
            await send(stream, frame)

        return counted


def within(mode: Any, function: Any) -> Any:
    """The function, called within a mode of torch."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        with mode():
            return function(*arguments)

    return call

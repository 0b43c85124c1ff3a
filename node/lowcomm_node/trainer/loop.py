"""The training loop: inner steps, and between two of them whatever the daemon asks for.

    while not told to stop:
        carry out requests that need a step boundary      capture, merge, snapshot, adopt, generate
        take one inner step                               unless held, or the run is over

Coding, decoding, outer steps and writing run on two threads beside the loop, so that the accelerator does not wait for them.
Requests that only decode or average do not wait for a step boundary either: where a step takes half a minute, an exchange
would wait for several of them.
"""

import math
import queue
from base64 import b64decode, b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from time import monotonic, time
from typing import Any

import numpy as np
import torch

from lowcomm_node.errors import Diverged, NotFinite, TrainerError
from lowcomm_node.models.sampling import TOP_K, generate
from lowcomm_node.storage.checkpoint import CheckpointStore
from lowcomm_node.storage.quota import DiskQuota
from lowcomm_node.trainer import state, transfer
from lowcomm_node.trainer.arena import Arena
from lowcomm_node.trainer.capacity import check_memory, limit_vram
from lowcomm_node.trainer.capture import Capture
from lowcomm_node.trainer.evaluation import evaluate
from lowcomm_node.trainer.interface import Ready, TrainerSettings, said, slots_each
from lowcomm_node.trainer.optimizer import learning_rate
from lowcomm_node.trainer.pipe import Pipe
from lowcomm_node.trainer.replica import Replica, choose_device
from lowcomm_node.trainer.saving import HANGS, Saving
from lowcomm_node.trainer.state import Parts
from lowcomm_node.trainer.text import open_text
from lowcomm_protocol.codecs import BLOCK, Coder, ShardCoder, codec, coder
from lowcomm_protocol.deeds import Deed
from lowcomm_protocol.errors import CodecError, ImplausibleError
from lowcomm_protocol.exchange.outer import mean_contribution, outer_step
from lowcomm_protocol.spec.amendments import newest
from lowcomm_protocol.spec.outer_settings import OuterSettings
from lowcomm_protocol.spec.run import MAX_GROUP, parse_canonical, run_id_of

MAX_GENERATED = 4096
LOOK = 1.0
"""Seconds between two looks at whether a disk that hangs has held training long enough; a write that ends wakes it at once."""
FP32_BYTES = 4
MOST_SKIPPED = 10
"""Inner steps in a row that may be skipped. Each had a batch of its own, so it is not the text: even where every second batch
overflows, ten in a row come once in a thousand steps, and weights that give nothing finite for ten give nothing for the next."""
_BESIDE = frozenset({"receive", "resend", "patch", "receive_share", "reduce", "receive_mean", "merge"})
"""Requests that need no step boundary to begin. ``drop`` does: it must come after a capture that waits for one."""


class TrainerLoop:
    """One replica at work. ``run`` returns when the daemon says stop or is gone."""

    def __init__(self, pipe: Pipe, memory: int) -> None:
        self._pipe, self._memory = pipe, memory
        self._boundary: queue.Queue[Callable[[], None] | dict[str, Any] | None] = queue.Queue()
        self._coder = ThreadPoolExecutor(1, "coder")
        self._writer = ThreadPoolExecutor(1, "writer")
        self._ripening: list[tuple[int, Callable[[], None]]] = []
        self._training = self._stopping = self._told_finished = False
        self._speed = 0.0
        self._windows: int | None = None
        """Of held-out text, that evaluations take: as many as the first one could, so that they can be compared."""

    def run(self) -> None:
        """Serve requests and train until told to stop."""
        self._pipe.start_reading(self._take)
        try:
            while not self._stopping:
                self._serve(wait=not self._can_step())
                if self._can_step():
                    self._step()
        except Diverged as error:
            self._writer.shutdown()  # what is being written now is the newest checkpoint then
            self._leave_behind(error)
            raise
        finally:
            self._coder.shutdown()
            self._writer.shutdown()

    def _leave_behind(self, error: Diverged) -> None:
        """The next start goes back one checkpoint, and on with other text than what led here."""
        note = {"reason": str(error), "steps": self.replica.steps, "stream": self.replica.stream.state()}
        with suppress(OSError, ValueError):  # the reason why training ends matters more
            self.store.note_divergence(note)

    def _take(self, request: dict[str, Any] | None) -> None:
        """On the thread that reads: begin what needs no step boundary, and keep the rest for the next one."""
        if request is not None and request.get("do") in _BESIDE:
            self._carry_out(request)
        else:
            self._boundary.put(request)

    # between steps

    def _serve(self, wait: bool) -> None:
        while not self._stopping:
            self._release_ripe()
            try:
                item = self._boundary.get(block=wait, timeout=LOOK)
            except queue.Empty:
                return
            if item is None:  # the daemon is gone
                self._stopping = True
            elif callable(item):
                item()
            else:
                self._carry_out(item)
            wait = not self._can_step()

    def _carry_out(self, request: dict[str, Any]) -> None:
        number = request["id"]
        try:
            handler = getattr(self, f"_do_{request['do']}")
            answer = handler(number, request)
        except (Diverged, MemoryError):
            raise  # nothing that is asked next would go better
        except Exception as error:
            self._pipe.send({"re": number, **describe(error)})
            return
        if answer is not None:
            self._pipe.send({"re": number, **answer})

    def _beside(self, number: int, work: Callable[[], dict[str, Any] | None]) -> None:
        """Run ``work`` on the coding thread and answer with its result."""

        def job() -> None:
            try:
                answer = work()
            except Exception as error:  # whatever it is: nobody else would answer
                self._pipe.send({"re": number, **describe(error)})
                return
            if answer is not None:
                self._pipe.send({"re": number, **answer})

        self._coder.submit(job)

    def _on_capture(
        self, number: int, fragment: int, capture: Capture, work: Callable[[], dict[str, Any] | None]
    ) -> None:
        """The same, where it is void once the exchange of this capture is: that is nothing to blame a peer for."""

        def unless_void() -> dict[str, Any] | None:
            self._check_captured(fragment, capture)
            return work()

        self._beside(number, unless_void)

    def _check_captured(self, fragment: int, capture: Capture) -> None:
        if self.replica.captures.get(fragment) is not capture:  # it was dropped, or a state was copied meanwhile
            raise TrainerError(f"Fragment {fragment} is not captured any more: the exchange is void.")

    # steps

    def _can_step(self) -> bool:
        return self._training and not self._finished() and not self._is_held()

    def _is_held(self) -> bool:
        """Whether training waits for a checkpoint; it is told when that begins, and when it lasts too long."""
        was_held = self._saving.is_holding
        is_held = self._saving.holds(self.replica.steps, monotonic())
        if is_held and not was_held:
            self._pipe.send({"event": "held"})
        if was_held and self._saving.trouble == HANGS:
            self._pipe.send({"event": "not-saved", "reason": HANGS})
        return is_held

    def _finished(self) -> bool:
        return self.replica.course.is_over(self.replica.clock.step)

    def _step(self) -> None:
        replica, began = self.replica, monotonic()
        loss = replica.inner_step()
        if replica.skipped_in_a_row:
            self._tell_skipped(loss)
        seconds = monotonic() - began
        rate = replica.spec.tokens_per_step / max(1e-9, seconds)
        self._speed = rate if not self._speed else 0.9 * self._speed + 0.1 * rate
        self._tell_step(loss, seconds)
        if replica.steps % replica.spec.train.evaluate_every == 0 and not self._finished():
            self._evaluate()
        if self._saving.is_due(replica.steps, monotonic()):
            self._save(None)
        self._tell_if_finished()

    def _tell_skipped(self, loss: float) -> None:
        replica, row = self.replica, self.replica.skipped_in_a_row
        if row >= MOST_SKIPPED:
            raise Diverged(
                f"{row} inner steps in a row were skipped by step {replica.steps}, as loss ({loss:.4g}) or gradients were "
                "not finite: train.learning_rate is too high."
            )
        if row == 1:
            self._pipe.send({"event": "skipped", "steps": replica.steps, "skipped_steps": replica.skipped})

    def _tell_if_finished(self) -> None:
        """A merge with a partner that is ahead can end the run as well as a step."""
        if self._training and self._finished() and not self._told_finished:
            self._told_finished = True
            news = {"swarm_step": self.replica.clock.step, "steps": self.replica.steps}
            self._pipe.send({"event": "finished", **news})

    def _tell_step(self, loss: float, seconds: float) -> None:
        replica, now = self.replica, self.replica.now
        self._pipe.send(
            {
                "event": "step",
                "swarm_step": replica.clock.step,
                "steps": replica.steps,
                "tokens": replica.tokens,
                "loss": loss if math.isfinite(loss) else None,
                "skipped_steps": replica.skipped,
                "seconds": seconds,
                "learning_rate": learning_rate(now.train, replica.clock.step, now.run.steps),
                "tokens_per_second": self._speed,
            }
        )

    def _evaluate(self) -> float:
        replica = self.replica
        self._pipe.send({"event": "evaluating"})
        found = evaluate(replica.model, replica.dataset, replica.spec.model.context, most=self._windows)
        self._windows = self._windows or found.windows
        news = {"event": "evaluated", "loss": found.loss if math.isfinite(found.loss) else None, "tokens": found.tokens}
        self._pipe.send({**news, "swarm_step": replica.clock.step, "steps": replica.steps})
        return found.loss

    # requests: build, train, stop

    def _do_build(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        self.settings = TrainerSettings.from_dict(request["settings"])
        spec = parse_canonical(self.settings.spec)
        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        device = choose_device(self.settings.device)
        allowed = (self.settings.max_memory, self.settings.max_vram)
        check_memory(spec, device, *allowed, exchanges=self.settings.exchanges)
        limit_vram(device, self.settings.max_vram)
        disk_quota = DiskQuota(Path(self.settings.home), self.settings.max_disk)
        dataset = open_text(spec, self.settings, disk_quota, self._pipe.send)
        run_id = run_id_of(self.settings.spec.encode())
        course = newest(spec, run_id, [self.settings.amendments.encode()])
        self.replica = Replica(spec, self.settings.peer_id, dataset, device, run_id=run_id, course=course)
        _warm_up(spec.sync.codec)
        self.store = CheckpointStore(Path(self.settings.checkpoints), self.settings.keep, disk_quota)
        found = self.store.load_newest_usable()
        if found.checkpoint is not None:
            state.restore(self.replica, found.checkpoint.tensors, found.checkpoint.meta)
            state.skip_text(self.replica, found.diverged)
        self._saving = Saving(self.settings.checkpoint_every, self.replica.steps)
        resumed = found.checkpoint.info.step if found.checkpoint else None
        self._arena = self._make_arena(spec.sync.codec, spec.sync.group)
        return self._ready(resumed, [f"step {skipped.step}: {skipped.problem}" for skipped in found.skipped])

    def _make_arena(self, codec_name: str, group: int) -> Arena:
        largest = max(fragment.numel for fragment in self.replica.plan.fragments)
        at_once = min(self.settings.exchanges, len(self.replica.plan.fragments))
        slots = at_once * slots_each(group) if group > 1 else 0
        return Arena(self._memory, slots, slot_bytes(codec_name, largest, group))

    def _ready(self, resumed: int | None, skipped: list[str]) -> dict[str, Any]:
        replica = self.replica
        numels = [fragment.numel for fragment in replica.plan.fragments]
        form = transfer.form_of(replica)
        ready = Ready(
            device=str(replica.device),
            parameters=sum(numels),
            plan=replica.plan.digest,
            numels=tuple(numels),
            sizes=tuple(map(self._size, replica.coders)),
            realign_sizes=tuple(coder("fp32", n).max_size for n in numels),
            slots=self._arena.slots,
            slot_bytes=self._arena.slot_bytes,
            swarm_step=replica.clock.step,
            steps=replica.steps,
            tokens=replica.tokens,
            progress=tuple(asdict(replica.schedule[p]) for p in range(len(numels))),
            slow_digests=tuple(replica.slow_digest(p) for p in range(len(numels))),
            momentum_digests=tuple(replica.momentum_digest(p) for p in range(len(numels))),
            resumed=resumed,
            skipped=tuple(skipped),
            runs=form.fragments,
            ranges=form.ranges,
        )
        return asdict(ready)

    def _size(self, one: Coder | ShardCoder) -> tuple[int, int]:
        if isinstance(one, Coder):
            return one.min_size, one.max_size
        whole = codec(self.replica.spec.sync.codec).coded_size(one.numel)
        return whole, whole

    def _do_train(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        self._training = bool(request["on"])
        self._tell_if_finished()
        return {}

    def _do_amend(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        """Follow another course from this step boundary on; a run that was over may go on."""
        replica = self.replica
        replica.course = newest(
            replica.spec, replica.run_id, [replica.course.chain.data, request["amendments"].encode()]
        )
        self._told_finished = self._told_finished and self._finished()
        self._tell_if_finished()
        return {"swarm_step": replica.clock.step}

    def _do_stop(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        self._stopping = True
        return {}

    def _do_evaluate(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        return {"loss": self._evaluate()}

    def _do_generate(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        count = min(MAX_GENERATED, int(request["tokens"]))
        tokenizer = self.replica.dataset.tokenizer
        prompt = [int(token) for token in tokenizer.encode((request["prompt"] or "\n").encode())]
        tokens = generate(self.replica.model, prompt, count, float(request["temperature"]), TOP_K, int(request["seed"]))
        return {"text": tokenizer.decode(list(tokens))}

    # requests: exchange

    def _do_capture(self, number: int, request: dict[str, Any]) -> None:
        fragment, slot = int(request["fragment"]), int(request["slot"])
        self.replica.capture(fragment, bool(request["realign"]), ahead=int(request["ahead"]))
        capture = self.replica.pair(fragment)

        def work() -> dict[str, Any]:
            size = capture.encode(self._arena.view(slot, self._arena.slot_bytes))
            return self._coded(slot, 0, size) | {"steps": capture.steps}

        self._beside(number, work)

    def _do_receive(self, number: int, request: dict[str, Any]) -> None:
        fragment = int(request["fragment"])
        capture, data = self.replica.pair(fragment), self._data(request)

        def work() -> dict[str, Any]:
            again = capture.receive(str(request["peer"]), data)
            size = capture.coder.resent_size(again) if again else 0
            return {"again": b64encode(again).decode(), "size": size}

        self._on_capture(number, fragment, capture, work)

    def _do_resend(self, number: int, request: dict[str, Any]) -> None:
        fragment, slot = int(request["fragment"]), int(request["slot"])
        capture = self.replica.pair(fragment)

        def work() -> dict[str, Any]:
            out = self._arena.view(slot, self._arena.slot_bytes)
            return self._coded(slot, 0, capture.resend(b64decode(request["blocks"]), out))

        self._on_capture(number, fragment, capture, work)

    def _do_patch(self, number: int, request: dict[str, Any]) -> None:
        fragment = int(request["fragment"])
        capture, data = self.replica.pair(fragment), self._data(request)
        self._on_capture(number, fragment, capture, lambda: capture.patch(str(request["peer"]), data) or {})

    # requests: exchange in a group, where every member averages one shard

    def _do_share(self, number: int, request: dict[str, Any]) -> None:
        fragment, slot = int(request["fragment"]), int(request["slot"])
        self.replica.capture(fragment, bool(request["realign"]), request["members"], int(request["ahead"]))
        capture = self.replica.group(fragment)

        def work() -> dict[str, Any]:
            sizes = capture.encode(self._arena.view(slot, self._arena.slot_bytes))
            starts = accumulate(sizes[:-1], initial=0)
            shares = [self._coded(slot, start, size) for start, size in zip(starts, sizes, strict=True)]
            return {"shares": shares, "steps": capture.steps}

        self._beside(number, work)

    def _do_receive_share(self, number: int, request: dict[str, Any]) -> None:
        fragment = int(request["fragment"])
        capture, data = self.replica.group(fragment), self._data(request)
        self._on_capture(number, fragment, capture, lambda: capture.receive(str(request["peer"]), data) or {})

    def _do_reduce(self, number: int, request: dict[str, Any]) -> None:
        fragment, slot, offset = int(request["fragment"]), int(request["slot"]), int(request["offset"])
        capture = self.replica.group(fragment)

        def work() -> dict[str, Any]:
            out = self._arena.view(slot, self._arena.slot_bytes)[offset:]
            coded = self._coded(slot, offset, capture.reduce(request["tokens"], out))
            return coded | {"left_out": {peer: describe(error) for peer, error in capture.left_out.items()}}

        self._on_capture(number, fragment, capture, work)

    def _do_receive_mean(self, number: int, request: dict[str, Any]) -> None:
        fragment = int(request["fragment"])
        capture, data = self.replica.group(fragment), self._data(request)
        self._on_capture(number, fragment, capture, lambda: capture.receive_mean(str(request["owner"]), data) or {})

    # requests: merge

    def _data(self, request: dict[str, Any]) -> memoryview:
        """Coded bytes that the daemon has received."""
        offset = int(request.get("offset", 0))
        return self._arena.view(int(request["slot"]), offset + int(request["size"]))[offset:]

    def _coded(self, slot: int, offset: int, size: int) -> dict[str, Any]:
        return {"size": size, "digest": sha256(self._arena.view(slot, offset + size)[offset:]).hexdigest()}

    def _do_merge(self, number: int, request: dict[str, Any]) -> None:
        fragment, replica = int(request["fragment"]), self.replica
        in_group = "owners" in request
        capture = replica.group(fragment) if in_group else replica.pair(fragment)

        def at_boundary() -> None:
            try:
                self._check_captured(fragment, capture)
                replica.merge(fragment, int(request["swarm_step"]))
            except TrainerError as error:
                self._pipe.send({"re": number, **describe(error)})
                return
            self._answer_merge(number, fragment, *capture.digests)

        def work() -> None:
            if in_group:
                replica.group(fragment).pool(request["owners"])
            else:
                replica.pair(fragment).pool(request["tokens"])
            capture.keep_momentum = bool(request.get("keep_momentum"))
            replica.outer(fragment)
            ripe = capture.steps + replica.spec.sync.overlap
            self._boundary.put(lambda: self._ripening.append((ripe, at_boundary)))

        self._beside(number, work)

    def _release_ripe(self) -> None:
        """Merge what has been captured at least ``overlap`` steps ago; nothing waits once training is held or over."""
        due = [entry for entry in self._ripening if entry[0] <= self.replica.steps or not self._can_step()]
        self._ripening = [entry for entry in self._ripening if entry not in due]
        for _, merge in due:
            merge()
        if due:
            self._tell_if_finished()

    def _answer_merge(self, number: int, fragment: int, slow_digest: str, momentum_digest: str) -> None:
        replica, progress = self.replica, self.replica.schedule[fragment]
        answer = {
            "swarm_step": replica.clock.step,
            "merged_steps": progress.merged_steps,
            "merged_tokens": progress.merged_tokens,
            "worst_block": replica.worst_block[fragment],
        }
        self._pipe.send({"re": number, **answer, "slow_digest": slow_digest, "momentum_digest": momentum_digest})

    def _do_drop(self, number: int, request: dict[str, Any]) -> None:
        fragment, replica = int(request["fragment"]), self.replica
        capture = replica.captures.get(fragment)

        def work() -> dict[str, Any]:
            # After what was asked before: once this is answered, nothing is written to the slots of the exchange any more.
            if capture is not None and replica.captures.get(fragment) is capture:
                replica.drop(fragment)
            return {}

        self._beside(number, work)

    # requests: state

    def _do_save(self, number: int, request: dict[str, Any]) -> None:
        self._save(number)

    def _save(self, number: int | None) -> None:
        parts, meta = state.snapshot(self.replica)
        self._saving.began(meta["steps"])

        def work() -> None:
            self._write(number, parts, meta)
            self._boundary.put(lambda: None)  # wakes training, if it is held

        self._writer.submit(work)

    def _write(self, number: int | None, parts: Parts, meta: dict[str, Any]) -> None:
        began = monotonic()
        try:
            state.require_finite(parts)
            info = self.store.save(meta["swarm_step"], parts, meta, created_at=time())
        except Exception as error:  # whatever it is, it is told, and training goes on
            if self._saving.failed(str(error), monotonic()):
                self._pipe.send({"event": "not-saved", "reason": str(error)})
            if number is not None:
                self._pipe.send({"re": number, **describe(error)})
            if isinstance(error, NotFinite):
                self._boundary.put(partial(self._give_up, error))
            return
        news = {"swarm_step": meta["swarm_step"], "path": str(info.path)}
        after_trouble = self._saving.succeeded(self.replica.steps)
        self._pipe.send({"event": "saved", **news, "seconds": monotonic() - began, "after_trouble": after_trouble})
        if number is not None:
            self._pipe.send({"re": number, **news, "steps": meta["steps"], "tokens": meta["tokens"]})

    def _give_up(self, error: NotFinite) -> None:
        raise Diverged(f"{str(error).rstrip('.')}, by step {self.replica.steps}: train.learning_rate is too high.")

    def _do_snapshot(self, number: int, request: dict[str, Any]) -> None:
        taken = transfer.Snapshot(self.replica)

        def work() -> None:
            try:
                name = taken.write(Path(request["folder"]))
            except Exception as error:
                self._pipe.send({"re": number, **describe(error)})
                return
            self._pipe.send({"re": number, "name": name, "swarm_step": taken.swarm_step})

        self._writer.submit(work)

    def _do_adopt(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        self._coder.submit(lambda: None).result()  # until nothing works on a capture any more
        transfer.adopt_folder(self.replica, Path(request["folder"]), bool(request.get("back")))
        return self._ready(None, [])


def slot_bytes(codec_name: str, numel: int, group: int) -> int:
    """Bytes of a slot, whole pages, for fragments of up to ``numel`` values; a realignment is in fp32."""
    largest = max(coder(name, numel).max_size for name in (codec_name, "fp32"))
    if group > 2:
        largest += MAX_GROUP * FP32_BYTES * BLOCK  # shards are cut at blocks: each may be one longer than the rest
    return -(-largest // 4096) * 4096


def _warm_up(codec_name: str) -> None:
    """Compile a codec and the outer step now rather than within the first exchange, where a whole group would wait for it."""
    chosen, vector = coder(codec_name, 1), np.ones(1, dtype=np.float32)
    coded = memoryview(bytearray(chosen.max_size))
    for _ in range(2):  # modulo codecs know no range in their first exchange
        size = chosen.encode(vector, coded)
        chosen.decode(coded[:size], vector)
        chosen.commit()
    one = torch.zeros(1)
    outer_step(
        OuterSettings("nesterov", 1.0, 0.5, 0.0, "shift", 0.0), one, one.clone(), mean_contribution([one] * 3, [1] * 3)
    )


def describe(error: Exception) -> dict[str, Any]:
    """An error as it is told to the daemon: its text, the exit code that it should end a command with, whose fault it is."""
    unusable = isinstance(error, CodecError | ImplausibleError)
    return {
        "error": said(error),
        "exit_code": getattr(error, "exit_code", 1),
        "unusable": unusable,
        "deed": (error.deed or "") if isinstance(error, ImplausibleError) else Deed.HEAVY,
    }

"""A trainer process without tensors: it speaks the trainer's messages and fails as it is told.

    python light_process.py BEHAVIOUR SOCKET MEMORY

BEHAVIOUR is empty, or one of die:N, fail:N:KIND:REASON, refuse:CODE:REASON, eat:N:BYTES, where N is
a step, and pace:SECONDS, of a step. rank:BYTES has a second process, which takes memory.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

from lowcomm_node.node.ipc import TrainerMessage, decode, encode
from lowcomm_node.node.messages import (
    Build,
    Done,
    FailureKind,
    InnerStepTaken,
    Ready,
    RequestFailed,
    Stop,
    Train,
    TrainerFailed,
    TrainingDevice,
)

STEP = 0.01
"""Seconds of a step: its work is to take time."""
READY = Ready(
    device="none", parameters=1, plan="", numels=(1,), sizes=((1, 1),), realign_sizes=(1,),
    slots=2, slot_bytes=4096, swarm_step=0, steps=0, tokens=0, progress=({},),
    slow_digests=("",), resumed=None,
)  # fmt: skip


def main() -> None:
    what, *details = sys.argv[1].split(":")
    sock = socket.socket(fileno=int(sys.argv[2]))
    lock = threading.Lock()
    training = threading.Event()
    eaten: list[bytes] = []
    ready = READY
    if what == "rank":
        eats = f"eaten = b'x' * {details[0]}; import sys; sys.stdin.read()"
        other = subprocess.Popen([sys.executable, "-c", eats], stdin=subprocess.PIPE)
        ready = replace(
            ready,
            devices=(
                TrainingDevice(name="cpu", pid=os.getpid(), seconds=1.0),
                TrainingDevice(name="cpu (rank 1)", pid=other.pid, seconds=2.0),
            ),
        )
    pace = float(details[0]) if what == "pace" else STEP

    def send(message: TrainerMessage, number: int | None = None) -> None:
        with lock:
            sock.sendall(encode(message, number))

    def train() -> None:
        steps = 0
        while True:
            training.wait()
            time.sleep(pace)  # stands for a step's work
            steps += 1
            if what == "die" and steps == int(details[0]):
                os.kill(os.getpid(), 9)
            if what == "fail" and steps == int(details[0]):
                send(TrainerFailed(reason=details[2], kind=FailureKind(details[1])))
                os._exit(1)
            if what == "eat" and steps == int(details[0]):
                eaten.append(b"x" * int(details[1]))
            send(InnerStepTaken(steps=steps, swarm_step=steps, tokens=steps, loss=1.0))

    threading.Thread(target=train, daemon=True).start()
    with sock.makefile("rb") as lines:
        for line in lines:
            request, number = decode(line)
            match request:
                case Build() if what == "refuse":
                    send(RequestFailed(text=details[1], exit_code=int(details[0])), number)
                case Build():
                    send(ready, number)
                case Train(on=on):
                    (training.set if on else training.clear)()
                    send(Done(), number)
                case _:
                    send(Done(), number)
            if isinstance(request, Stop):
                os._exit(0)


if __name__ == "__main__":
    main()

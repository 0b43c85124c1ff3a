"""A trainer without tensors: a real process that speaks the real language, takes steps of nothing, and fails as it is told.

python light_process.py BEHAVIOUR SOCKET MEMORY        BEHAVIOUR: "", "die:N", "fail:N:KIND:REASON", "refuse:CODE:REASON",
                                                                 "eat:N:BYTES"
"""

import json
import os
import socket
import sys
import threading
import time
from typing import Any

STEP = 0.01
"""Seconds of a step: its work is to take time."""


def main() -> None:
    what, *details = sys.argv[1].split(":")
    sock = socket.socket(fileno=int(sys.argv[2]))
    lock = threading.Lock()
    training = threading.Event()
    eaten: list[bytes] = []

    def send(message: dict[str, Any]) -> None:
        with lock:
            sock.sendall(json.dumps(message).encode() + b"\n")

    def train() -> None:
        steps = 0
        while True:
            training.wait()
            time.sleep(STEP)
            steps += 1
            if what == "die" and steps == int(details[0]):
                os.kill(os.getpid(), 9)
            if what == "fail" and steps == int(details[0]):
                send({"event": "failed", "kind": details[1], "reason": details[2], "exit_code": 1})
                os._exit(1)
            if what == "eat" and steps == int(details[0]):
                eaten.append(b"x" * int(details[1]))
            send({"event": "step", "steps": steps, "swarm_step": steps, "tokens": steps, "loss": 1.0})

    threading.Thread(target=train, daemon=True).start()
    with sock.makefile("rb") as lines:
        for line in lines:
            request = json.loads(line)
            answer: dict[str, Any] = {"re": request["id"]}
            if request["do"] == "build" and what == "refuse":
                answer |= {"error": details[1], "exit_code": int(details[0])}
            elif request["do"] == "build":
                answer |= {
                    "device": "none", "parameters": 1, "plan": "", "numels": [1], "sizes": [[1, 1]], "realign_sizes": [1],
                    "slots": 2, "slot_bytes": 4096, "swarm_step": 0, "steps": 0, "tokens": 0, "progress": [{}],
                    "slow_digests": [""], "resumed": None, "skipped": [],
                }  # fmt: skip
            elif request["do"] == "train":
                (training.set if request["on"] else training.clear)()
            send(answer)
            if request["do"] == "stop":
                os._exit(0)


if __name__ == "__main__":
    main()

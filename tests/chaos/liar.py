"""A node that lies: what it contributes, claims or sends is wrapped, then the real command line
runs.

python liar.py LIE join --peers ...
"""

import sys
from typing import Any

from disguised import run

FACTORS = {"huge": 100.0, "flipped": -1.0, "flipped-huge": -10.0}
LIES = ("nan", *FACTORS, "stale", "clock", "shapes", "endless")
AHEAD = 10**9


def lie_in_trainer(lie: str) -> None:
    """Contributions that no honest peer brings."""
    import torch

    from lowcomm_node.trainer import building
    from lowcomm_node.trainer.capture import PairCapture
    from lowcomm_node.trainer.replica import Replica

    honest, encode = Replica.contribution, PairCapture.encode
    first: dict[int, torch.Tensor] = {}

    def scaled(replica: Any, phi: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        return honest(replica, phi, torch.lerp(phi, theta, FACTORS[lie]))

    def stale(replica: Any, phi: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        return first.setdefault(phi.numel(), honest(replica, phi, theta)).clone()

    def no_numbers(capture: Any, out: memoryview) -> tuple[int]:
        (size,) = encode(capture, out)
        out[:size] = b"\xff" * size
        return (size,)

    if lie in FACTORS:
        Replica.contribution = scaled
    elif lie == "stale":
        Replica.contribution = stale
    elif lie == "nan":
        rehearse = building.rehearse

        def rehearse_honestly(sync: Any) -> None:
            rehearse(sync)
            PairCapture.encode = no_numbers

        building.rehearse = rehearse_honestly


def lie_in_daemon(lie: str) -> None:
    """Claims and frames that no honest peer sends."""
    from lowcomm_node.net.stream import CalleeStream, CallerStream
    from lowcomm_node.status.events import Board
    from lowcomm_node.sync import frames
    from lowcomm_protocol.messages import exchange_pb2 as pb

    if lie == "clock":
        tell, position = frames.to_message, Board.position

        def ahead(offer: Any) -> Any:
            message = tell(offer)
            message.swarm_step += AHEAD
            return message

        def further(board: Any) -> tuple[int, int, float]:
            swarm_step, steps, speed = position(board)
            return swarm_step + AHEAD, steps, speed

        frames.to_message, Board.position = ahead, further

    def of_other_shape(send: Any) -> Any:
        async def lying(stream: Any, frame: Any) -> None:
            if frame.WhichOneof("kind") == "content":
                frame.content.size += 4096
            await send(stream, frame)

        return lying

    def without_end(send: Any) -> Any:
        async def lying(stream: Any, frame: Any) -> None:
            await send(stream, frame)
            while frame.WhichOneof("kind") == "chunk":
                await send(
                    stream,
                    pb.Frame(
                        chunk=pb.Chunk(offset=frame.chunk.offset, data=bytes(frame.chunk.data))
                    ),
                )

        return lying

    wrap = {"shapes": of_other_shape, "endless": without_end}.get(lie)
    for stream in (CallerStream, CalleeStream) if wrap is not None else ():
        stream.send = wrap(stream.send)


if __name__ == "__main__":
    sys.exit(run(1, lambda: lie_in_daemon(sys.argv[1]), lambda: lie_in_trainer(sys.argv[1])))

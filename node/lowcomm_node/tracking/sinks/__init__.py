"""Where a journal can be followed to, by name; each is imported only where it is asked for."""

from collections.abc import Callable

from lowcomm_node.tracking.sink import Sink
from lowcomm_protocol.spec.names import Table

SINKS: Table[Callable[[str | None], Sink]] = Table(
    "sink",
    {
        name: f"lowcomm_node.tracking.sinks.{module}"
        for name, module in {
            "tensorboard": "tensorboard:TensorBoard",
            "wandb": "wandb:WeightsAndBiases",
            "trackio": "trackio:Trackio",
            "otlp": "otlp:Collector",
        }.items()
    },
)

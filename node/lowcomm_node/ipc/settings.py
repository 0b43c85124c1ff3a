"""What a trainer is started with."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """What a trainer is started with."""

    spec: str
    """Document of the run, as it was signed."""
    amendments: str = ""
    """The chain of its amendments, as it travels; empty where there is none."""
    peer_id: str
    checkpoints: str
    """Folder of this run's checkpoints."""
    slow: str = ""
    """Folder for the slow weights of large models; empty: they stay in memory."""
    data_cache: str
    data: str | None = None
    field: str = "text"
    """Of JSON lines and Parquet, where the text lies."""
    tokenizer: str | None = None
    start: tuple[str, ...] = ()
    """Files with the weights that the run begins with; none where a checkpoint takes their
    place."""
    device: str = "auto"
    threads: int | None = None
    max_memory: float | None = None
    max_vram: float | None = None
    """GiB of the GPU's memory."""
    micro_batch: int | None = None
    """Windows that go through the model at once; None for as many as fit."""
    activation_checkpointing: str = "auto"
    home: str = "."
    max_disk: float | None = None
    """GiB that the files of the home may take."""
    keep: int = 3
    checkpoint_every: int = 100
    exchanges: int = 4
    """How many fragments may be under way at once."""

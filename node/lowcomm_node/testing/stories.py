"""Stories of exchanges, decided again: what ``rounds --story`` printed, or the log of a defect."""

import json
from pathlib import Path

from lowcomm_protocol.exchange import story
from lowcomm_protocol.exchange.base import Effect


def replay_file(file: Path) -> list[tuple[float, list[Effect]]]:
    """What a new machine decides: seconds and effects of each event, those of its start first.

    ``file``: a story, or a line of a log in JSON that carries one.
    """
    told = json.loads(file.read_text(encoding="utf-8"))
    return story.replay(json.loads(told["story"]) if "story" in told else told)

"""The guides of docs/ lead from nothing to done: every command is run as it stands there, by an
operator, a creator and a volunteer of one swarm."""

from pydoc_data.topics import topics

import pytest

from helpers.following import DEADLINE, Reader, lines
from helpers.processes import Swarm, until_exchanged

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(500),
    pytest.mark.usefixtures("unhurried"),
]
SERVE = "lowcomm-bootstrap serve"
INVITED = "LOWCOMM_INVITE=INVITE lowcomm-node join --peers ADDR"
JOIN = "lowcomm-node join --peers ADDR"
LATER = "## 8. Change it while it trains"


def test_an_operator_a_creator_and_a_volunteer_get_from_nothing_to_done(swarm: Swarm) -> None:
    texts = swarm.folder / "texts"
    texts.mkdir()
    for number in range(60):
        (texts / f"{number}.txt").write_text(f"Tea number {number} is hot. " * 200)
    reader = Reader(swarm)
    operator, volunteer = lines("operator.md", end=""), lines("volunteer.md", end="")
    creator, later = lines("creator.md", end=LATER), lines("creator.md", LATER, end="")
    assert INVITED in creator, "what the creator sends to volunteers"

    reader.follow("operator", operator[: operator.index(SERVE) + 1])
    reader.follow("creator", [line for line in creator if line != INVITED])
    # The run is by invite, so the volunteer types what the creator has sent.
    joined = volunteer.index(JOIN) + 1
    reader.follow("volunteer", [*volunteer[: joined - 1], INVITED])
    # An agent at this machine; the doctor has been here.
    reader.follow("volunteer", [one for one in lines("SKILL.md", end="") if "doctor" not in one])
    reader.follow("volunteer", volunteer[joined:])
    assert "def " in reader.told['lowcomm-node generate "def "']
    reader.follow("creator", later)
    # Somebody else's machine, which has been examined already.
    checks = operator[operator.index(SERVE) + 1 :]
    reader.follow("volunteer", [line for line in checks if line not in reader.told])

    for home, node in reader.nodes.items():
        assert node.child.wait(60) == 0, f"{home} has left\n{node.output[-2000:]}"
    for export in ("my-model", "tea"):
        assert (swarm.folder / export / "config.json").exists()


def test_a_creator_packs_a_folder_and_volunteers_need_no_text(swarm: Swarm) -> None:
    reader = Reader(swarm)
    (swarm.folder / "texts").mkdir()
    for name, text in topics.items():
        (swarm.folder / "texts" / f"{name}.txt").write_text(text)
    pack, *_ = lines("data.md", "## Pack it")
    reader.follow("operator", [SERVE])
    reader.follow("creator", [pack, *lines("data.md", "## Train on it")])
    reader.follow("volunteer", [JOIN])
    creator, volunteer = reader.nodes["creator"], reader.nodes["volunteer"]
    until_exchanged([creator, volunteer], 1, what="both train and exchange")
    assert not list((volunteer.home / "data").glob("*")), "it has tokenized nothing"
    volunteer.until(lambda status: "data.shares" in str(status["run"]), "the amendment", DEADLINE)

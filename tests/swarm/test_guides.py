"""The guides of docs/ lead from nothing to done: every command is run as it stands there, by an
operator, a creator and a volunteer of one swarm."""

import json
from itertools import product
from pydoc_data.topics import topics

import pytest

from helpers.following import DEADLINE, Reader, lines
from helpers.open_weights import SENTENCES, TEMPLATE
from helpers.open_weights import write_folder as write_weights
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


def test_friends_fine_tune_open_weights_and_take_them_home(swarm: Swarm) -> None:
    write_weights(swarm.folder / "llama", chat_template=TEMPLATE)
    with (swarm.folder / "talks.jsonl").open("w") as file:
        for number, sentence in product(range(400), SENTENCES):
            asked = {"role": "user", "content": f"Say line {number}"}
            said = {"role": "assistant", "content": f"{number}: {sentence}"}
            file.write(json.dumps({"messages": [asked, said]}) + "\n")
    reader = Reader(swarm)
    every = lines("finetune.md", end="")
    join = next(line for line in every if "--weights llama" in line)
    reader.follow("operator", [SERVE])
    before, after = every[1 : every.index(join) + 1], every[every.index(INVITED) + 1 :]
    reader.follow("creator", before)
    for friend in ("ada", "bob"):
        reader.follow(friend, [INVITED])
    until_exchanged(list(reader.nodes.values()), 1, what="all three train and exchange")
    reader.follow("ada", after)
    compared = reader.told['lowcomm-node generate --chat "Who are you?" --compare']
    assert compared.count("by the ") == 2
    [adapter, *_] = (swarm.folder / "ada/runs").glob("*/checkpoints/step-*/weights.safetensors")
    whole = swarm.folder / "llama" / "model.safetensors"
    assert adapter.stat().st_size < whole.stat().st_size
    for export, file in (("adapter", "adapter_config.json"), ("hf", "config.json")):
        assert "adapter of rank 16" in (swarm.folder / f"talks-{export}/README.md").read_text()
        assert (swarm.folder / f"talks-{export}" / file).exists()
    assert "FROM ./talks-f32.gguf" in (swarm.folder / "talks-gguf" / "Modelfile").read_text()


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

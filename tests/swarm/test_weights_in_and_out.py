"""Open weights in, and out again: real nodes, of which one alone has the files."""

import json
import shutil
from pathlib import Path

import pytest
import tomlkit

from helpers.open_weights import write_folder, write_text
from helpers.processes import Node, Swarm, assert_one_clear_line, run

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


def created(swarm: Swarm, folder: Path) -> Path:
    """Publish the run that ``init --from`` writes for a folder, made short and quick."""
    file = swarm.folder / "run.toml"
    done = run("lowcomm_node", "init", "--from", str(folder), "--method", "noloco", str(file))
    assert done.returncode == 0, done.stderr
    spec = tomlkit.parse(file.read_text())
    spec["run"].update({"steps": 100_000, "work": 0})
    spec["data"]["source"] = "local"
    spec["model"]["context"] = 16
    spec["train"].update({"batch": 4, "evaluate_every": 50, "warmup": 0, "learning_rate": 0.003})
    spec["sync"].update({"interval": 5, "min_steps": 1})
    file.write_text(tomlkit.dumps(spec))
    home = str(swarm.folder / "ada")
    done = run(
        "lowcomm_node", "create", str(file), "--peers", swarm.address, "--home", home,
        "--tokenizer", str(folder / "tokenizer.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--weights DIR" in done.stdout and "--tokenizer" not in done.stdout
    return file


def files_of(node: Node) -> dict[str, bytes]:
    """The files of the run in a home."""
    [home] = (node.home / "runs").iterdir()
    paths = [home / "tokenizer.json", *(home / "start").glob("*")]
    return {path.name: path.read_bytes() for path in paths}


def test_open_weights_reach_nodes_without_a_file_train_and_come_out_again(swarm: Swarm) -> None:
    folder, text = write_folder(swarm.folder / "open"), write_text(swarm.folder / "tea.txt")
    swarm.bootstrap()
    created(swarm, folder)

    # Without a peer that has the files a node waits, and says for what.
    bob = swarm.node("bob", "--data", str(text))
    bob.until(
        lambda s: "waiting for tokenizer.json, which the run needs" in (s["waiting"] or ""),
        "the reason why it waits",
    )

    # Another file of the same size is refused by name.
    wrong = swarm.folder / "wrong"
    shutil.copytree(folder, wrong)
    data = (wrong / "model.safetensors").read_bytes()
    (wrong / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused = run(
        "lowcomm_node", "join", "--json", "--home", str(swarm.folder / "ada"),
        "--peers", swarm.address, "--data", str(text), "--weights", str(wrong),
    )  # fmt: skip
    assert_one_clear_line(refused, 78, str(wrong / "model.safetensors"), "is not the", "SHA-256")

    ada = swarm.node("ada", "--data", str(text), "--weights", str(folder))
    bob.until_completed(2)
    wanted = {
        name: (folder / name).read_bytes() for name in ("tokenizer.json", "model.safetensors")
    }
    assert files_of(bob) == wanted

    # Who had them from others hands them on.
    assert ada.end() == 0
    eve = swarm.node("eve", "--data", str(text))
    eve.until_completed(1)
    assert files_of(eve) == wanted

    out = swarm.folder / "out"
    done = run(
        "lowcomm_node", "checkpoint", "export", str(out), "--home", str(swarm.folder / "ada")
    )
    assert done.returncode == 0, done.stderr
    before, after = (json.loads((one / "config.json").read_text()) for one in (folder, out))
    same = {"model_type", "hidden_size", "num_key_value_heads", "vocab_size", "tie_word_embeddings"}
    assert {key: before[key] for key in same} == {key: after[key] for key in same}
    assert (out / "tokenizer.json").read_bytes() == wanted["tokenizer.json"]
    again = run("lowcomm_node", "init", "--from", str(out), str(swarm.folder / "again.toml"))
    assert again.returncode == 0, again.stderr

"""Sign one run for each method and each kind of admission, as golden files of a release.

``python tests/golden/make.py RELEASE`` in a checkout of that release writes
``tests/golden/RELEASE``: a signed run a file, and in ``expected.json`` the run id and all settings
of each, as that release reads them. Every later release must read the same
(``tests/unit/spec/test_document.py``). For a release from before this file: PYTHONPATH=OLD/protocol
python tests/golden/make.py."""

import json
import sys
from pathlib import Path

from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.presets import PRESETS
from lowcomm_protocol.spec.run import parse_toml, read_signed_run, sign_run

CREATOR, MEMBER = Identity(b"g" * 32), Identity(b"m" * 32)
OTHER_VALUES = f"""
[run]
name = "other-values"
description = "Größe, \\u4e16\\u754c"
seed = 9223372036854775807
steps = 12345
start_peers = 3
admission = "list"
members = ["{MEMBER.peer_id}"]
[model]
vocab = 32000
layers = 6
width = 384
heads = 6
feed_forward = 1024
context = 512
tied = true
rope_base = 500000.0
[data]
source = "local"
tokenizer = "local"
[train]
optimizer = "muon"
learning_rate = 1e-5
adamw_share = 0.25
muon_momentum = 0.95
warmup = 7
final_learning_rate = 0.0
batch = 16
weight_decay = 0.05
beta1 = 0.8
beta2 = 0.999
clip = 1e6
evaluate_every = 50
[sync]
method = "streaming-diloco"
interval = 16
fragments = 8
pattern = "sequential"
overlap = 2
codec = "q1"
error_feedback = false
mean = "median"
group = 4
min_steps = 3
outer = "noloco"
outer_lr = 0.9
momentum = 0.25
merge = "shift"
mix = 0.5
"""


def texts() -> dict[str, str]:
    """The runs, by the names of their files."""
    methods = {
        method: f'[run]\nname = "{method}"\n[sync]\nmethod = "{method}"\n' for method in PRESETS
    }
    return methods | {
        "invite": '[run]\nname = "invite"\nadmission = "invite"\n',
        "list": f'[run]\nname = "list"\nadmission = "list"\n'
        f'members = ["{MEMBER.peer_id}", "{CREATOR.peer_id}"]\n',
        "other-values": OTHER_VALUES,
    }


def main(release: str) -> None:
    """Write the files of a release."""
    folder, expected = Path(__file__).parent / release, {}
    folder.mkdir(exist_ok=True)
    for name, text in texts().items():
        data = sign_run(parse_toml(text), CREATOR).to_bytes()
        (folder / f"{name}.json").write_bytes(data)
        run = read_signed_run(data)
        expected[name] = {"run_id": run.run_id, "settings": run.spec.model_dump(mode="json")}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])

"""A small model as a folder of Hugging Face's: random weights, and a tokenizer of a few merges."""

import json
from pathlib import Path
from typing import Any

from lowcomm_node.models.base import build_model
from lowcomm_node.models.transformer import FAMILY
from lowcomm_protocol.spec.models import TransformerSettings

VOCAB = 300
LLAMA: dict[str, Any] = {
    "vocab": VOCAB,
    "layers": 2,
    "width": 32,
    "heads": 4,
    "kv_heads": 2,
    "feed_forward": 48,
    "context": 64,
    "qk_norm": False,
    "tied": True,
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""For conversations."""
SENTENCES = (
    "The kettle sings, and the tea is nearly ready.\n",
    "A fox went over the hill to see what was there.\n",
    "Rain falls on the roof, and nobody minds at all.\n",
)


def write_text(path: Path, copies: int = 400) -> Path:
    """Text to train on: three sentences, again and again."""
    path.write_text("".join(SENTENCES) * copies)
    return path


def write_tokenizer(path: Path) -> Path:
    """A byte-level BPE, trained on the sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 10,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(path))
    return path


def write_folder(folder: Path, seed: int = 5, chat_template: str = "", **settings: Any) -> Path:
    """The folder, as transformers writes it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    model = build_model(TransformerSettings.model_validate(LLAMA | settings), seed)
    form = FAMILY.huggingface(TransformerSettings.model_validate(LLAMA | settings))
    assert form is not None
    tensors = {form.names[name]: one.detach() for name, one in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(form.config))
    write_tokenizer(folder / "tokenizer.json")
    if chat_template:
        says = {"chat_template": chat_template, "eos_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(says))
    return folder

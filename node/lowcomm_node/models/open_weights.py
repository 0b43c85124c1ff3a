"""Weights that others have published, as a local folder of Hugging Face's: read as data alone.

config.json                      what the model is (``reading.py`` of its family)
model.safetensors, or shards     its weights; model.safetensors.index.json lists shards

No code and no pickle is read, and no file outside of the folder.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lowcomm_node.errors import ConfigError
from lowcomm_node.models.base import Model, family_of
from lowcomm_node.models.configs import (
    CONTEXT,
    KINDS,
    Read,
    read_config,
    read_library_config,
    wrong,
)
from lowcomm_node.storage.state_file import is_finite
from lowcomm_protocol.spec.architectures import ARCHITECTURES, is_mixture
from lowcomm_protocol.spec.models import NO_MIXTURES
from lowcomm_protocol.spec.sections import MAX_FILES, ModelSettings

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_CONFIG, MAX_INDEX = 1024 * 1024, 16 * 1024 * 1024
"""Bytes."""
_DTYPES = ("F32", "F16", "BF16")
_IGNORED = (r"rotary_emb\.inv_freq$", r"\.masked_bias$", r"^(lm_head|embed_out)\.weight$")
"""Tensors that older files have, and that follow from the settings; a tied head may be stored."""


def read_json(path: Path, most: int) -> dict[str, Any]:
    """The object of a file of at most ``most`` bytes. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise ConfigError(f"{path} has more than {most:,} bytes: it is refused.")
        content = json.loads(data)
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read ({error.strerror}): name a folder of Hugging Face's with "
            "config.json and model.safetensors."
        ) from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no object of JSON: load it anew.")
    return cast("dict[str, Any]", content)


def settings_of(folder: Path) -> Read:
    """What model a folder holds: one of ours, else one that transformers computes.

    Raises ConfigError.
    """
    path = folder / CONFIG
    config = read_json(path, MAX_CONFIG)
    type_ = config.get("model_type")
    if isinstance(type_, str) and type_ in KINDS:
        return _not_narrowed(read_config(config, str(path)), config, str(path))
    if isinstance(type_, str) and type_ in ARCHITECTURES:
        return read_library_config(config, str(path))
    reason = NO_MIXTURES if isinstance(type_, str) and is_mixture(type_) else "not known"
    known = ", ".join(sorted({*KINDS, *ARCHITECTURES}))
    raise wrong(str(path), "model_type", type_, f"{reason}: choose a model of {known}")


def _not_narrowed(ours: Read, config: Mapping[str, Any], source: str) -> Read:
    """A model of ours, or the same as transformers computes it, where a sliding window would narrow
    our context. Raises ConfigError."""
    positions, window = config.get("max_position_embeddings") or CONTEXT, ours.longest
    if window >= min(CONTEXT, positions):
        return ours
    why = f"layers look back {window} tokens, which lowcomm's own transformer can't"
    with suppress(ConfigError):
        found = read_library_config(config, source)
        return replace(
            found,
            note=f'kind = "transformers", as {why}: `checkpoint export --format gguf` does not '
            "write it",
        )
    return replace(ours, note=f"context = {window}, as {why}; nor does transformers fit this model")


def files_of(folder: Path) -> list[Path]:
    """The files of a folder that hold weights, sorted by name. Raises ConfigError."""
    if (folder / INDEX).exists():
        places = read_json(folder / INDEX, MAX_INDEX).get("weight_map")
        names = cast("dict[str, object]", places).values() if isinstance(places, dict) else ()
        found = sorted({name for name in names if isinstance(name, str)})
        plain = all(Path(name).name == name and name.endswith(".safetensors") for name in found)
        if not found or len(found) > MAX_FILES or not plain:
            raise ConfigError(
                f"{folder / INDEX}: weight_map must name 1 to {MAX_FILES} files "
                "NAME.safetensors of this folder: load it anew."
            )
        return [folder / name for name in found]
    if not (folder / WEIGHTS).exists():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        raise ConfigError(
            f"{folder} holds no {WEIGHTS} and no {INDEX}"
            + (", only weights in pickle, which can run code and is never read" if pickled else "")
            + ": name a folder with weights in safetensors."
        )
    return [folder / WEIGHTS]


def check_weights(settings: ModelSettings, files: Sequence[Path]) -> int:
    """How many values of a model of these settings files hold.

    Only their headers are read. Raises ConfigError if they hold another model.
    """
    with _Opened(settings, files) as opened:
        return sum(opened.check(name, shape) for name, shape in _shapes(settings).items())


def load_weights(model: Model, files: Sequence[Path]) -> None:
    """Set the weights of a model from files, which are mapped, one tensor after the other.

    Raises ConfigError.
    """
    with _Opened(model.settings, files) as opened, torch.no_grad():
        for name, parameter in model.named_parameters():
            opened.check(name, tuple(parameter.shape))
            tensor = opened.tensor(name)
            if not is_finite(tensor):
                raise ConfigError(
                    f"{opened.told(name)} holds NaN or infinity: choose other weights."
                )
            parameter.copy_(tensor)


class _Opened:
    """Context: the tensors of files, by the names of a model of ours."""

    def __init__(self, settings: ModelSettings, files: Sequence[Path]) -> None:
        self._settings = settings
        self._files = files
        self._stack = ExitStack()
        self._homes: dict[str, Any] = {}

    def __enter__(self) -> "_Opened":
        form = family_of(self._settings).huggingface(self._settings)
        if form is None:
            raise ConfigError(
                f"model.kind = {self._settings.kind!r}: transformers has no such model, so it "
                "can't begin with weights from elsewhere."
            )
        self._ignored = re.compile("|".join((*_IGNORED, *form.ignored)))
        with self._stack:
            for file in self._files:
                opened = self._stack.enter_context(_mapped(file))
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    if name in self._homes:
                        raise ConfigError(f"{file}: {name} is in another file, too: load it anew.")
                    self._homes[name] = opened
            self._names = form.names
            if not any(name.startswith(f"{form.base}.") for name in self._homes):
                bare = (
                    (ours, name.removeprefix(f"{form.base}.")) for ours, name in form.names.items()
                )
                self._names = dict(bare)
            self._check_names()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def told(self, name: str) -> str:
        """The name of a tensor in the files."""
        return self._names[name]

    def check(self, name: str, shape: tuple[int, ...]) -> int:
        """How many values a tensor has. Raises ConfigError if it is of another shape or type."""
        told = self._homes[self._names[name]].get_slice(self._names[name])
        found, dtype = tuple(told.get_shape()), told.get_dtype()
        if found != shape:
            raise ConfigError(
                f"{self._names[name]} is {list(found)} in the weights, [model] asks for "
                f"{list(shape)}: use the [model] that `lowcomm-node init --from` writes."
            )
        if dtype not in _DTYPES:
            raise ConfigError(
                f"{self._names[name]} is stored as {dtype}: known are {', '.join(_DTYPES)}; choose "
                "weights that are not quantized."
            )
        count = 1
        for length in shape:
            count *= length
        return count

    def tensor(self, name: str) -> Tensor:
        """A tensor; it lies in the file until it is read."""
        return self._homes[self._names[name]].get_tensor(self._names[name])

    def _check_names(self) -> None:
        wanted = set(self._names.values())
        missing = sorted(wanted - self._homes.keys())
        if missing:
            raise ConfigError(
                f"The weights lack {_some(missing)}: name a folder with all files of the model."
            )
        unwanted = self._homes.keys() - wanted
        if more := sorted(name for name in unwanted if not self._ignored.search(name)):
            raise ConfigError(
                f"The weights hold {_some(more)}, which [model] has no place for: it is another "
                "model than config.json says."
            )


@contextmanager
def _mapped(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is no file of safetensors ({error}): load it anew.") from None


def _shapes(settings: ModelSettings) -> Mapping[str, tuple[int, ...]]:
    """Of the parameters, by name; nothing is allocated."""
    with torch.device("meta"):
        model = family_of(settings).blank(settings)
    return {name: tuple(one.shape) for name, one in model.named_parameters()}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

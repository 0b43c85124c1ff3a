"""Published weights in a local folder of Hugging Face's: read as data alone.

config.json                      settings of the model (``configs.py``)
model.safetensors, or shards     its weights; model.safetensors.index.json lists shards

No code and no pickle is read, and no file outside of the folder.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lowcomm_node.errors import ConfigError
from lowcomm_node.models.base import Model, family_of
from lowcomm_node.models.configs import Read, read_config
from lowcomm_node.storage.state_file import is_finite
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
        raise ConfigError(f"{path} is no object of JSON: download it again.")
    return cast("dict[str, Any]", content)


def settings_of(folder: Path) -> Read:
    """Settings of the model in a folder. Raises ConfigError."""
    return read_config(read_json(folder / CONFIG, MAX_CONFIG), str(folder / CONFIG))


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
                "NAME.safetensors of this folder: download it again."
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
    """Number of values in files with a model of these settings; reads their headers alone.

    Raises ConfigError if they hold another model.
    """
    with torch.device("meta"):  # shapes alone
        model = family_of(settings).blank(settings)
    with _opened(settings, files) as tensors:
        for name, parameter in model.named_parameters():
            _check(*tensors[name], parameter.shape)
    return sum(parameter.numel() for parameter in model.parameters())


def load_weights(model: Model, files: Sequence[Path]) -> None:
    """Set the weights of a model from files, which are mapped, one tensor after the other.

    Raises ConfigError.
    """
    parameters = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, tensor in read_weights(model.settings, shapes, files):
            parameters[name].copy_(tensor)


def read_weights(
    settings: ModelSettings, shapes: Mapping[str, Sequence[int]], files: Sequence[Path]
) -> Iterator[tuple[str, Tensor]]:
    """Our names and tensors of files, one after the other, as they are stored.

    Raises ConfigError.
    """
    with _opened(settings, files) as tensors:
        for ours, shape in shapes.items():
            name, file = tensors[ours]
            _check(name, file, shape)
            tensor = file.get_tensor(name)
            if not is_finite(tensor):
                raise ConfigError(f"{name} holds NaN or infinity: choose other weights.")
            yield ours, tensor


@contextmanager
def _opened(
    settings: ModelSettings, files: Sequence[Path]
) -> Iterator[Mapping[str, tuple[str, Any]]]:
    """Context: by the name of each of our parameters its name in the files, and the open file."""
    form = family_of(settings).huggingface(settings)
    if form is None:
        raise ConfigError(
            f"model.kind = {settings.kind!r}: transformers has no such model, so it can't begin "
            "with weights from elsewhere."
        )
    homes: dict[str, Any] = {}
    with ExitStack() as stack:
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, "pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f"{file} is no file of safetensors ({error}): download it again."
                ) from None
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                if name in homes:
                    raise ConfigError(f"{file}: {name} is in another file, too: download it again.")
                homes[name] = opened
        names, prefix = dict(form.names), f"{form.base}."
        if not any(name.startswith(prefix) for name in homes):
            names = {ours: name.removeprefix(prefix) for ours, name in names.items()}
        expected, ignored = set(names.values()), re.compile("|".join((*_IGNORED, *form.ignored)))
        if missing := sorted(expected - homes.keys()):
            raise ConfigError(
                f"The weights lack {_some(missing)}: name a folder with all files of the model."
            )
        if more := sorted(one for one in homes.keys() - expected if not ignored.search(one)):
            raise ConfigError(
                f"The weights hold {_some(more)}, which [model] has no place for: it is another "
                "model than config.json says."
            )
        yield {ours: (name, homes[name]) for ours, name in names.items()}


def _check(name: str, file: Any, shape: Sequence[int]) -> None:
    """Raise ConfigError if a tensor is of another shape or type."""
    tensor = file.get_slice(name)
    stored, dtype = list(tensor.get_shape()), tensor.get_dtype()
    if stored != list(shape):
        raise ConfigError(
            f"{name} is {stored} in the weights, [model] asks for {list(shape)}: use the [model] "
            "that `lowcomm-node init --from` writes."
        )
    if dtype not in _DTYPES:
        raise ConfigError(
            f"{name} is stored as {dtype}: known are {', '.join(_DTYPES)}; choose weights that are "
            "not quantized."
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

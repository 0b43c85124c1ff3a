"""Uploads the files of an export to the Hugging Face Hub, by the owner's own login.

The library takes the token from the environment (HF_TOKEN) or its own login, never from a run or a
home.
"""

import os
from pathlib import Path
from typing import Any

from lowcomm_node.errors import ConfigError, NodeError
from lowcomm_node.system.command import load_optional

PATTERNS = ("*.json", "*.safetensors", "*.gguf", "Modelfile", "README.md")


def publish(folder: Path, repository: str, public: bool) -> str:
    """Upload an export to a repository, which is created where there is none; its address.

    Raises ConfigError, NodeError.
    """
    files = [file for pattern in PATTERNS for file in folder.glob(pattern) if file.is_file()]
    if not any(file.suffix in (".safetensors", ".gguf") for file in files):
        raise ConfigError(
            f"{folder} holds no export: write one with `lowcomm-node checkpoint export {folder}`."
        )
    links = sorted(file.name for file in files if file.is_symlink())
    if links:
        raise ConfigError(f"{folder}: {links[0]} is a link: publish a folder of plain files.")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    for part in (".utils", ".errors", ""):
        hub = load_optional(f"huggingface_hub{part}", "`checkpoint publish`", "hub")
    hub.utils.disable_progress_bars()
    api = hub.HfApi(library_name="lowcomm")
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=list(PATTERNS),
            commit_message="Upload a model that was trained with lowcomm",
        )
    except hub.errors.HFValidationError as error:
        raise ConfigError(f"{repository[:120]!r} is no name of a repository: {error}.") from None
    except Exception as error:
        raise _failure(hub, repository, error) from None
    return str(address)


def _failure(hub: Any, repository: str, error: Exception) -> NodeError:
    """The error to report, without the token."""
    code = getattr(getattr(error, "response", None), "status_code", None)
    if code in (401, 403) or isinstance(error, hub.errors.LocalTokenNotFoundError):
        return ConfigError(
            f"The Hub does not let this login write to {repository}: log in with `hf auth login`, "
            "or set HF_TOKEN to a token that may write."
        )
    reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    token = hub.get_token()
    if token:
        reason = reason.replace(token, "...")
    return NodeError(
        f"{repository} could not be uploaded ({reason}): try again, what has arrived is kept."
    )

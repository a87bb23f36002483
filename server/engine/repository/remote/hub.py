"""Models of the Hugging Face Hub: `hf://organisation/name`, or a file of it, `hf://organisation/name/onnx/model.onnx`.

huggingface_hub downloads them, with its own variables (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). The download is served
as a folder of model folders, or as one model. `@revision` behind the name chooses a commit or branch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from inferd.backends.installing import pip_install
from inferd.server.errors import ConfigError

HUB = "hf://"
_FORM = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<file>[^\0]+?))?/?")
WANTED = ("*.pbtxt", "*.onnx", "*.onnx_data", "*.onnx.data", "*.pt", "*.pt2", "*.plan", "[0-9]*/*", "*/[0-9]*/*")
"""Patterns of the files of a repository that are downloaded; weights in other formats are not."""


def name_of(url: str) -> str:
    """The default name of the model: that of the repository on the hub."""
    return _parsed(url)["repo"].partition("/")[2]


def _parsed(url: str) -> re.Match[str]:
    found = _FORM.fullmatch(url)
    if found is None or (found["file"] and ".." in found["file"].split("/")):
        raise ConfigError(
            f"model-repository: expected hf://organisation/name or hf://organisation/name/file, got {url}"
        )
    return found


def download(url: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Download the folder or file of a URL; its path on this machine. Blocks for as long as that takes.

    It lies below INFERD_CACHE, or ~/.cache/inferd; files that are there already are not downloaded again.

    Raises:
        ConfigError: the URL has another form, huggingface_hub is not installed, or the download fails.
    """
    found = _parsed(url)
    try:
        import huggingface_hub as hub
    except ImportError:
        raise ConfigError(f"{url}: models of the hub need huggingface_hub: {pip_install('inferd[hf]')}") from None
    cache = Path(environment.get("INFERD_CACHE") or Path.home() / ".cache" / "inferd")
    revision = found["revision"]
    folder = cache / "hub" / f"{found['repo'].replace('/', '--')}@{revision or 'main'}"
    patterns = [f"{found['file']}*"] if found["file"] else list(WANTED)  # with external data of an ONNX file
    try:
        hub.snapshot_download(found["repo"], revision=revision, local_dir=folder, allow_patterns=patterns)
    except Exception as error:  # huggingface_hub also raises exceptions of the libraries that it uses
        text = str(error).strip().splitlines()
        raise ConfigError(f"{url}: {text[0] if text else type(error).__name__}") from None
    path = folder / found["file"] if found["file"] else folder
    if not path.exists():
        raise ConfigError(f"{url}: there is no such file")
    return path

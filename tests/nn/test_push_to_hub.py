"""A model on the Hugging Face Hub: what is uploaded, without a network."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from bert_unpad.nn import PRESETS, EncoderConfig, EncoderForPreTraining, ReplacedTokenPreTraining

SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
}


class Hub:
    """Stands in for HfApi; keeps the calls and the names of the uploaded files."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.files: set[str] = set()

    def __call__(self, token):
        self.calls.append(("token", token))
        return self

    def create_repo(self, repo_id, *, private, exist_ok):
        self.calls.append(("create", repo_id, private, exist_ok))
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.calls.append(("upload", repo_id, commit_message))
        folder = Path(folder_path)
        files = (path for path in folder.rglob("*") if path.is_file())
        self.files = {str(path.relative_to(folder)) for path in files}
        self.again = EncoderForPreTraining.from_pretrained(folder)
        return SimpleNamespace(commit_url="https://hub/commit")


@pytest.mark.parametrize("objective", ["mlm", "rtd"])
def test_a_model_is_uploaded_as_it_is_saved(monkeypatch, objective):
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    files = {"config.json", "model.safetensors"}
    if objective == "mlm":
        model = EncoderForPreTraining(EncoderConfig(**SIZES))
    else:
        config = EncoderConfig(**PRESETS["electra-small"] | SIZES)
        generator = dataclasses.replace(config, heads=("mlm",))
        model = ReplacedTokenPreTraining(config, generator)
        files |= {f"generator/{name}" for name in files}
    url = model.push_to_hub("words", private=True, token="secret", commit_message="First")
    assert url == "https://hub/commit"
    assert hub.calls == [
        ("token", "secret"),
        ("create", "words", True, True),
        ("upload", "me/words", "First"),
    ]
    assert hub.files == files
    assert hub.again.config.hidden_size == 8

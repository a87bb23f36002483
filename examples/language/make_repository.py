"""Make a Triton model repository with a language model, a chat that calls it word by word, and a text classifier.

    python make_repository.py DIR [--steps N] [--epochs N] [--sentiment-model FILE]

Both networks are small and are trained on Python's own documentation, which takes about two minutes on two cores.
Existing files that are newer than these scripts are kept. Another `model.py`, written for Triton, can take the place of
the classifier of this folder.
"""

from __future__ import annotations

import argparse
import shutil
import warnings
from pathlib import Path

import torch
from corpus import Words, questions, sentences

HERE = Path(__file__).parent

LANGUAGE_CONFIG = """\
# Scores of every word as the next one.
name: "ibuddha_chitchat"
platform: "pytorch_libtorch"
max_batch_size: 64
input [
  { name: "INPUT__0" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "INPUT__1" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "INPUT__2" data_type: TYPE_INT64 dims: [ -1 ] }
]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 13088 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { }
parameters { key: "INFERENCE_MODE" value { string_value: "true" } }
"""

CHAT_CONFIG = """\
# Answers a sentence, one word at a time.
name: "chat"
backend: "python"
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "word" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
model_transaction_policy { decoupled: true }
"""

SENTIMENT_CONFIG = """\
# Tells sentences that speak of what goes wrong from others.
name: "sentiment"
backend: "python"
max_batch_size: 64
input [ { name: "text" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "prob" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }
"""


def is_current(*files: Path) -> bool:
    """Whether all files exist and are newer than their sources."""
    newest = max(source.stat().st_mtime for source in HERE.glob("*.py"))
    return all(file.exists() and file.stat().st_mtime >= newest for file in files)


def make_language_model(repository: Path, answers: dict[str, str], words: Words, steps: int) -> None:
    """Train it, and write it as TorchScript."""
    folder = repository / "ibuddha_chitchat"
    model = folder / "1" / "model.pt"
    if is_current(model, folder / "config.pbtxt"):
        print("ibuddha_chitchat: up to date")
        return
    import chat_model

    net, loss = chat_model.train(answers, words, steps)
    model.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated upstream, and what is served all over the world
        torch.jit.script(net).save(str(model))
    (folder / "config.pbtxt").write_text(LANGUAGE_CONFIG)
    print(f"ibuddha_chitchat: trained, {loss:.2f} nats per word")


def make_chat(repository: Path, words: Words) -> None:
    """The program that calls it."""
    version = repository / "chat" / "1"
    version.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "chat" / "model.py", version)
    shutil.copy(HERE / "corpus.py", version)
    words.save(version / "words.json")
    (repository / "chat" / "config.pbtxt").write_text(CHAT_CONFIG)
    print("chat: written")


def make_sentiment(repository: Path, texts: list[str], epochs: int, program: Path) -> None:
    """Train the classifier, and write it beside the program that runs it."""
    version = repository / "sentiment" / "1"
    version.mkdir(parents=True, exist_ok=True)
    shutil.copy(program, version / "model.py")
    config = repository / "sentiment" / "config.pbtxt"
    if is_current(version / "sentiment" / "config.json", config):
        print("sentiment: up to date")
        return
    import sentiment_model

    accuracy = sentiment_model.train(texts, version / "sentiment", epochs)
    config.write_text(SENTIMENT_CONFIG)
    print(f"sentiment: trained, {accuracy:.1%} of held-out sentences told right")


def main() -> None:
    """Make the repository that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="the model repository, made if it is not there")
    parser.add_argument("--steps", type=int, default=800, help="to train the language model for")
    parser.add_argument("--epochs", type=int, default=4, help="to train the classifier for")
    parser.add_argument("--sentiment-model", type=Path, default=HERE / "sentiment" / "model.py")
    arguments = parser.parse_args()
    answers = questions()
    words = Words.of([*answers, *answers.values()])
    make_language_model(arguments.directory, answers, words, arguments.steps)
    make_chat(arguments.directory, words)
    make_sentiment(arguments.directory, sentences(), arguments.epochs, arguments.sentiment_model)


if __name__ == "__main__":
    main()

"""Add two ensembles to the repository that examples/digits has made: pictures of digits, and topics of sentences.

    python make_repository.py DIR

Each of them is a chain of three models: a program that reads the input of people (`model.py`), a network (ONNX for the
digits, TorchScript for the topics), and a small ONNX model that names the best class. The topic network is trained
here, in seconds. Existing files that are newer than these scripts are kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import torch
from onnx import TensorProto, helper
from topics_data import LABELS, load
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))
from making import accuracy, is_current, onnx_model, torchscript, train, write

HERE = Path(__file__).parent
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SEED = 7
EPOCHS = 30
BATCH = 32
WIDTH = 64

READ_CONFIG = """\
name: "{name}"
backend: "python"
max_batch_size: 64
input {{ name: "{given}" data_type: TYPE_STRING dims: [ 1 ] }}
output {{ {gives} }}
instance_group {{ count: 1 kind: KIND_CPU }}
dynamic_batching {{ }}
"""

NETWORK_CONFIG = """\
# The probability of each topic for the numbers of a sentence's words.
name: "topics_network"
platform: "pytorch_libtorch"
max_batch_size: 64
input { name: "words" data_type: TYPE_INT64 dims: [ 40 ] }
output { name: "probabilities" data_type: TYPE_FP32 dims: [ 5 ] }
instance_group { count: 1 kind: KIND_CPU }
dynamic_batching { }
"""

NAME_CONFIG = """\
# The best class by its name, and its probability.
name: "{name}"
platform: "onnxruntime_onnx"
max_batch_size: 64
input {{ name: "probabilities" data_type: TYPE_FP32 dims: [ {classes} ] }}
output [
  {{ name: "name" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "probability" data_type: TYPE_FP32 dims: [ 1 ] }}
]
instance_group {{ count: 1 kind: KIND_CPU }}
dynamic_batching {{ }}
"""

ENSEMBLE_CONFIG = """\
# {what}
name: "{name}"
platform: "ensemble"
max_batch_size: 64
input {{ name: "{given}" data_type: TYPE_STRING dims: [ 1 ] }}
output [
  {{ name: "{gives}" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "probability" data_type: TYPE_FP32 dims: [ 1 ] }}
]
ensemble_scheduling {{
  step [
    {{
      model_name: "{read}"
      model_version: -1
      input_map {{ key: "{given}" value: "{given}" }}
      output_map {{ key: "{prepared}" value: "{prepared}" }}
    }},
    {{
      model_name: "{network}"
      model_version: -1
      input_map {{ key: "{prepared}" value: "{prepared}" }}
      output_map {{ key: "probabilities" value: "probabilities" }}
    }},
    {{
      model_name: "{say}"
      model_version: -1
      input_map {{ key: "probabilities" value: "probabilities" }}
      output_map {{ key: "name" value: "{gives}" }}
      output_map {{ key: "probability" value: "probability" }}
    }}
  ]
}}
"""


class TopicNet(nn.Module):
    """The mean of its words' vectors, and a layer: (n, 40) word numbers to the probabilities (n, 5)."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(words, WIDTH, padding_idx=0)
        self.layer = nn.Linear(WIDTH, len(LABELS))

    def scores(self, words: torch.Tensor) -> torch.Tensor:
        """The trained output: the logarithms of the probabilities up to a constant."""
        there = (words != 0).to(torch.float32).unsqueeze(2)
        mean = (self.vectors(words) * there).sum(1) / there.sum(1).clamp(min=1.0)
        return self.layer(torch.relu(mean))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """What is served."""
        return torch.softmax(self.scores(words), 1)


def reader() -> ModuleType:
    """The program of the first step, for its `split` and `encode`."""
    sys.modules.setdefault("triton_python_backend_utils", ModuleType("triton_python_backend_utils"))
    spec = importlib.util.spec_from_file_location("topics_read", HERE / "topics_read" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(numbers: dict[str, int], program: ModuleType) -> tuple[TopicNet, float]:
    """A network, and the share of held-out sentences that it classifies correctly; the same each time on the same
    machine."""
    (words, topics), (held_out, truth) = (
        (torch.tensor([program.encode(text, numbers) for text, _ in pairs]), torch.tensor([t for _, t in pairs]))
        for pairs in load()
    )
    torch.manual_seed(SEED)
    net = TopicNet(len(numbers) + 2)
    train(net, words, topics, epochs=EPOCHS, batch=BATCH, rate=5e-3)
    return net, accuracy(net, held_out, truth)


def naming(labels: tuple[str, ...]) -> bytes:
    """An ONNX model that gives the best class by its name."""
    names = helper.make_tensor("names", TensorProto.STRING, [len(labels)], [label.encode() for label in labels])
    nodes = [
        helper.make_node("ArgMax", ["probabilities"], ["best"], axis=1, keepdims=1),
        helper.make_node("Constant", [], ["labels"], value=names),
        helper.make_node("Gather", ["labels", "best"], ["name"]),
        helper.make_node("ReduceMax", ["probabilities"], ["probability"], axes=[1], keepdims=1),
    ]
    given = helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["N", len(labels)])
    gives = [
        helper.make_tensor_value_info("name", TensorProto.STRING, ["N", 1]),
        helper.make_tensor_value_info("probability", TensorProto.FLOAT, ["N", 1]),
    ]
    return onnx_model(helper.make_graph(nodes, "naming", [given], gives))


def make_reader(repository: Path, name: str, given: str, gives: str) -> None:
    """A Python model of this folder."""
    write(repository / name / "config.pbtxt", READ_CONFIG.format(name=name, given=given, gives=gives))
    write(repository / name / "1" / "model.py", (HERE / name / "model.py").read_bytes())


def make_naming(repository: Path, name: str, labels: tuple[str, ...]) -> None:
    """The last step of an ensemble."""
    write(repository / name / "config.pbtxt", NAME_CONFIG.format(name=name, classes=len(labels)))
    write(repository / name / "1" / "model.onnx", naming(labels))


def make_ensemble(repository: Path, name: str, **parts: str) -> None:
    """An ensemble is a configuration and an empty version."""
    write(repository / name / "config.pbtxt", ENSEMBLE_CONFIG.format(name=name, **parts))
    (repository / name / "1").mkdir(exist_ok=True)
    print(f"{name}: written")


def make_pictures(repository: Path) -> None:
    """digits_picture: a file in, a digit's name out."""
    gives = 'name: "image" data_type: TYPE_FP32 dims: [ 1, 8, 8 ]'
    make_reader(repository, "digits_read", "file", gives)
    make_naming(repository, "digits_name", DIGITS)
    make_ensemble(
        repository,
        "digits_picture",
        what="The digit in a picture: read the file, recognise it, name the best class.",
        given="file",
        gives="digit",
        read="digits_read",
        prepared="image",
        network="digits_onnx",
        say="digits_name",
    )


def make_topics(repository: Path) -> None:
    """topics: a sentence in, its topic out."""
    program = reader()
    counts = Counter(word for text, _ in load()[0] for word in program.split(text))
    words = [word for word, count in counts.most_common() if count > 1]
    numbers = {word: number for number, word in enumerate(words, program.UNKNOWN + 1)}
    net, right = trained(numbers, program)
    print(f"topics_network: trained, {right:.1%} of held-out sentences told right")
    make_reader(repository, "topics_read", "text", 'name: "words" data_type: TYPE_INT64 dims: [ 40 ]')
    write(repository / "topics_read" / "1" / "words.json", json.dumps(numbers))
    write(repository / "topics_network" / "config.pbtxt", NETWORK_CONFIG)
    write(repository / "topics_network" / "1" / "model.pt", torchscript(net))
    make_naming(repository, "topics_name", LABELS)
    make_ensemble(
        repository,
        "topics",
        what="What a sentence is about: its words' numbers, their topic, its name.",
        given="text",
        gives="topic",
        read="topics_read",
        prepared="words",
        network="topics_network",
        say="topics_name",
    )


def main() -> None:
    """Add to the repository that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="the model repository that examples/digits has made")
    repository = parser.parse_args().directory
    if not (repository / "digits_onnx" / "config.pbtxt").exists():
        parser.error(f"{repository} has no digits_onnx: run examples/digits/make_repository.py first")
    if is_current((repository / name / "config.pbtxt" for name in ("digits_picture", "topics")), HERE.rglob("*.py")):
        print("ensembles: up to date")
        return
    make_pictures(repository)
    make_topics(repository)


if __name__ == "__main__":
    main()

"""Make a Triton model repository with a digit classifier, as TorchScript and as ONNX, and an identity model.

    python make_repository.py DIR

A small convolutional network is trained on scikit-learn's digits, which takes a few seconds, and exported twice from
the same weights. Existing files that are newer than this script are kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from digits_data import LABELS, SEED, load
from onnx import TensorProto, helper, numpy_helper
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))
from making import accuracy, is_current, onnx_model, torchscript, train, write

EPOCHS = 30
BATCH = 64
CHANNELS = (16, 32)
HIDDEN = 64
SOURCES = (Path(__file__), Path(__file__).with_name("digits_data.py"))

DIGITS_CONFIG = """\
# A digit classifier: the probabilities of 0 to 9 for an image of 8 x 8 pixels (0 is paper, 1 is ink).
name: "{name}"
backend: "{backend}"
max_batch_size: 64
input {{ name: "image" data_type: TYPE_FP32 dims: [ 1, 8, 8 ] }}
output {{ name: "probabilities" data_type: TYPE_FP32 dims: [ 10 ] label_filename: "labels.txt" }}
instance_group {{ count: 1 kind: KIND_CPU }}
dynamic_batching {{ }}
"""

IDENTITY_CONFIG = """\
# Answers each request with its own tensor.
name: "identity_fp32"
backend: "identity"
max_batch_size: 64
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { count: 1 kind: KIND_CPU }
dynamic_batching { }
"""


class DigitNet(nn.Module):
    """Two convolutions and two dense layers: (n, 1, 8, 8) to the probabilities (n, 10)."""

    def __init__(self) -> None:
        super().__init__()
        first, second = CHANNELS
        self.conv1 = nn.Conv2d(1, first, 3, padding=1)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1)
        self.dense1 = nn.Linear(second * 4 * 4, HIDDEN)
        self.dense2 = nn.Linear(HIDDEN, len(LABELS))

    def scores(self, image: torch.Tensor) -> torch.Tensor:
        """The trained output: the logarithms of the probabilities up to a constant."""
        x = torch.relu(self.conv1(image))
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.dense2(torch.relu(self.dense1(x.flatten(1))))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """What is served."""
        return torch.softmax(self.scores(image), 1)


def onnx_digits(net: DigitNet) -> bytes:
    """The network as an ONNX model, node by node: it is small, and the exporter would need two packages more."""
    nodes = [
        helper.make_node("Conv", ["image", "conv1.weight", "conv1.bias"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "conv2.weight", "conv2.bias"], ["c2"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c2"], ["r2"]),
        helper.make_node("MaxPool", ["r2"], ["p2"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p2"], ["f"]),
        helper.make_node("Gemm", ["f", "dense1.weight", "dense1.bias"], ["d1"], transB=1),
        helper.make_node("Relu", ["d1"], ["r3"]),
        helper.make_node("Gemm", ["r3", "dense2.weight", "dense2.bias"], ["d2"], transB=1),
        helper.make_node("Softmax", ["d2"], ["probabilities"], axis=1),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, 8, 8])
    answer = helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["N", len(LABELS)])
    weights = [numpy_helper.from_array(value.numpy(), name) for name, value in net.state_dict().items()]
    return onnx_model(helper.make_graph(nodes, "digits", [image], [answer], initializer=weights))


EXPORTS: dict[str, tuple[str, str, Callable[[DigitNet], bytes]]] = {
    "digits_torchscript": ("pytorch", "model.pt", torchscript),
    "digits_onnx": ("onnxruntime", "model.onnx", onnx_digits),
}


def make_digits(repository: Path) -> None:
    """Train, unless both exports are current, and write them."""
    files = {name: (f"1/{file}", "config.pbtxt", "labels.txt") for name, (_, file, _) in EXPORTS.items()}
    if is_current((repository / name / file for name, made in files.items() for file in made), SOURCES):
        print("digits: up to date")
        return
    (images, labels), (held_out, truth) = (map(torch.from_numpy, digits) for digits in load())
    torch.manual_seed(SEED)
    net = DigitNet()
    train(net, images, labels, epochs=EPOCHS, batch=BATCH, rate=2e-3)
    print(f"digits: trained on {len(labels)} images, ", end="")
    print(f"{accuracy(net, held_out, truth):.1%} of {len(truth)} held-out images recognised")
    for name, (backend, file, export) in EXPORTS.items():
        write(repository / name / "labels.txt", "".join(f"{label}\n" for label in LABELS))
        write(repository / name / "config.pbtxt", DIGITS_CONFIG.format(name=name, backend=backend))
        write(repository / name / "1" / file, export(net))
        print(f"{name}: written")


def make_identity(repository: Path) -> None:
    """The identity model has a configuration and an empty version."""
    config = repository / "identity_fp32" / "config.pbtxt"
    if is_current([config], SOURCES):
        print("identity_fp32: up to date")
        return
    (config.parent / "1").mkdir(parents=True, exist_ok=True)
    write(config, IDENTITY_CONFIG)
    print("identity_fp32: written")


def main() -> None:
    """Make the repository that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="the model repository, made if it is not there")
    repository = parser.parse_args().directory
    make_digits(repository)
    make_identity(repository)


if __name__ == "__main__":
    main()

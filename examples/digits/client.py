"""Send held-out handwritten digits to both digit models and compare the responses with the truth.

    python client.py [-u HOST:PORT] [--count N] [--classification]

Only tritonclient is used, so it runs against Triton just as well.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import tritonclient.grpc as triton
from digits_data import LABELS, load
from tritonclient.utils import InferenceServerException

MODELS = ("digits_torchscript", "digits_onnx")
COLUMN = 30  # characters for the response of one model


@dataclass
class Tally:
    """What one model answered so far."""

    right: int = 0
    milliseconds: list[float] = field(default_factory=list)


def request(image: np.ndarray, classification: bool) -> tuple[triton.InferInput, triton.InferRequestedOutput]:
    """The input and the requested output for one image of shape (1, 8, 8)."""
    tensor = triton.InferInput("image", [1, *image.shape], "FP32")
    tensor.set_data_from_numpy(image[np.newaxis])
    return tensor, triton.InferRequestedOutput("probabilities", class_count=1 if classification else 0)


def best(answer: np.ndarray, classification: bool) -> tuple[int, float]:
    """The most likely digit and its probability.

    With the classification extension the server has chosen it and answers "probability:index:label".
    """
    if classification:
        probability, index, _ = answer.reshape(-1)[0].decode().split(":", 2)
        return int(index), float(probability)
    return int(answer[0].argmax()), float(answer[0].max())


def recognise(
    client: triton.InferenceServerClient, model: str, image: np.ndarray, classification: bool
) -> tuple[int, float, float]:
    """Ask one model about one image.

    Returns:
        The digit, its probability and the time that the response took, in milliseconds.
    """
    tensor, output = request(image, classification)
    start = time.perf_counter()
    result = client.infer(model, [tensor], outputs=[output])
    milliseconds = (time.perf_counter() - start) * 1e3
    digit, probability = best(result.as_numpy("probabilities"), classification)
    return digit, probability, milliseconds


def show(client: triton.InferenceServerClient, count: int, classification: bool) -> dict[str, Tally]:
    """Print a line for each image, with the response of each model."""
    _, digits = load()
    tallies = {model: Tally() for model in MODELS}
    for model in MODELS:
        recognise(client, model, digits.images[0], classification)  # the first call sets things up and is not timed
    print(("image  true   " + "".join(f"{model:<{COLUMN}}" for model in MODELS)).rstrip())
    for number in range(min(count, len(digits.labels))):
        truth = int(digits.labels[number])
        line = f"{number:5}  {LABELS[truth]:<7}"
        for model, tally in tallies.items():
            digit, probability, milliseconds = recognise(client, model, digits.images[number], classification)
            tally.right += digit == truth
            tally.milliseconds.append(milliseconds)
            mark = " " if digit == truth else "!"
            line += f"{f'{LABELS[digit]:<6}{mark} {probability:6.1%} {milliseconds:7.2f} ms':<{COLUMN}}"
        print(line.rstrip())
    return tallies


def summarise(tallies: dict[str, Tally]) -> None:
    """Print how often each model was right, and how fast."""
    print()
    for model, tally in tallies.items():
        count = len(tally.milliseconds)
        median = float(np.median(tally.milliseconds))
        print(f"{model:<20}{tally.right:4} of {count} right ({tally.right / count:.1%}), median {median:.2f} ms")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-u", "--url", default="localhost:8001", help="host and port of the server (%(default)s)")
    parser.add_argument("--count", type=int, default=20, help="how many images to send (%(default)s)")
    parser.add_argument("--classification", action="store_true", help="let the server choose the best class")
    options = parser.parse_args(arguments)
    if options.count < 1:
        parser.error("--count must be at least 1")
    return options


def main() -> int:
    """Run; 1 if the server does not answer."""
    options = parse()
    try:
        with triton.InferenceServerClient(options.url) as client:
            summarise(show(client, options.count, options.classification))
    except InferenceServerException as error:
        print(f"{options.url}: {error}\nIs the demo served there? -u HOST:PORT says where else.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # of `client.py | head`: end when the reader is gone
    sys.exit(main())

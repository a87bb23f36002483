"""Send pictures of held-out digits and held-out sentences to the two ensembles; compare responses with the truth.

    python client.py [-u HOST:PORT] [--count N]

Only tritonclient is used, so it runs against Triton just as well.
"""

from __future__ import annotations

import argparse
import io
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from PIL import Image
from topics_data import LABELS
from topics_data import load as load_topics
from tritonclient.utils import InferenceServerException

sys.path.append(str(Path(__file__).parents[1] / "digits"))
from digits_data import LABELS as DIGITS
from digits_data import load as load_digits

SCALE = 16  # how much larger than the network's 8 x 8 the pictures are


def picture(image: np.ndarray, form: str) -> bytes:
    """A digit as a file: black ink on white paper."""
    pixels = (255 * (1 - image[0])).round().astype(np.uint8)
    out = io.BytesIO()
    large = Image.fromarray(pixels).resize((8 * SCALE, 8 * SCALE), Image.Resampling.NEAREST)
    large.save(out, form)
    return out.getvalue()


def pictures(count: int) -> Iterator[tuple[bytes, str, str]]:
    """(file, text to print, the truth), PNG and JPEG in turn."""
    _, digits = load_digits()
    for number in range(min(count, len(digits.labels))):
        form = ("PNG", "JPEG")[number % 2]
        file = picture(digits.images[number], form)
        yield file, f"{form}, {len(file)} bytes", DIGITS[int(digits.labels[number])]


def sentences(count: int) -> Iterator[tuple[bytes, str, str]]:
    """(text, text to print, the truth), evenly over the topics."""
    _, found = load_topics()
    for text, topic in found[:: max(1, len(found) // count)][:count]:
        yield text.encode(), text if len(text) <= 60 else f"{text[:57]}...", LABELS[topic]


def ask(
    client: triton.InferenceServerClient, model: str, tensor: str, content: bytes, output: str
) -> tuple[str, float]:
    """The name that an ensemble gives, and its probability."""
    given = triton.InferInput(tensor, [1, 1], "BYTES")
    given.set_data_from_numpy(np.array([[content]], object))
    result = client.infer(model, [given])
    return result.as_numpy(output).item().decode(), result.as_numpy("probability").item()


def show(
    client: triton.InferenceServerClient, model: str, tensor: str, output: str, asked: Iterator[tuple[bytes, str, str]]
) -> None:
    """Print a line for each response, and how many were right."""
    print(f"{model:<61}true          answer")
    right = count = 0
    for content, shown, truth in asked:
        name, probability = ask(client, model, tensor, content, output)
        right += name == truth
        count += 1
        print(f"{shown:<60} {truth:<13} {name:<13} {probability:6.1%}{'' if name == truth else ' !'}")
    print(f"{right} of {count} right\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-u", "--url", default="localhost:8001", help="host and port of the server (%(default)s)")
    parser.add_argument("--count", type=int, default=10, help="how many of each to send (%(default)s)")
    options = parser.parse_args(arguments)
    if options.count < 1:
        parser.error("--count must be at least 1")
    return options


def main() -> int:
    """Run; 1 if the server does not answer."""
    options = parse()
    try:
        with triton.InferenceServerClient(options.url) as client:
            show(client, "digits_picture", "file", "digit", pictures(options.count))
            show(client, "topics", "text", "topic", sentences(options.count))
    except InferenceServerException as error:
        print(f"{options.url}: {error}\nIs the demo served there? -u HOST:PORT says where else.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # of `client.py | head`: end when the reader is gone
    sys.exit(main())

"""Have sentences classified, and talk to the chat.

    python client.py [-u HOST:PORT] [TEXT]

Only tritonclient is used, so it runs against Triton just as well.
"""

from __future__ import annotations

import argparse
import queue
import signal
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

SENTENCES = ("The function returns a new list.", "It is an error to call it twice.")


def text_input(*texts: str, shape: list[int]) -> triton.InferInput:
    """The input `text`."""
    array = np.array([text.encode() for text in texts], object).reshape(shape)
    return triton.InferInput("text", shape, "BYTES").set_data_from_numpy(array)


def chat(client: triton.InferenceServerClient, text: str) -> None:
    """Print the answer word by word, as the words come."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error or result))
    client.async_stream_infer("chat", [text_input(text, shape=[1])], enable_empty_final_response=True)
    print(f"> {text}")
    while not isinstance(answer := answers.get(), Exception):
        if answer.get_response().parameters["triton_final_response"].bool_param:
            break
        word = answer.as_numpy("word").item().decode()
        print(word if word in ".,;:!?)" else f" {word}", end="", flush=True)
    print(answer if isinstance(answer, Exception) else "")
    client.stop_stream()


def classify(client: triton.InferenceServerClient, *sentences: str) -> None:
    """Print the class of each sentence."""
    found = client.infer("sentiment", [text_input(*sentences, shape=[len(sentences), 1])]).as_numpy("prob")
    for sentence, label in zip(sentences, found.ravel(), strict=True):
        print(f"{label.decode():10} {sentence}")


def main() -> int:
    """Do both; 1 if the server does not answer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", nargs="?", default="What does len do?")
    parser.add_argument("-u", "--url", default="127.0.0.1:8001")
    arguments = parser.parse_args()
    try:
        with triton.InferenceServerClient(arguments.url) as client:
            classify(client, *SENTENCES)
            chat(client, arguments.text)
    except InferenceServerException as error:
        print(f"{arguments.url}: {error}\nAre the models served there? -u HOST:PORT says where else.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # of `client.py | head`: end when the reader is gone
    sys.exit(main())

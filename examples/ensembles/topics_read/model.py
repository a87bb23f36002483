"""Turns sentences into the numbers of their words, as the topic network takes them."""

import json
import re
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

LONGEST = 40
PAD, UNKNOWN = 0, 1


def split(text: str) -> list[str]:
    """Its words in lower case."""
    return re.findall(r"[a-z_]+", text.lower())


def encode(text: str, numbers: dict[str, int]) -> list[int]:
    """The numbers of its first words, filled up to LONGEST."""
    words = [numbers.get(word, UNKNOWN) for word in split(text)[:LONGEST]]
    return words + [PAD] * (LONGEST - len(words))


class TritonPythonModel:
    """The first step of `topics`."""

    def initialize(self, args):
        """Read the words that the network knows."""
        folder = Path(args["model_repository"]) / args["model_version"]
        self.numbers = json.loads((folder / "words.json").read_text())

    def execute(self, requests):
        """A sentence a row."""
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().reshape(-1)
            rows = np.array([encode(text.decode(errors="replace"), self.numbers) for text in texts], np.int64)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("words", rows)]))
        return responses

"""scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels, split the same way wherever this is imported."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SEED = 7
LABELS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Digits(NamedTuple):
    """Images and their digits."""

    images: np.ndarray  # FP32, (n, 1, 8, 8), 0 is paper and 1 is ink
    labels: np.ndarray  # INT64, (n,), 0 to 9


def load() -> tuple[Digits, Digits]:
    """The digits for training, and a quarter held out for testing."""
    raw = load_digits()
    images = (raw.images / 16).astype(np.float32)[:, np.newaxis]
    labels = raw.target.astype(np.int64)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.25, random_state=SEED, stratify=labels
    )
    return Digits(train_images, train_labels), Digits(test_images, test_labels)

"""A text classifier: one run of BERT for all requests of a batch."""

from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import AutoTokenizer, BertForSequenceClassification

LABELS = np.array([b"bad news", b"good news"], dtype=object)


class TritonPythonModel:
    """Input: `text`, sentences. Output: `prob`, the class of each."""

    def initialize(self, args):  # noqa: ARG002 (every model gets them)
        folder = Path(pb_utils.get_model_dir()) / "sentiment"
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = BertForSequenceClassification.from_pretrained(folder).eval()

    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "text").as_numpy() for request in requests]
        sentences = [text.decode() for array in texts for text in array.ravel()]
        encoded = self.tokenizer(sentences, padding=True, truncation=True, max_length=512, return_tensors="pt")
        with torch.inference_mode():
            found = LABELS[self.model(**encoded).logits.argmax(1).numpy()]
        parts = np.split(found, np.cumsum([array.size for array in texts])[:-1])
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("prob", part.reshape(array.shape))])
            for part, array in zip(parts, texts, strict=True)
        ]

"""Reads pictures (PNG, JPEG or whatever Pillow knows; dark ink on light paper) as the digit models take them."""

import io

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image

SIZE = 8


def read(file: bytes) -> np.ndarray:
    """One picture as (1, 8, 8): 0 is paper, 1 is ink."""
    picture = Image.open(io.BytesIO(file)).convert("L").resize((SIZE, SIZE), Image.Resampling.BOX)
    return (1 - np.asarray(picture, np.float32) / 255)[np.newaxis]


class TritonPythonModel:
    """The first step of `digits_picture`."""

    def execute(self, requests):
        """A file a row; a file that is no picture fails its own request only."""
        responses = []
        for request in requests:
            files = pb_utils.get_input_tensor_by_name(request, "file").as_numpy().reshape(-1)
            try:
                images = np.stack([read(file) for file in files])
            except OSError as error:
                responses.append(pb_utils.InferenceResponse([], pb_utils.TritonError(f"this is no picture: {error}")))
                continue
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("image", images)]))
        return responses

"""A chat, word by word: asks the language model for the next word through BLS, and streams each word as it is found."""

import json
from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from corpus import CLS, SEP, SPEAKER1, SPEAKER2, SPECIAL, Words

LANGUAGE_MODEL = "ibuddha_chitchat"
LONGEST = 40


class TritonPythonModel:
    """Input: `text`, the user's message. Output: `word`, of each response. Request parameters: `longest`, `seed`."""

    def initialize(self, args):  # noqa: ARG002 (every model gets them)
        self.words = Words(json.loads((Path(pb_utils.get_model_dir()) / "words.json").read_text()))

    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                await self.answer(request, sender)
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except pb_utils.TritonModelException as error:
                sender.send(
                    pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))),
                    pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
                )

    async def answer(self, request, sender):
        parameters = json.loads(request.parameters())
        chance = torch.Generator().manual_seed(int(parameters.get("seed", 0)))
        text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().item().decode()
        said = self.words.encode(text)
        ids = [CLS, SPEAKER1, *said, SPEAKER2]
        speakers = [SPEAKER1] * (2 + len(said)) + [SPEAKER2]
        for _ in range(int(parameters.get("longest", LONGEST))):
            if request.is_cancelled():
                return
            number = choose(await self.scores(ids, speakers), chance)
            if number == SEP:
                return
            ids.append(number)
            speakers.append(SPEAKER2)
            word = np.array([self.words.decode(number).encode()], dtype=object)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("word", word)]))

    async def scores(self, ids, speakers):
        """The language model's scores of every next word."""
        values = (ids, [1] * len(ids), speakers)
        inputs = [pb_utils.Tensor(f"INPUT__{i}", np.array([value], np.int64)) for i, value in enumerate(values)]
        request = pb_utils.InferenceRequest(
            model_name=LANGUAGE_MODEL, requested_output_names=["OUTPUT__0"], inputs=inputs
        )
        response = await request.async_exec()
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        return torch.from_dlpack(pb_utils.get_output_tensor_by_name(response, "OUTPUT__0"))[0]


def choose(scores, chance):
    """One of the likely words, at random: those that make up 70 % of the probability."""
    scores[[number for number in SPECIAL if number != SEP]] = -torch.inf
    ordered, numbers = torch.softmax(scores / 0.7, 0).sort(descending=True)
    likely = int((ordered.cumsum(0) < 0.7).sum()) + 1
    return int(numbers[torch.multinomial(ordered[:likely], 1, generator=chance)])

"""Random inference requests whose answers prove themselves.

The nonce determines the request: model, rows, shapes, payload, id, raw or typed tensors, requested outputs, intended
errors. The models are identities (INPUTn comes back as OUTPUTn), so an answer is right only if its id, its shapes and
every byte are those of its request: another call's answer, a row of another request in the batch, or bytes of an
earlier tensor cannot pass.

`encode` and `verify` have an encoder and a decoder of their own, because they verify `inferd._native.protobuf.codec`.
"""

from bench.nonce.workload import DATATYPES, NonceWorkload

__all__ = ["DATATYPES", "NonceWorkload"]

"""Random inference requests whose answers prove themselves.

A request follows from its nonce alone: model, rows, shapes, payload, id, whether tensors travel raw or typed, which
outputs are named, whether it is wrong on purpose. The models are identities (INPUTn comes back as OUTPUTn), so an
answer is right only if its id, shapes and every byte are those of this very request: an answer that belongs to
another call, a row of a batch mate, or bytes of an earlier tensor cannot pass.

Encoding and decoding of messages (`encode`, `verify`) are written here once more, apart from `_native.protobuf.codec`,
because they verify it.
"""

from bench.nonce.workload import DATATYPES, NonceWorkload

__all__ = ["DATATYPES", "NonceWorkload"]

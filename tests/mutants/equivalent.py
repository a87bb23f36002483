"""Mutants that do what the sound code does, each with the reason why nothing can be seen of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.mutants.record import Entry


@dataclass(frozen=True)
class Proof:
    """A proof that a mutant behaves like the original, wherever in its function it stands.

    Attributes:
        before, after: the statements, without and with it.
        why: one sentence.
    """

    file: str
    function: str
    before: str
    after: str
    why: str

    @property
    def change(self) -> str:
        """On one line."""
        return " → ".join(" ".join(text.split()) for text in (self.before, self.after))

    def covers(self, entry: Entry) -> bool:
        return (self.file, self.function, self.before, self.after) == (
            entry.file,
            entry.function,
            entry.before,
            entry.after,
        )


PROOFS: tuple[Proof, ...] = (
    Proof(
        "_native/caching/cache_key.pyx",
        "key_digest",
        "XXH3_128bits_update(&state, &head, sizeof(head))\n"
        "            XXH3_128bits_update(&state, input.shape, input.rank * sizeof(int64_t))",
        "XXH3_128bits_update(&state, input.shape, input.rank * sizeof(int64_t))\n"
        "            XXH3_128bits_update(&state, &head, sizeof(head))",
        "The digest stays in the process, and `key_same` compares shapes and sizes exactly beside it.",
    ),
    Proof(
        "backends/python/_channel.pyx",
        "channel_give",
        "condition_destroy(&channel.changed)",
        "pass",
        "Nobody waits for the condition any more, and glibc has nothing to free of one.",
    ),
    Proof(
        "_native/scheduling/queue.pyx",
        "grow",
        "if not queue.policy.batching or queue.levels.count == 0:",
        "if queue.levels.count == 0:",
        "Without batching the plan below is of one request, which is no more than the batch has: NULL as well.",
    ),
    Proof(
        "_native/cuda/memory.pyx",
        "begin",
        "self.source = <SlabSource *>calloc(1, sizeof(SlabSource))",
        "self.source = <SlabSource *>calloc(2, sizeof(SlabSource))",
        "More memory than is used.",
    ),
    Proof(
        "_native/execution/gather.pyx",
        "padded_length",
        "cdef uint32_t axis = signature.inputs[input].pad_axis + (signature.max_batch_size > 0)",
        "cdef uint32_t axis = signature.inputs[input].pad_axis + (signature.max_batch_size >= 0)",
        "Only models with max_batch_size > 0 have padded inputs: the configuration of another is refused.",
    ),
    Proof(
        "_native/file_contents.pyx",
        "read_opened",
        "if error or size[0] < capacity or size[0] > limit:",
        "if size[0] < capacity or size[0] > limit:",
        "With an error, `read_upto` has read less than it was asked for, so that less than the capacity is read.",
    ),
    Proof(
        "_native/file_contents.pyx",
        "look_for",
        "found = False",
        "pass",
        "`begins_with` sets it, or returns an error, which is looked at first; without it the compiler warns.",
    ),
    Proof(
        "_native/protobuf/wire.pyx",
        "utf8_sequence",
        "elif 0xF0 <= lead <= 0xF4:",
        "elif 239 <= lead <= 0xF4:",
        "The branch before takes 0xEF (239), so that it never comes here.",
    ),
    Proof(
        "_native/execution/warmup.pyx",
        "warmup_requests",
        "request = first",
        "pass",
        "The request that was made last is the first of the list, and the configuration has a count of 1 at least.",
    ),
    Proof(
        "_native/model_files.pyx",
        "look_at_folder",
        "cdef uint64_t hash = hash_on(0, folder.path)",
        "cdef uint64_t hash = hash_on(1, folder.path)",
        "Sums of hashes are only compared with others that began with the same number.",
    ),
    Proof(
        "backends/identity/_identity.pyx",
        "window_give",
        "condition_destroy(&window.changed)",
        "pass",
        "Nobody waits for the condition any more, and glibc has nothing to free of one.",
    ),
    Proof(
        "_native/transport/thread_pool.pyx",
        "__dealloc__",
        "mutex_destroy(&self.thread_pool.guard)",
        "pass",
        "Nobody holds the mutex any more, and glibc has nothing to free of one.",
    ),
    Proof(
        "_native/protobuf/codec.pyx",
        "decode_input",
        "str_clear(&head.datatype)",
        "pass",
        "Of a text without bytes only the size is looked at, which is zero already: no reader needs an address.",
    ),
    Proof(
        "_native/protobuf/contents.pyx",
        "contents_copy",
        "return",
        "pass",
        "`infer_decode` has read the same bytes before, and refuses what would end here.",
    ),
    Proof(
        "_native/transport/eviction.pyx",
        "find_debtors",
        "if debt_with(conn) == together and account_owed(&conn.account):",
        "if debt_with(conn) == together:",
        "All debts of a connection that owes no bytes are zero, and `add_debtor` keeps none of these.",
    ),
)

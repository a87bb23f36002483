"""The limits of the curves of bench.growth, and the tests that guard them without a clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of one curve.

    Attributes:
        text: what is wanted.
        tests: they count instructions, looks or objects instead of time.
        remark: why the goal is not met, or how it is met in another way.
    """

    text: str
    tests: tuple[str, ...] = ()
    remark: str = ""


LINEAR = "tests/engine/test_linear.py"
MANY = "tests/engine/test_many_models.py"

GOALS = {
    "pool": Goal(
        "no size is dearer after a burst of another; at most 0.17 ns a byte from 64 KiB on",
        tests=("tests/native/test_memory.py::test_a_size_that_is_asked_for_displaces_others",),
    ),
    "models": Goal(
        "at most 0.5 ms and 20 KiB a model",
        tests=(
            f"{MANY}::test_start_looks_at_each_model_a_few_times_whatever_their_number",
            f"{MANY}::test_one_more_model_of_a_kind_takes_few_calls",
            f"{MANY}::test_start_lists_the_folder_of_each_model_once_and_opens_its_backend_once",
            f"{MANY}::test_one_more_model_takes_little_memory_of_the_interpreter",
            f"{MANY}::test_start_makes_few_threads_and_an_instance_gets_its_own_with_the_first_request",
        ),
        remark="A fifth of it is the system's, for looks at files; most of the rest is Python that reads "
        "configurations and makes versions. Instances of these models get their threads with the first request. Loads "
        "that take less than 5 ms follow each other on one thread: four threads that contended for the interpreter's "
        "lock took three to four times as long. Each size takes over memory that smaller ones have freed; in a "
        "process of its own a start of 1,000 models takes 19.7 KiB a model.",
    ),
    "kinds": Goal(
        "does not depend on the number of models",
        tests=(f"{MANY}::test_start_looks_at_each_model_a_few_times_whatever_their_number",),
        remark="Models that differ in nothing but their names share one check and one specification. Here each model "
        "has its own.",
    ),
    "ready": Goal(
        "does not depend on the number of models", tests=(f"{MANY}::test_readiness_is_known_and_not_found_out",)
    ),
    "statistics": Goal(
        "at most 3 us of the loop a model, in slices",
        tests=(
            f"{MANY}::test_statistics_of_one_more_model_take_few_instructions",
            f"{MANY}::test_others_have_their_turn_while_statistics_are_gathered",
        ),
    ),
    "index": Goal(
        "at most 3 us of the loop a model, in slices",
        tests=(
            f"{MANY}::test_the_index_looks_at_no_folder_of_a_model_that_is_known",
            f"{MANY}::test_the_index_makes_few_calls_for_one_more_model",
        ),
    ),
    "polls": Goal(
        "at most 30 us a model, almost all of it the system's",
        tests=(
            f"{MANY}::test_a_poll_makes_few_calls_for_one_more_model",
            "tests/engine/test_repository.py::test_a_look_ends_when_it_is_told_to",
        ),
    ),
    "stops": Goal(
        "linear in the models; others have their turn on the loop meanwhile",
        tests=(f"{MANY}::test_others_have_their_turn_while_all_models_are_unloaded",),
    ),
    "graphs": Goal(
        "polynomial in the depth, although there are 2^depth ways through the ensembles",
        tests=(f"{MANY}::test_ensembles_that_share_steps_are_looked_at_once_each",),
        remark="What is told of each ensemble is looked up in all that are below it.",
    ),
    "tensors": Goal(
        "linear in the inputs and outputs that are named", tests=(f"{LINEAR}::test_inputs_and_outputs_by_name",)
    ),
    "parameters": Goal("linear in the parameters", tests=(f"{LINEAR}::test_parameters_wrong_and_right",)),
    "split": Goal("linear in the rows", tests=(f"{LINEAR}::test_a_request_that_is_split",)),
    "responses": Goal(
        "linear in the responses; what is held does not grow with them",
        tests=("tests/engine/test_decoupled_ensembles.py::test_responses_that_nobody_takes_are_not_made",),
    ),
    "reloads": Goal(
        "nothing stays of versions that were replaced",
        tests=("tests/engine/test_departed.py::test_nothing_stays",),
        remark="The loop never idles here, so this is how long a reload takes, almost all of it the requests' work. "
        "Where the interpreter lets a thread wait 5 ms for its lock, as it does by default, and not 50 us as in a "
        "server, a reload takes 0.2 to 0.6 s.",
    ),
    "shapes": Goal(
        "batches as full as with a single shape, as long as there are requests enough of each",
        tests=("tests/native/test_queue.py::test_shapes_that_come_in_turn_make_full_batches",),
    ),
    "cache": Goal("an input is read once", tests=("tests/engine/test_cache.py::test_a_hit_reads_a_large_input_once",)),
    "connections": Goal("as near to nghttpd as a packet's system calls let it be (http2)"),
    "http2": Goal(
        "at most 3 times nghttpd",
        tests=(
            "tests/native/test_http2.py::test_what_connections_ask_one_after_the_other_is_begun_when_the_round_ends",
        ),
        remark="With a call on each of many connections, both servers read and write a packet for each request; here "
        "decoding, the queue, the instance and the encoding come on top, and the loop's callbacks in Python. Instances "
        "are woken once in a round of reads: without that each request of 64 connections woke one 0.2 to 1.3 times, "
        "with it 0.1 to 0.2 times.",
    ),
    "streams": Goal(
        "1,000 streams on a connection cost no more each than 32",
        tests=("tests/conformance/test_many_streams.py",),
    ),
    "regions": Goal("never dearer than on the wire", tests=("tests/backends/python/test_regions.py",)),
    "steps": Goal("as on the wire", tests=("tests/backends/python/test_ensembles.py",)),
    "calls": Goal(
        "each level costs the same",
        remark="A level is a trip to another worker process and back; 16 levels are 17 processes, here on two cores.",
    ),
}
"""By the name of the curve."""

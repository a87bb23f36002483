"""Makes tiny models with TensorFlow, as a program of its own: python tensorflow_models.py FOLDER."""

import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf

v1 = tf.compat.v1


def save(folder, name, function, signature, others=None):
    module = tf.Module()
    module.weight = tf.Variable(2.0)
    module.call = tf.function(lambda *arguments: function(module, *arguments), input_signature=signature)
    signatures = {"serving_default": module.call}
    for other, of_it in (others or {}).items():
        signatures[other] = tf.function(lambda x, of_it=of_it: of_it(module, x), input_signature=signature)
    tf.saved_model.save(module, str(folder / name), signatures=signatures)


def main(folder: Path) -> None:
    def x(dtype, shape, name="x"):
        return tf.TensorSpec(shape, dtype, name=name)

    save(
        folder,
        "linear",
        lambda module, x: {"y": x * module.weight + 1},
        [x(tf.float32, [None, 2])],
        {"squared": lambda module, x: {"y": x * x}},
    )
    save(
        folder,
        "fixed",
        lambda module, x, one: {"y": x + 1, "two": one + 1},
        [x(tf.float32, [2, 2]), x(tf.float32, [], "one")],
    )
    save(
        folder,
        "sums",
        lambda module, x, ends: {
            "y": tf.math.segment_sum(x, tf.searchsorted(ends, tf.range(tf.size(x)), side="right"))
        },
        [x(tf.float32, [None]), x(tf.int32, [None], "ends")],
    )
    save(
        folder,
        "broken",
        lambda module, x: {"y": tf.debugging.check_numerics(x, "not a number")},
        [x(tf.float32, [None, 2])],
    )
    whole = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    kinds = ["bool", *whole, "float16", "float32", "float64", "bfloat16", "string"]
    save(
        folder,
        "reversed",
        lambda module, *given: {f"y_{kind}": tf.reverse(each, [1]) for kind, each in zip(kinds, given, strict=True)},
        [x(tf.as_dtype(kind), [None, 2], f"x_{kind}") for kind in kinds],
    )
    with tf.Graph().as_default() as graph:
        given = v1.placeholder(tf.float32, [None, 2], name="x")
        offset = v1.get_variable("offset", initializer=5.0, use_resource=False)
        tf.add(given, offset, name="y")
        v1.global_variables_initializer()  # the operator "init"
        (folder / "graph.graphdef").write_bytes(graph.as_graph_def().SerializeToString())


if __name__ == "__main__":
    main(Path(sys.argv[1]))

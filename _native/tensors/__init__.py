"""The tensors of a request: found in its message or in shared memory, checked against the model's signature; and
those of its answer, brought into the form that was asked for."""

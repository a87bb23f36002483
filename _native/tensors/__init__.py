"""The tensors of a request, found in its message or in shared memory and checked against the model's signature; and
those of its response, converted to the form that the client asked for."""

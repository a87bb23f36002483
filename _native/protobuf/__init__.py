"""The inference messages of the protocol: decoding and encoding without objects."""

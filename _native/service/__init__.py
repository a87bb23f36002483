"""Where it comes together: ModelInfer, who may ask, decoding and checking, placement, submission, the models."""

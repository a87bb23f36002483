"""Where it comes together: ModelInfer, who may ask, submission, the table of models, the bytes of answers."""

"""ModelInfer: access, submission, the table of models, the encoding of responses."""

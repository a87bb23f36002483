VERDICTS: tuple[str, ...]
